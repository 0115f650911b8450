"""Small models whose attention may be cut along the sequence, in fp64, and batches for them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 24
WINDOW = 3


class Decoder(nn.Module):
    """A layer of attention of some kind, with a loss of shifted labels: logits cut by one, or labels padded by one."""

    def __init__(self, kind: str, heads: int, kv_heads: int, shift: str = "pad"):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.heads, self.kv_heads, self.shift = kind, heads, kv_heads, shift
        self.tokens, self.places = nn.Embedding(VOCABULARY, 8 * heads), nn.Embedding(32, 8 * heads)
        self.norm, self.qkv = nn.LayerNorm(8 * heads), nn.Linear(8 * heads, 8 * (heads + 2 * kv_heads))
        self.out, self.head = nn.Linear(8 * heads, 8 * heads), nn.Linear(8 * heads, VOCABULARY, bias=False)
        self.double()

    def forward(self, input_ids, labels, attention_mask):
        return self.under(self.mask(input_ids, attention_mask), input_ids, labels)

    def mask(self, input_ids, attention_mask):
        place = torch.arange(input_ids.shape[1])
        if self.kind == "padded":
            return (place[:, None] >= place) & attention_mask[:, None, None, :].bool()
        if self.kind == "window":
            return (place[:, None] >= place) & (place[:, None] - place < WINDOW)
        if self.kind == "packed":  # documents begin at the ids below 5
            documents = (input_ids < 5).cumsum(-1)[:, None]
            return (place[:, None] >= place) & (documents.unsqueeze(-1) == documents.unsqueeze(-2))
        return None

    def under(self, mask, input_ids, labels):
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        q, k, v = self.qkv(self.norm(x)).split([8 * self.heads, 8 * self.kv_heads, 8 * self.kv_heads], -1)
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in (q, k, v))
        y = self.attend(q, k, v, mask, mask is None and self.kind == "causal")
        logits = self.head(x + self.out(y.transpose(1, 2).flatten(2)))
        return self.loss(logits, labels)

    def attend(self, q, k, v, mask, is_causal):
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=True)

    def loss(self, logits, labels):
        labels = labels[:, 1:] if self.shift == "cut" else F.pad(labels, (0, 1), value=-100)[:, 1:]
        logits = logits[:, :-1] if self.shift == "cut" else logits
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))


class Mixed(Decoder):
    """A causal attention beside one of another kind, as models with windows have in some layers."""

    def attend(self, q, k, v, mask, is_causal):
        return super().attend(q, k, v, mask, is_causal) + 0.5 * super().attend(q, k, v, None, True)


class Packed(Decoder):
    """Computes attention that is "causal", "full", causal and "padded", or has a "window", inside of `documents`."""

    def forward(self, input_ids, labels, attention_mask, documents):
        mask, place = self.mask(input_ids, attention_mask), torch.arange(input_ids.shape[1])
        if self.kind == "causal":
            mask = place[:, None] >= place
        together = (documents[:, :, None] == documents[:, None]).unsqueeze(1)
        return self.under(together if mask is None else together & mask, input_ids, labels)


class WithLogits(Decoder):
    """Returns logits beside the loss."""

    def loss(self, logits, labels):
        return super().loss(logits, labels), logits


def batch(length: int, padded: str = "", samples: int = 2, vocabulary: int = VOCABULARY) -> dict[str, torch.Tensor]:
    """Ids, labels and the mask of samples, the last of them padded "left" or "right" by 3."""
    ids = torch.randint(0, vocabulary, (samples, length), generator=torch.Generator().manual_seed(length))
    keep = torch.ones_like(ids)
    if padded:
        keep[-1, slice(0, 3) if padded == "left" else slice(-3, None)] = 0
    return dict(input_ids=ids, labels=ids.masked_fill(keep == 0, -100), attention_mask=keep)


def packed_batch(length: int, seed: int, most: float, samples: int = 2) -> dict[str, torch.Tensor]:
    """Return a batch with numbers of documents, about `most` in each row."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.rand(samples, length, generator=generator) < most / length
    return batch(length, "left", samples) | {"documents": starts.cumsum(-1)}


def packed(length: int, lengths: list[int], samples: int = 2) -> dict[str, torch.Tensor]:
    """Return samples that have documents of these lengths, every second in the other order."""
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    rows = [length - ids.flip(0) if i % 2 else ids for i in range(samples)]
    return batch(length, samples=samples) | {"documents": torch.stack(rows)}


def reached_keys(documents: torch.Tensor, kind: str, size: int) -> int:
    """Return how many rows go to devices: of each block all from the first to the last that one of their queries may
    attend to."""
    length = documents.shape[1]
    place = torch.arange(length)
    behind = place[:, None] - place
    keep = (documents[:, :, None] == documents[:, None]).any(0)
    keep &= behind >= 0 if kind != "full" else behind.abs() >= 0
    keep &= behind < WINDOW if kind == "window" else keep
    if kind == "zigzag":
        halves = place.chunk(2 * size)
        held = [torch.cat([halves[r], halves[2 * size - 1 - r]]) for r in range(size)]
    else:
        held = place.split(-(-length // size))
    found = [keep[q][:, k].any(0).nonzero() for i, q in enumerate(held) for j, k in enumerate(held) if i != j]
    return sum(int(rows[-1] - rows[0]) + 1 for rows in found if len(rows))
