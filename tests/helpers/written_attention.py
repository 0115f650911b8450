"""A model in fp64 whose attention is written out as products and a softmax, in the ways that libraries do.

All places count in its loss, also those whose keys a lowest number closes all: a softmax attends to them alike.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .sequences import VOCABULARY

KINDS = """
plain added filled_inf filled_lowest filled_1e9 where window packed softcap sinks alibi bias bias_in_place
bias_of_keys all
""".split()
WIDTH, CAP = 4, 0.5
LOWEST = torch.finfo(torch.float64).min


class Attention(nn.Module):
    """One attention. `padding` joins the input's mask to the causal one, "" leaves it out."""

    def __init__(self, kind: str, heads: int, kv_heads: int, places: int, padding: str = ""):
        super().__init__()
        self.kind, self.heads, self.kv_heads, self.padding = kind, heads, kv_heads, padding
        self.q, self.k, self.v = (nn.Linear(WIDTH * heads, WIDTH * n) for n in (heads, kv_heads, kv_heads))
        self.o = nn.Linear(WIDTH * heads, WIDTH * heads)
        self.sinks = nn.Parameter(torch.randn(heads)) if kind in ("sinks", "all") else None
        self.bias = nn.Embedding(places, heads) if kind.startswith("bias") or kind == "all" else None

    def forward(self, x, keep):
        q, k, v = (t.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for t in (self.q(x), self.k(x), self.v(x)))
        k, v = (self.repeated(t) for t in (k, v))
        y = self.weights(q, k, keep) @ v
        return self.o(y.transpose(1, 2).reshape(x.shape))

    def repeated(self, x):
        b, few, s, d = x.shape
        if few == self.heads:
            return x
        return x[:, :, None].expand(b, few, self.heads // few, s, d).reshape(b, self.heads, s, d)

    def is_open(self, places, keep):
        """Return which keys a query may attend to, (1, 1, s, s) or (b, 1, s, s)."""
        open_ = (places[None, :] <= places[:, None])[None, None]
        if self.kind == "window":
            open_ = open_ & (places[None, :] > places[:, None] - 3)
        if self.kind == "packed":  # documents begin behind what is not kept
            documents = keep.logical_not().cumsum(-1)
            open_ = open_ & (documents[:, None, :, None] == documents[:, None, None, :])
        return open_ & keep[:, None, None, :] if self.padding else open_

    def weights(self, q, k, keep):
        places = torch.arange(q.shape[2])
        open_ = self.is_open(places, keep)
        mask = torch.zeros((), dtype=q.dtype).expand(open_.shape).masked_fill(~open_, LOWEST)
        mask = torch.where(open_, torch.zeros((), dtype=q.dtype), LOWEST) if self.kind != "plain" else mask
        if self.kind == "alibi":
            return torch.softmax(self.with_slopes(q, k, places) + mask, -1)
        if self.kind == "plain":
            return torch.softmax((q * WIDTH**-0.5) @ k.mT, -1)
        scores = q @ k.transpose(2, 3) * WIDTH**-0.5
        if self.kind in ("softcap", "all"):
            scores = torch.tanh(scores / CAP) * CAP
        if self.kind.startswith("filled"):
            value = {"inf": -torch.inf, "lowest": LOWEST, "1e9": -1e9}[self.kind.removeprefix("filled_")]
            return torch.softmax(scores.masked_fill(open_.logical_not(), value), -1)
        if self.kind == "where":
            return torch.softmax(torch.where(open_, scores, LOWEST), -1)
        if self.kind == "bias_in_place":
            scores += self.learned(places) + mask
        elif self.kind == "bias_of_keys":
            scores = scores + self.bias(places).T[:, None] + mask
        elif self.bias is not None:
            scores = scores + self.learned(places) + mask
        else:
            scores = scores + mask
        if self.sinks is None:
            return torch.softmax(scores, -1)
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
        scores = torch.cat([scores, sinks], -1)
        return torch.softmax(scores - scores.max(-1, keepdim=True).values, -1)[..., :-1]

    def learned(self, places):
        """Return T5's bias, a number a head for each distance."""
        distance = (places[:, None] - places).clamp(0, self.bias.num_embeddings - 1)
        return self.bias(distance).permute(2, 0, 1)[None]

    def with_slopes(self, q, k, places):
        """Return scores with ALiBi's slopes as Bloom computes them, samples and heads in one dim."""
        b, h, s, d = q.shape
        slopes = 2.0 ** -torch.arange(1, h + 1, dtype=q.dtype)
        alibi = (slopes[:, None, None] * places).repeat(b, 1, 1)
        flat = alibi.baddbmm(q.reshape(b * h, s, d), k.reshape(b * h, s, d).transpose(1, 2), beta=1.0, alpha=d**-0.5)
        return flat.view(b, h, s, s)


class Model(nn.Module):
    """Some layers of attention under a loss of every place."""

    def __init__(self, kind: str, heads: int, kv_heads: int, padding: str = "", layers: int = 1, length: int = 16):
        super().__init__()
        torch.manual_seed(0)
        hidden = WIDTH * heads
        self.tokens, self.places = nn.Embedding(VOCABULARY, hidden), nn.Embedding(length, hidden)
        self.layers = nn.ModuleList(Attention(kind, heads, kv_heads, length, padding) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)
        self.double()

    def forward(self, input_ids, labels, keep):
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x), keep)
        return F.cross_entropy(self.head(x).reshape(-1, VOCABULARY), labels.reshape(-1))


def inputs_of(length: int, padding: str = "", samples: int = 2) -> dict[str, torch.Tensor]:
    """Return ids, labels, and which keys are kept: of the last sample two thirds, padded on one side, or any."""
    generator = torch.Generator().manual_seed(length)
    ids, labels = (torch.randint(0, VOCABULARY, (samples, length), generator=generator) for _ in range(2))
    keep = torch.rand(samples, length, generator=generator) > 0.3
    if padding:
        keep = torch.ones_like(keep)
        keep[-1] = torch.arange(length) >= length // 3 if padding == "left" else torch.arange(length) < 2 * length // 3
    return {"input_ids": ids, "labels": labels, "keep": keep}
