"""Notice whether a user has seeded torch's random numbers: by `torch.manual_seed`, `torch.seed`, `torch.set_rng_state`.

These functions set a generator that they find among the globals of torch.random. An object in front of it notices, for
a generator does not tell: the same seed leaves it as it was, and whoever draws changes its state as well.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary


class Numbers(Protocol):
    """Random numbers that follow torch's seed. `position`: the seeding that they know of, their seed and offset."""

    @property
    def position(self) -> tuple[Seeding, int, int]:
        """Return the seeding of torch that is known, seed and offset."""


class Seeding:
    """Stands for what holds from one seed to the next. `positions`: the seed and offset where numbers go on, if a state
    was given back."""

    def __init__(self, positions: dict[Numbers, tuple[int, int]] | None = None):
        self.positions = positions or {}


class _Noticed:
    """torch's generator. `seeding` is another object after each seed; a state that was read here brings back the one
    that it was read under, if nothing was drawn since, so that `torch.random.fork_rng` leaves no trace."""

    def __init__(self, generator: torch.Generator):
        self.generator, self.seeding = generator, Seeding()
        self.followers: weakref.WeakSet[Numbers] = weakref.WeakSet()
        self.known = WeakTensorKeyDictionary()  # (seeding, positions) by the states that were read

    def __getattr__(self, name: str):
        return getattr(self.generator, name)

    def manual_seed(self, seed: int) -> torch.Generator:
        self.seeding = Seeding()
        return self.generator.manual_seed(seed)

    def seed(self) -> int:
        self.seeding = Seeding()
        return self.generator.seed()

    def get_state(self) -> torch.Tensor:
        state = self.generator.get_state()
        self.known[state] = self.seeding, {numbers: numbers.position for numbers in self.followers}
        return state

    def set_state(self, state: torch.Tensor) -> None:
        if state not in self.known and torch.equal(state, self.generator.get_state()):
            return  # a copy of what holds, as torch makes one around its tracing
        self.generator.set_state(state)
        seeding, positions = self.known.get(state, (None, {}))
        stays = seeding and all(numbers.position == position for numbers, position in positions.items())
        self.seeding = seeding if stays else Seeding({n: p[1:] for n, p in positions.items() if p[0] is seeding})


_noticed = _Noticed(torch.default_generator)
torch.random.default_generator = _noticed  # type: ignore[assignment]  # its functions find it there


def seeding() -> Seeding:
    """Return what holds now: another object after each seed."""
    return _noticed.seeding


def follow(numbers: Numbers) -> None:
    """Let numbers be given back their position with a state of torch's generator."""
    _noticed.followers.add(numbers)
