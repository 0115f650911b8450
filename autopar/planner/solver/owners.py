"""Starts of a search with the rows of all experts over the same axes.

No move leads to rows by owner or away from them, so that between a dispatch and its combine all ops have to choose them
together, forward and backward: a choice in which some do and some do not has an impossible move, which changing one
class at a time never mends.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .dual import Dual
from .local_search import LocalSearch

SWEEPS = 3


def with_owners(dual: Dual, tied: LocalSearch, choice: dict[int, int]) -> list[dict[int, int]]:
    """Return choices like this one, each with the rows of experts over other axes, over none in the first; none if
    there are no such rows."""
    owned = dual.problem.owned_axes
    found = []
    for axes in sorted({axes for of_class in owned.values() for axes in of_class}, key=lambda a: (len(a), a)):
        options = _options(dual, owned, axes)
        if options is None:
            continue
        start = choice | {cls: int(some[0]) for cls, some in options.items() if choice[cls] not in some}
        found.append(tied.improve(tied.improve(start, SWEEPS, options)))
    return found


def _options(
    dual: Dual, owned: Mapping[int, list[tuple[str, ...]]], axes: tuple[str, ...]
) -> dict[int, np.ndarray] | None:
    """Return the allowed options of these classes under which rows are over `axes`; None if a class has none."""
    result = {}
    for cls, of_strategy in owned.items():
        index = dual.index[dual.position[cls]]
        some = [k for k in index if of_strategy[k % len(of_strategy)] == axes]
        if not some:
            return None
        result[cls] = np.array(some)
    return result
