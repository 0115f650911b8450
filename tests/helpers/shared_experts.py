"""Mixtures of experts with a shared one in layers of a list, in fp64, and a machine where collectives run beside
compute."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from autopar.hardware.profile import Hardware, load
from tests.planner.planning import toy

HIDDEN = 8


def gpus(flops: float = 1e10, link: float = 1e9, **options) -> Hardware:
    """A toy machine of GPUs."""
    return replace(toy(flops=flops, link=link, **options), nccl=load("h100").nccl, overlap_slowdown=1.2)


class Layer(nn.Module):
    """A mixture of experts for tokens (b, s, h), `active` of them for each, and a shared expert, which is computed
    `first` or last, and weighted if it is `gated`."""

    def __init__(self, experts: int, active: int, first: bool, gated: bool):
        super().__init__()
        self.active, self.first = active, first
        self.norm, self.router = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(experts, HIDDEN, 12) / 3)
        self.down = nn.Parameter(torch.randn(experts, 6, HIDDEN) / 3)
        self.shared_up, self.shared_down = nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN)
        self.gate = nn.Linear(HIDDEN, 1) if gated else None

    def forward(self, x):
        hidden = self.norm(x)
        shared = self.shared(hidden) if self.first else None
        tokens = hidden.reshape(-1, HIDDEN)
        weights, which = self.router(tokens).softmax(-1).topk(self.active)
        rows, expert = tokens.repeat_interleave(self.active, 0), which.reshape(-1)
        gate, up = torch.bmm(rows.unsqueeze(1), self.gate_up[expert]).squeeze(1).chunk(2, -1)
        y = torch.bmm((nn.functional.silu(gate) * up).unsqueeze(1), self.down[expert]).squeeze(1)
        y = (y * weights.reshape(-1, 1)).view(len(tokens), self.active, HIDDEN).sum(1).view_as(x)
        return x + y + (self.shared(hidden) if shared is None else shared)

    def shared(self, hidden):
        y = self.shared_down(self.shared_up(hidden).relu())
        return y if self.gate is None else y * self.gate(hidden).sigmoid()


class SharedExperts(nn.Module):
    """Such layers between two linear ones, and a loss."""

    def __init__(
        self,
        layers: int = 2,
        experts: int = 4,
        active: int = 2,
        first: bool = False,
        gated: bool = False,
        seed: int = 0,
    ):
        super().__init__()
        torch.manual_seed(seed)
        self.inward, self.outward = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 4)
        self.layers = nn.ModuleList(Layer(experts, active, first, gated) for _ in range(layers))
        self.double()

    def forward(self, x):
        x = self.inward(x)
        for layer in self.layers:
            x = layer(x)
        return self.outward(x).square().mean()


def inputs(samples: int = 12, length: int = 8) -> tuple[torch.Tensor, ...]:
    return (torch.randn(samples, length, HIDDEN, dtype=torch.float64),)
