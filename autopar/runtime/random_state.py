"""Keep the state of a compiled model's random numbers: a seed, and how many forwards have drawn with it.

A forward that draws takes the pair as a tensor; every number it draws is a function of the pair, of the op that draws
and of the element's place in the global tensor (see autopar/ops/counter_rng.py). So two integers say it all, equal on
every rank. A user who seeds torch between two calls starts them anew, on all ranks as the generator of rank 0 says;
else torch's own generators are never touched.
"""

from __future__ import annotations

import torch

from .._torch.seeds import Seeding, follow, seeding
from ..processes import agree


class RandomState:
    """`seed` is any integer, of which 64 bits count; `offset` is the number of forwards that have drawn. `follows`:
    the seeding of torch that is known here, the present one if it is not said; setting the seed is a later word."""

    follows: Seeding

    def __init__(self, seed: int, offset: int = 0, follows: Seeding | None = None):
        self.seed, self.offset = seed, offset
        self.follows = follows or self.follows
        follow(self)

    @property
    def seed(self) -> int:
        """Return the seed of the numbers."""
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        """Set the seed, from which on numbers follow torch's seeding of now."""
        self._seed, self.follows = seed, seeding()

    @property
    def position(self) -> tuple[Seeding, int, int]:
        """Return the seeding of torch that is known here, seed and offset."""
        return self.follows, self.seed, self.offset

    @property
    def is_seeded(self) -> bool:
        """Return whether torch was seeded since, and these numbers are not."""
        return seeding() is not self.follows

    def restart(self) -> None:
        """Go on where torch's seed says, which is where they stood when a state was read that was given back now. All
        ranks call this together."""
        position = seeding().positions.get(self) or (int(torch.empty((), dtype=torch.int64).random_()), 0)
        self.seed, self.offset = agree.from_rank_zero(lambda: position)

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
