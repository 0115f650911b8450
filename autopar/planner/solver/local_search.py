"""The exact priced cost of a choice by class, and a local search on it.

The cost is that of the integer program: copies times what a class costs itself, plus for every hyperedge the cheapest
way to serve one copy times the copies. Changing one class touches only its own hyperedges; for all strategies of a
class at once these are a few rows and columns of matrices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..objective.modes import BACKWARD
from ..problem.multipliers import Prices
from .dual import Dual, own_cost
from .factor import IMPOSSIBLE_SECONDS
from .hyperedges import HyperedgePrices, PricedMode, served


class LocalSearch:
    """Prices choices of the classes of a Dual's problem at the dual's prices."""

    def __init__(self, dual: Dual):
        self.dual, self.problem = dual, dual.problem
        self.own = {cls: dual.own(cls) for cls in dual.classes}
        self.modes: list[list[PricedMode]] = [dual.served[hyperedge] for hyperedge in dual.hyperedges]
        self.hyperedges_of_class: dict[int, list[int]] = {cls: [] for cls in dual.classes}
        self.neighbours: dict[int, set[int]] = {cls: set() for cls in dual.classes}  # classes that share a hyperedge
        for number, hyperedge in enumerate(dual.hyperedges):
            ends = dict.fromkeys([hyperedge.hyperedge.producer, *(c for c, _, _ in hyperedge.hyperedge.consumers)])
            for cls in ends:
                self.hyperedges_of_class[cls].append(number)
                self.neighbours[cls].update(ends)

    def objective(self, choice: dict[int, int]) -> float:
        """Return the priced cost of a choice of options by class."""
        total = sum(float(self.own[cls][k]) for cls, k in choice.items())
        return total + sum(self._hyperedge(number, choice) for number in range(len(self.dual.hyperedges)))

    def objectives(self, choice: dict[int, int], prices: Sequence[Prices]) -> list[float]:
        """Return what a choice costs at each of some other prices."""
        totals = [
            sum(float(own_cost(self.problem, cls, p, self.dual.reruns)[k]) for cls, k in choice.items()) for p in prices
        ]
        for hyperedge in self.dual.hyperedges:
            source, rerun, columns, phases = self._indices(hyperedge, choice)
            found = {q: i for i, q in enumerate(dict.fromkeys(columns))}
            few = hyperedge.chosen(np.array([source]), np.array(list(found)))
            for i, p in enumerate(prices):
                modes = few.modes(p, self.dual.keep_parameters, self.dual.reruns)
                seconds = served(modes, 0, [found[q] for q in columns], phases, rerun)
                totals[i] += hyperedge.hyperedge.copies * float(seconds)
        return totals

    def _indices(self, hyperedge: HyperedgePrices, choice: dict[int, int]) -> tuple[int, int, list[int], list[int]]:
        """Return the row of the producer and whether it runs again, the columns of the consumers and the phases in
        which they read."""
        rerun, k = divmod(choice[hyperedge.hyperedge.producer], len(hyperedge.source_of))
        columns, phases = [], []
        for (cls, _, _), target_of, phase in zip(hyperedge.hyperedge.consumers, hyperedge.target_of, hyperedge.phases):
            is_late, strategy = divmod(choice[cls], len(target_of))
            columns.append(int(target_of[strategy]))
            phases.append(phase | BACKWARD if is_late else phase)
        return int(hyperedge.source_of[k]), rerun, columns, phases

    def _hyperedge(self, number: int, choice: dict[int, int]) -> float:
        hyperedge = self.dual.hyperedges[number]
        source, rerun, columns, phases = self._indices(hyperedge, choice)
        return hyperedge.hyperedge.copies * float(served(self.modes[number], source, columns, phases, rerun))

    def _hyperedge_of(self, number: int, cls: int, choice: dict[int, int]) -> np.ndarray:
        """Return the cost of a hyperedge for every option of one of its classes, the others as they are chosen."""
        hyperedge, modes, runs = self.dual.hyperedges[number], self.modes[number], 2 if cls in self.dual.reruns else 1
        mine = [i for i, (c, _, _) in enumerate(hyperedge.hyperedge.consumers) if c == cls]
        source, rerun, columns, phases = self._indices(hyperedge, choice)
        if hyperedge.hyperedge.producer == cls and not mine:
            every = np.arange(len(hyperedge.sources))
            return hyperedge.hyperedge.copies * np.concatenate(
                [served(modes, every, columns, phases, late)[hyperedge.source_of] for late in range(runs)]
            )
        if hyperedge.hyperedge.producer != cls and len(mine) == 1:
            i, values = mine[0], []
            for late in range(runs):
                phases[i] = hyperedge.phases[i] | BACKWARD if late else hyperedge.phases[i]
                values.append(_by_column(modes, source, rerun, columns, phases, i)[hyperedge.target_of[i]])
            return hyperedge.hyperedge.copies * np.concatenate(values)
        values, here = [], choice[cls]
        for option in range(len(self.own[cls])):
            choice[cls] = option
            values.append(self._hyperedge(number, choice))
        choice[cls] = here
        return np.array(values)

    def improve(
        self, choice: dict[int, int], sweeps: int = 8, among: Mapping[int, np.ndarray] | None = None
    ) -> dict[int, int]:
        """Change one class at a time for the better until nothing improves, in at most so many sweeps. `among`: the
        options that some classes may take, the others all that are allowed."""
        choice = dict(choice)
        settled: set[int] = set()  # classes that nothing has changed beside since they were looked at
        for _ in range(sweeps):
            changed = False
            for i, cls in enumerate(self.dual.classes):
                options = (among or {}).get(cls, self.dual.index[i])
                if len(options) == 1 or cls in settled:
                    continue
                settled.add(cls)
                values = self.own[cls].copy()
                for number in self.hyperedges_of_class[cls]:
                    values += np.minimum(
                        self._hyperedge_of(number, cls, choice), IMPOSSIBLE_SECONDS
                    )  # one less is better
                best = int(options[values[options].argmin()])
                if values[best] < values[choice[cls]] - 1e-15 - 1e-12 * abs(values[best]):
                    choice[cls], changed = best, True
                    settled -= self.neighbours[cls]
            if not changed:
                break
        return choice


def _by_column(
    modes: Sequence[PricedMode], source: int, rerun: int, columns: list[int], phases: list[int], mine: int
) -> np.ndarray:
    """Return the cost of one copy by the column that one consumer takes: a payment of its own, or what joining
    another's adds."""
    others: dict[int, int] = {}
    for i, (q, phase) in enumerate(zip(columns, phases)):
        if i != mine:
            others[q] = others.get(q, 0) | phase
    results = []
    for mode in modes:
        rest = mode.base[rerun, source] + sum(mode.block[phase][source, q] for q, phase in others.items())
        value = mode.block[phases[mine]][source] + rest
        for q, phase in others.items():
            alone = sum(mode.block[p][source, c] for c, p in others.items() if c != q)
            value[q] = mode.base[rerun, source] + alone + mode.block[phase | phases[mine]][source, q]
        results.append(value)
    return results[0] if len(results) == 1 else np.minimum.reduce(results)
