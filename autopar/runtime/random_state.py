"""Where the random numbers of a compiled model stand: a seed, and how many forwards have drawn with it.

A forward that draws takes the pair as a tensor; every number it draws is a function of the pair, of the op that draws
and of the element's place in the global tensor (see autopar/ops/counter_rng.py). So two integers say it all, equal on
every rank, and torch's own generators are never touched.
"""

from __future__ import annotations

import torch


class RandomState:
    """`seed` is any integer, of which 64 bits count; `offset` is the number of forwards that have drawn."""

    def __init__(self, seed: int, offset: int = 0):
        self.seed, self.offset = seed, offset

    def next(self) -> torch.Tensor:
        """Return seed and offset of the forward that is to run, int64 (2,) on the CPU, and advance the offset."""
        state = torch.tensor([_signed(self.seed), self.offset], dtype=torch.int64)
        self.offset += 1
        return state

    def __repr__(self) -> str:
        return f"RandomState(seed={self.seed}, offset={self.offset})"


def _signed(seed: int) -> int:
    """Return the low 64 bits as an int64 has them: torch's seeds are unsigned."""
    return (seed + 2**63) % 2**64 - 2**63
