"""A small text to train on without a download: Shakespeare's Sonnets (1609, public domain), 96 kB, one token a byte."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ..errors import ModelError

VOCAB = 256  # a token is a byte


FILE = Path(__file__).parent / "corpus.txt"


@cache
def text() -> str:
    """Return the whole corpus."""
    return FILE.read_text(encoding="ascii")


class Batches(Iterator[dict[str, Tensor]]):
    """Endless batches of random windows of tokens.

    Batch number `position` follows from (seed, position) alone: saving `position` and passing it again resumes exactly,
    and all processes with one seed draw the same batches.
    """

    def __init__(self, tokens: Tensor, batch: int, seq: int, seed: int = 0, position: int = 0):
        if batch < 1 or not 1 <= seq <= len(tokens):
            raise ModelError(
                f"batch={batch}, seq={seq} cannot be cut from {len(tokens)} tokens",
                fix=f"use batch of 1 or more and seq from 1 to {len(tokens)}",
            )
        self.tokens, self.batch, self.seq, self.seed, self.position = tokens, batch, seq, seed, position

    def __next__(self) -> dict[str, Tensor]:
        """Return `input_ids` (B, S) int64 and `labels` equal to them: the models here shift labels themselves."""
        ids = self.tokens[self._starts()[:, None] + torch.arange(self.seq)]
        self.position += 1
        return {"input_ids": ids, "labels": ids.clone()}

    def _starts(self) -> Tensor:
        """Return where the windows of batch number `position` start."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.position)
        return torch.randint(len(self.tokens) - self.seq + 1, (self.batch,), generator=generator)


def batches(batch: int, seq: int, vocab: int = VOCAB, seed: int = 0, position: int = 0) -> Batches:
    """Return batches of the corpus from number `position` on (see Batches). Raises ModelError if `vocab` is below
    256."""
    if vocab < VOCAB:
        raise ModelError(f"a vocabulary of {vocab} cannot hold {VOCAB} byte tokens", fix=f"set vocab={VOCAB}")
    return Batches(torch.tensor(list(text().encode("ascii")), dtype=torch.int64), batch, seq, seed, position)
