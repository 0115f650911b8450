"""Small networks that the programs build on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    """x (B, inputs) -> (B, outputs)."""

    def __init__(self, inputs: int = 6, hidden: int = 10, outputs: int = 3):
        super().__init__()
        self.up, self.down = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)

    def features(self, x):
        return torch.tanh(self.up(x))

    def forward(self, x):
        return self.down(self.features(x))


class Tokens(nn.Module):
    """ids (B, S) -> logits (B, S, vocab), of one block with attention."""

    def __init__(self, vocab: int = 13, width: int = 12, heads: int = 3, dropout: float = 0.0):
        super().__init__()
        self.embed, self.block, self.head = (
            nn.Embedding(vocab, width),
            Block(width, heads, dropout),
            nn.Linear(width, vocab),
        )

    def forward(self, ids):
        return self.head(self.block(self.embed(ids)))


class Block(nn.Module):
    """x (B, S, width) -> the same."""

    def __init__(self, width: int = 12, heads: int = 3, dropout: float = 0.0):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.dropout(self.proj(mixed))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Heads(nn.Module):
    """(B, S, 8) -> queries, keys and values of two heads, (B, 2, S, 4) each."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def heads(self, x):
        return (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
