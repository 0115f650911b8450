"""The exact priced cost of a choice by class, and a local search on it.

The cost is that of the integer program: copies times what a class costs itself, plus for every hub the cheapest way to serve one
copy times the copies. Changing one class touches only its own hubs; for all strategies of a class at once these are a few rows
and columns of matrices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .dual import Dual, own_cost
from .hubs import HubPrices, Mode, served


class Tied:
    """Prices choices of the classes of a Dual's problem at the dual's prices."""

    def __init__(self, dual: Dual):
        self.dual, self.problem = dual, dual.problem
        self.own = {cls: own_cost(dual.problem, cls, dual.prices) for cls in dual.classes}
        self.modes: list[list[Mode]] = [dual.modes(hub) for hub in dual.hubs]
        self.hubs_of_class: dict[int, list[int]] = {cls: [] for cls in dual.classes}
        for number, hub in enumerate(dual.hubs):
            for cls in dict.fromkeys([hub.hub.producer, *(c for c, _, _ in hub.hub.consumers)]):
                self.hubs_of_class[cls].append(number)

    def objective(self, choice: dict[int, int]) -> float:
        total = sum(float(self.own[cls][k]) for cls, k in choice.items())
        return total + sum(self._hub(number, choice) for number in range(len(self.dual.hubs)))

    def _hub(self, number: int, choice: dict[int, int]) -> float:
        hub = self.dual.hubs[number]
        columns = [int(of[choice[cls]]) for of, (cls, _, _) in zip(hub.target_of, hub.hub.consumers)]
        source = int(hub.source_of[choice[hub.hub.producer]])
        return hub.hub.copies * float(served(self.modes[number], source, columns, hub.phases))

    def _hub_of(self, number: int, cls: int, choice: dict[int, int]) -> np.ndarray:
        """Cost of a hub for every strategy of one of its classes, the others as they are chosen."""
        hub, modes = self.dual.hubs[number], self.modes[number]
        consumers = [c for c, _, _ in hub.hub.consumers]
        mine = [i for i, c in enumerate(consumers) if c == cls]
        columns = [int(of[choice[c]]) for of, c in zip(hub.target_of, consumers)]
        if hub.hub.producer == cls:
            if not mine:
                every = served(modes, np.arange(len(hub.sources)), columns, hub.phases)
                return hub.hub.copies * every[hub.source_of]
        elif len(mine) == 1:
            source = int(hub.source_of[choice[hub.hub.producer]])
            return hub.hub.copies * _by_column(hub, modes, source, columns, mine[0])[hub.target_of[mine[0]]]
        values, here = [], choice[cls]
        for k in range(len(hub.source_of) if hub.hub.producer == cls else len(hub.target_of[mine[0]])):
            choice[cls] = k
            values.append(self._hub(number, choice))
        choice[cls] = here
        return np.array(values)

    def improve(self, choice: dict[int, int], passes: int = 8) -> dict[int, int]:
        """Change one class at a time for the better until nothing improves."""
        choice = dict(choice)
        for _ in range(passes):
            changed = False
            for i, cls in enumerate(self.dual.classes):
                options = self.dual.index[i]
                if len(options) == 1:
                    continue
                values = self.own[cls].copy()
                for number in self.hubs_of_class[cls]:
                    values += self._hub_of(number, cls, choice)
                best = int(options[values[options].argmin()])
                if values[best] < values[choice[cls]] - 1e-15 - 1e-12 * abs(values[best]):
                    choice[cls], changed = best, True
            if not changed:
                break
        return choice


def _by_column(hub: HubPrices, modes: Sequence[Mode], source: int, columns: list[int], mine: int) -> np.ndarray:
    """Cost of one copy by the column that one consumer takes: a payment of its own, or what joining another's adds."""
    others: dict[int, int] = {}
    for i, (q, phase) in enumerate(zip(columns, hub.phases)):
        if i != mine:
            others[q] = others.get(q, 0) | phase
    results = []
    for mode in modes:
        rest = mode.base[source] + sum(mode.block[phase][source, q] for q, phase in others.items())
        value = mode.block[hub.phases[mine]][source] + rest
        for q, phase in others.items():
            joined = mode.block[phase | hub.phases[mine]][source, q]
            alone = [mode.block[p][source, c] for c, p in others.items() if c != q]
            value[q] = mode.base[source] + sum(alone) + joined
        results.append(value)
    return results[0] if len(results) == 1 else np.minimum.reduce(results)
