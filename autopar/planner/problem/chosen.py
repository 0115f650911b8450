"""The strategies of a complete choice, one a vertex, as what is computed again and cuts into stages leave them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...rules import Strategy

if TYPE_CHECKING:
    from .problem import Problem


@dataclass(frozen=True, eq=False)
class Chosen:
    """The strategy of each vertex of a problem under a `choice`, and the seconds of one of its copies."""

    choice: dict[int, int]
    strategies: Sequence[Strategy]
    seconds: Sequence[float]

    @classmethod
    def of(cls, problem: Problem, choice: dict[int, int]) -> Chosen:
        """Return what the vertices do under a choice."""
        chosen = [(problem.choices(v.index), choice[v.index]) for v in problem.vertices]
        strategies = [options.strategies[k] for options, k in chosen]
        return cls(choice, strategies, [float(options.seconds[k]) for options, k in chosen])
