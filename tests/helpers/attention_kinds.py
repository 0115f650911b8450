"""Decoders in fp64 with attention of any kind, written as transformers writes it: masks for sdpa, or products and a
softmax where sdpa has no way to say it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .sequences import VOCABULARY, batch

KINDS = "causal full packed window prefix left right alibi alibi_left t5 softcap sinks".split()
HEADS = {"mha": (8, 8), "gqa": (8, 4), "mqa": (8, 1)}
WIDTH, LONGEST = 4, 48  # of a head, of a sequence
WINDOW, PREFIX, CAP = 3, 4, 0.5
LOWEST = torch.finfo(torch.float64).min


class Adapted(nn.Module):
    """A frozen linear layer with an adapter, with the names that PEFT gives."""

    def __init__(self, base: nn.Linear, rank: int = 2):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + 0.5 * self.lora_B["default"](self.lora_A["default"](x))


class Attention(nn.Module):
    """Attention of some kind; a mask comes from the model, as all layers share it."""

    def __init__(self, kind: str, heads: int, kv_heads: int):
        super().__init__()
        self.kind, self.kv_heads, self.groups = kind, kv_heads, heads // kv_heads
        hidden, narrow = WIDTH * heads, WIDTH * kv_heads
        self.q, self.k, self.v = nn.Linear(hidden, hidden), nn.Linear(hidden, narrow), nn.Linear(hidden, narrow)
        self.o = nn.Linear(hidden, hidden)
        self.sinks = nn.Parameter(torch.randn(heads)) if kind == "sinks" else None

    def forward(self, x, mask):
        q, k, v = (t.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for t in (self.q(x), self.k(x), self.v(x)))
        attend = self.written if self.kind in ("softcap", "sinks", "squared") else self.sdpa
        return self.o(attend(q, k, v, mask).transpose(1, 2).flatten(2))

    def sdpa(self, q, k, v, mask):
        is_causal = self.kind == "causal"
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=self.groups > 1)

    def written(self, q, k, v, mask):
        """Write attention out as Gemma 2 (a cap) and GPT-OSS (sinks) of transformers do, or with the squares of
        weights."""
        k, v = (t.repeat_interleave(self.groups, dim=1) if self.groups > 1 else t for t in (k, v))
        scores = q @ k.transpose(2, 3) * WIDTH**-0.5
        if self.kind == "softcap":
            scores = torch.tanh(scores / CAP) * CAP
        scores = scores + mask
        if self.sinks is None:
            weights = torch.softmax(scores, dim=-1)
            return (weights.square() if self.kind == "squared" else weights) @ v
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
        scores = torch.cat([scores, sinks], dim=-1)
        scores = scores - scores.max(dim=-1, keepdim=True).values
        return torch.softmax(scores, dim=-1)[..., :-1] @ v


class Layer(nn.Module):
    """Attention and an MLP, each added to what came in."""

    def __init__(self, kind: str, heads: int, kv_heads: int):
        super().__init__()
        hidden = WIDTH * heads
        self.attention, self.before, self.between = (
            Attention(kind, heads, kv_heads),
            nn.LayerNorm(hidden),
            nn.LayerNorm(hidden),
        )
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)

    def forward(self, x, mask):
        x = x + self.attention(self.before(x), mask)
        return x + self.down(F.gelu(self.up(self.between(x))))


class Model(nn.Module):
    """Layers of attention of some `kinds` under a loss of shifted labels: logits cut by one, or labels padded."""

    def __init__(self, kinds: tuple[str, ...], heads: int, kv_heads: int, shift: str = "pad", lora: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.kinds, self.heads, self.shift = kinds, heads, shift
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH * heads), nn.Embedding(LONGEST, WIDTH * heads)
        self.buckets = nn.Embedding(8, heads) if "t5" in kinds else None
        self.layers = nn.ModuleList(Layer(kind, heads, kv_heads) for kind in kinds)
        self.head = nn.Linear(WIDTH * heads, VOCABULARY, bias=False)
        if lora:
            self.requires_grad_(False)
            for layer in self.layers:
                for owner, name in ((layer.attention, "q"), (layer.attention, "v"), (layer, "up")):
                    setattr(owner, name, Adapted(getattr(owner, name)))
        self.double()

    def forward(self, input_ids, labels, attention_mask):
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        masks = {kind: self.mask(kind, input_ids, attention_mask) for kind in self.kinds}
        for kind, layer in zip(self.kinds, self.layers):
            x = layer(x, masks[kind])
        logits = self.head(x)
        labels = labels[:, 1:] if self.shift == "cut" else F.pad(labels, (0, 1), value=-100)[:, 1:]
        logits = logits[:, :-1] if self.shift == "cut" else logits
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))

    def mask(self, kind, input_ids, attention_mask):
        """Return what attention of a kind masks or adds: nothing, booleans, or numbers."""
        place = torch.arange(input_ids.shape[1])
        causal, behind = place[:, None] >= place, place[:, None] - place
        if kind in ("causal", "full"):
            return None
        if kind in ("left", "right"):
            return causal & attention_mask[:, None, None, :].bool()
        if kind == "window":
            return causal & (behind < WINDOW)
        if kind == "prefix":
            return causal | (place < PREFIX)
        if kind == "packed":  # documents begin at the ids below 5
            documents = (input_ids < 5).cumsum(-1)[:, None]
            return causal & (documents.unsqueeze(-1) == documents.unsqueeze(-2))
        closed = torch.zeros(causal.shape, dtype=torch.float64).masked_fill(~causal, LOWEST)
        if kind.startswith("alibi"):
            slopes = 2.0 ** -torch.arange(1, self.heads + 1, dtype=torch.float64)
            bias = (-slopes[:, None, None] * behind)[None] + closed
            keep = causal & attention_mask[:, None, None, :].bool()
            return bias if kind == "alibi" else torch.where(keep, bias, LOWEST)
        if kind == "t5":
            return closed + self.buckets(behind.clamp(0, 7)).permute(2, 0, 1)[None]
        return closed


def inputs_of(kind: str, length: int, samples: int = 2) -> dict[str, torch.Tensor]:
    """Return ids, labels and the mask of samples, of which the last is padded if the kind says so."""
    return batch(length, kind.rpartition("_")[2] if kind.endswith(("left", "right")) else "", samples)
