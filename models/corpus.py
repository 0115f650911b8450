"""A small text to train on without a download: Shakespeare's Sonnets (1609, public domain), 96 kB, one token a byte."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ..errors import ModelError

VOCAB = 256  # a token is a byte


@cache
def text() -> str:
    """Return the whole corpus."""
    return (Path(__file__).parent / "corpus.txt").read_text(encoding="ascii")


class Batches(Iterator[dict[str, Tensor]]):
    """Endless batches of random windows of the corpus.

    Batch number `position` follows from (seed, position) alone: saving `position` and passing it again resumes exactly,
    and all processes with one seed draw the same batches.
    """

    def __init__(self, batch: int, seq: int, vocab: int = VOCAB, seed: int = 0, position: int = 0):
        self._bytes = torch.tensor(list(text().encode("ascii")), dtype=torch.int64)
        if vocab < VOCAB:
            raise ModelError(f"a vocabulary of {vocab} cannot hold {VOCAB} byte tokens", fix=f"set vocab={VOCAB}")
        if batch < 1 or not 1 <= seq <= len(self._bytes):
            raise ModelError(
                f"batch={batch}, seq={seq} cannot be cut from {len(self._bytes)} tokens",
                fix=f"use batch of 1 or more and seq from 1 to {len(self._bytes)}",
            )
        self.batch, self.seq, self.seed, self.position = batch, seq, seed, position

    def __next__(self) -> dict[str, Tensor]:
        """Return `input_ids` (B, S) int64 and `labels` equal to them: the models here shift labels themselves."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.position)
        starts = torch.randint(len(self._bytes) - self.seq + 1, (self.batch,), generator=generator)
        ids = self._bytes[starts[:, None] + torch.arange(self.seq)]
        self.position += 1
        return {"input_ids": ids, "labels": ids.clone()}


def batches(batch: int, seq: int, vocab: int = VOCAB, seed: int = 0, position: int = 0) -> Batches:
    """Return batches of the corpus from number `position` on (see Batches). Raises ModelError if `vocab` is below
    256."""
    return Batches(batch, seq, vocab, seed, position)
