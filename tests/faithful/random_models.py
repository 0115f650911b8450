"""Random models: layers, state, ties, stopped gradients and outputs of all kinds, from a `random.Random`."""

from __future__ import annotations

from random import Random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .functions import OnlyIfNeeded, Reversal, Swish

WIDTHS = (4, 5, 6, 7, 8, 12)
VOCAB = 11


class RandomModel(nn.Module):
    """(x (B, S, W)[, ids (B, S)]) -> outputs in a random form.

    `state`: whether it may keep Python state and buffers of its own; `random`: whether it may drop. `staged`: it has a
    loss and enough layers for a pipeline, and nothing that mixes samples, as micro-batches ask. `smooth`: little comes
    of what is rounded, as bf16 does. `adapted`: every layer is used, as adapters ask. The ops are a list of (name,
    positions of arguments, layer), values are (B, S, width)."""

    def __init__(self, rng: Random, width: int, takes_ids: bool, state: bool = True, random: bool = False,
                 staged: bool = False, smooth: bool = False, adapted: bool = False):  # fmt: skip
        super().__init__()
        self.takes_ids, self.factor = takes_ids, 1.0
        self.counts, self.calls = state and rng.random() < 0.15, 0
        self.layers, self.ops = nn.ModuleList(), []
        if takes_ids:
            self.embed = nn.Embedding(VOCAB, width)
        widths = [width]
        kinds = [*SINGLE, *(STATE if state else ()), *(("dropout",) if random else ())]
        left_out = (*(MIXING if staged else ()), *(JUMPING if smooth else ()), *(("custom",) if adapted else ()))
        kinds = [k for k in kinds if k not in left_out] + ["linear"] * 4 * staged
        doubles = [k for k in DOUBLE if k not in left_out]
        for _ in range(rng.randint(9, 12) if staged else rng.randint(3, 9)):
            last = len(widths) - 1
            pairs = [(i, j) for i in range(last * adapted, last + 1) for j in range(i) if widths[i] == widths[j]]
            if pairs and rng.random() < 0.25:
                self.ops.append((rng.choice(doubles), rng.choice(pairs), None))
                widths.append(widths[self.ops[-1][1][0]])
                continue
            kind, at = rng.choice(kinds), last if adapted else rng.choice([last, rng.randrange(last + 1)])
            layer, out = self._layer(kind, widths[at], rng)
            self.ops.append((kind, (at,), layer))
            widths.append(out)
        self.form = rng.choice(
            [form for form in FORMS if (not staged or "loss" in form) and not (smooth and form in JUMPING)]
        )
        self.picked = rng.randrange(len(widths))
        self.head = nn.Linear(widths[-1], VOCAB)
        if rng.random() < 0.2:
            self.head.bias.requires_grad_(False)
        if takes_ids and widths[-1] == width and rng.random() < 0.5:
            self.head.weight = self.embed.weight

    def _layer(self, kind: str, width: int, rng: Random) -> tuple[int | None, int]:
        """(index of the layer, the width that it gives)."""
        out = rng.choice(WIDTHS) if kind in ("linear", "mlp", "convolution") else width
        same = [i for i, m in enumerate(self.layers) if isinstance(m, nn.Linear) and m.weight.shape == (out, width)]
        if kind == "linear" and same and rng.random() < 0.5:
            return rng.choice(same), out  # shared
        make = LAYERS.get(kind)
        if make is None:
            return None, out
        self.layers.append(make(width, out, rng))
        return len(self.layers) - 1, out

    def forward(self, x, ids=None):
        if self.counts:
            self.calls += 1
        values = [x + self.embed(ids)] if self.takes_ids else [x]
        for kind, at, index in self.ops:
            layer = None if index is None else self.layers[index]
            given = [values[i] for i in at]
            values.append((DOUBLE.get(kind) or SINGLE.get(kind) or STATE.get(kind) or _dropped)(self, layer, *given))
        logits = self.head(values[-1]) * self.factor
        return FORMS[self.form](logits, values[self.picked], ids)


def _dropped(m, layer, h):
    return F.dropout(h, 0.25, m.training)


def _attention(m, layer, h):
    q, k, v = layer(h).chunk(3, -1)
    return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]


def _batch_norm(m, layer, h):
    return layer(h.transpose(1, 2)).transpose(1, 2)


def _average(m, layer, h):
    if m.training:
        with torch.no_grad():
            layer.mean.lerp_(h.mean((0, 1)).to(layer.mean.dtype), 0.2)  # as autocast asks
    return h - layer.mean


def _count(m, layer, h):
    layer.calls += 1
    return h / layer.calls.clone()


class Average(nn.Module):
    """Buffers that a model's forward writes."""

    def __init__(self, width: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("calls", torch.zeros(()))


LAYERS = {  # kind: (width, width that it gives, random) -> layer
    "linear": lambda w, o, r: nn.Linear(w, o, bias=r.random() < 0.7),
    "mlp": lambda w, o, r: nn.Sequential(nn.Linear(w, 9), nn.GELU(), nn.Linear(9, o)),
    "checkpointed": lambda w, o, r: nn.Sequential(nn.Linear(w, 5), nn.Tanh(), nn.Linear(5, o)),
    "convolution": lambda w, o, r: nn.Conv1d(w, o, 3, padding=1),
    "layer_norm": lambda w, o, r: nn.LayerNorm(w),
    "rms_norm": lambda w, o, r: nn.RMSNorm(w, eps=1e-6),  # without it the type decides
    "attention": lambda w, o, r: nn.Linear(w, 3 * w),
    "custom": lambda w, o, r: nn.Linear(w, w, bias=False),
    "batch_norm": lambda w, o, r: nn.BatchNorm1d(w),
    "average": lambda w, o, r: Average(w),
    "count": lambda w, o, r: Average(w),
}
SINGLE = {  # of one value
    "linear": lambda m, layer, h: layer(h),
    "mlp": lambda m, layer, h: layer(h),
    "checkpointed": lambda m, layer, h: checkpoint(layer, h, use_reentrant=False),
    "convolution": lambda m, layer, h: layer(h.transpose(1, 2)).transpose(1, 2),
    "layer_norm": lambda m, layer, h: layer(h),
    "rms_norm": lambda m, layer, h: layer(h),
    "attention": _attention,
    "custom": lambda m, layer, h: OnlyIfNeeded.apply(h.flatten(0, 1), layer.weight).view(h.shape),
    "activation": lambda m, layer, h: F.silu(h),
    "swish": lambda m, layer, h: Swish.apply(h),
    "reversal": lambda m, layer, h: Reversal.apply(h, 0.5),
    "softmax": lambda m, layer, h: h.softmax(-1),
    "cumsum": lambda m, layer, h: h.cumsum(1) / h.shape[1],
    "flip": lambda m, layer, h: h.flip(1),
    "mean": lambda m, layer, h: h - h.mean(1, keepdim=True),
    "of_the_batch": lambda m, layer, h: h - h.mean(0, keepdim=True),
    "halves": lambda m, layer, h: torch.cat([h[..., h.shape[-1] // 2 :], h[..., : h.shape[-1] // 2].tanh()], -1),
    "stopped": lambda m, layer, h: h.detach() * 0.5 + h,
    "largest": lambda m, layer, h: h * (h >= h.amax(-1, keepdim=True)),
    "in_place": lambda m, layer, h: h.clone().mul_(2).add_(1),
}
STATE = {"batch_norm": _batch_norm, "average": _average, "count": _count}
MIXING = ("batch_norm", "average", "count", "of_the_batch")  # samples of a batch
JUMPING = ("largest", "where", "nested", "product")  # where a rounding decides, or grows
DOUBLE = {  # of two values of one width
    "add": lambda m, layer, a, b: a + b,
    "gate": lambda m, layer, a, b: a * b.sigmoid(),
    "product": lambda m, layer, a, b: (a @ b.transpose(1, 2)).tanh() @ a,
    "where": lambda m, layer, a, b: torch.where(a > 0, a, b),
}


def _loss(logits, ids):
    labels = torch.zeros(logits.shape[:2], dtype=torch.long) if ids is None else ids
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


FORMS = {
    "tensor": lambda y, h, ids: y,
    "pair": lambda y, h, ids: (y, h.square().mean()),
    "loss": lambda y, h, ids: _loss(y, ids),
    "loss_and_logits": lambda y, h, ids: {"loss": _loss(y, ids), "logits": y},
    "nested": lambda y, h, ids: {"loss": y.square().mean(), "aux": [h.mean(), (y.argmax(-1), None)], "n": y.shape[0]},
    "views": lambda y, h, ids: (y, y[:, 0], y.transpose(0, 1)),
}
