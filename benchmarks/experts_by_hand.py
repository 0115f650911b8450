"""Experts of a mixture that are cut over processes, as one writes it by hand. For benchmarks/peers_experts.py.

Each process has some of the experts and some of the tokens. A token's row goes to the owner of each of its experts in
one all-to-all of uneven sizes, which a first one tells; the owner sorts what comes by expert, computes with
torch._grouped_mm, and the rows go back the same way, as torchtitan and Megatron-Core do it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F


class Exchange(torch.autograd.Function):
    """Sends rows to the other processes; gradients go back."""

    @staticmethod
    def forward(ctx, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sizes = sent, received
        return exchanged(rows, sent, received)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        sent, received = ctx.sizes
        return exchanged(grad.contiguous(), received, sent), None, None


def exchanged(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows, received, sent)
    return out


class OwnExperts(nn.Module):
    """Takes the place of a MixtralExperts, of whose weights it keeps those of this process."""

    def __init__(self, whole: nn.Module):
        super().__init__()
        size, rank = dist.get_world_size(), dist.get_rank()
        self.experts, self.act_fn = whole.num_experts, whole.act_fn
        self.gate_up_proj = nn.Parameter(whole.gate_up_proj.detach().chunk(size)[rank].clone())
        self.down_proj = nn.Parameter(whole.down_proj.detach().chunk(size)[rank].clone())

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        size, active = dist.get_world_size(), top_k_index.shape[1]
        order = top_k_index.flatten().argsort(stable=True)
        counts = torch.bincount(top_k_index.flatten(), minlength=self.experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent, received = (x.view(size, -1).sum(1).tolist() for x in (counts, theirs))
        rows = Exchange.apply(hidden_states[order // active], sent, received)
        own = torch.arange(self.experts // size).repeat(size).repeat_interleave(theirs).argsort(stable=True)
        made = torch.empty_like(own).scatter_(0, own, torch.arange(len(own)))  # the inverse
        ends = theirs.view(size, -1).sum(0).cumsum(0).int()
        gate, up = torch._grouped_mm(rows[own], self.gate_up_proj.transpose(1, 2), offs=ends).chunk(2, -1)
        y = torch._grouped_mm(self.act_fn(gate) * up, self.down_proj.transpose(1, 2), offs=ends)
        back = Exchange.apply(y[made], received, sent)
        weighted = back * top_k_weights.flatten()[order, None]
        return torch.zeros_like(hidden_states).index_add(0, order // active, weighted.to(hidden_states.dtype))


def loss_of(logits: Tensor, labels: Tensor, tokens: int) -> Tensor:
    """Return the sum of the losses of the labels over the number of `tokens` of all processes."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum") / tokens
