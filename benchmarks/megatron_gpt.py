"""The GPT that Megatron-LM trained in 2021, for benchmarks/published.py: attention that writes its scores to memory,
and dropout.

Scores, probabilities and dropped probabilities of all pairs of tokens go through memory, 5 a s^2 b of the bytes that
Korthikanti et al., arXiv 2205.05198, section 4.1, count for a layer. Megatron's kernel masks, scales and normalises in
one pass over the scores; here the scale is that of the queries and there is no mask, as both would be kernels of their
own. So the numbers that this model gives are no language model's; its ops, shapes and bytes are those of the runs.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from autopar import models

DROPOUT = 0.1  # of attention and of what blocks add: the defaults of Megatron-LM


class Attention(nn.Module):
    """(B, S, H) -> (B, S, H) with the projections of the builder's attention. Probabilities are at most 1: that this is
    said changes nothing but that autopar does not make one op of the whole, which it would for a user."""

    def __init__(self, other: nn.Module):
        super().__init__()
        self.heads, self.c_attn, self.c_proj = other.heads, other.c_attn, other.c_proj

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        depth = hidden // self.heads
        q, k, v = (
            part.view(batch, seq, self.heads, depth).transpose(1, 2)  # (B, heads, S, D)
            for part in self.c_attn(x).split(hidden, dim=-1)
        )
        probabilities = F.softmax((q * depth**-0.5) @ k.transpose(2, 3), dim=-1, dtype=x.dtype)  # (B, heads, S, S)
        mixed = F.dropout(probabilities.clamp(max=1.0), DROPOUT, self.training) @ v
        return F.dropout(self.c_proj(mixed.transpose(1, 2).reshape(batch, seq, hidden)), DROPOUT, self.training)


class FeedForward(nn.Module):
    """The builder's, with dropout of what it adds."""

    def __init__(self, other: nn.Module):
        super().__init__()
        self.c_fc, self.c_proj = other.c_fc, other.c_proj

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")), DROPOUT, self.training)


def build(name: str, batch: int, seq: int) -> tuple[nn.Module, dict]:
    """(model, inputs) as `autopar.models.build` has them for a name of its builder `gpt`."""
    model, inputs = models.build(name, batch=batch, seq=seq)
    for block in model.h:
        block.attn, block.mlp = Attention(block.attn), FeedForward(block.mlp)
    return model, inputs
