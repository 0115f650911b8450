"""At least how long it takes to make a saved value again in the backward, whatever the plan: what lower bounds charge for it.

A value is made by its op, from inputs that must be there: one that the backward reads as well pays for itself, another has to be
saved for this or made again in turn. What several values need is paid for in equal parts, so that no plan is charged twice:

    part(v) = (seconds(v) + sum of need(i) over the inputs i that the backward does not read) / takers(v)
    need(i) = min(price of saving i / uses of i, part(producer of i)), and the first alone at the border of a block
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import numpy as np

from .evaluate import RESIDENT_LEAVES, Pricer
from .hubs import HubPrices
from .prices import Prices
from .problem import Problem


class Again:
    """Of one problem, in which the values of the vertices in `inner` may be made again."""

    def __init__(self, problem: Problem, pricer: Pricer, inner: Collection[int]):
        self.problem, self.pricer, self.inner = problem, pricer, frozenset(inner)
        self._is_read_late = {(u.producer, u.output) for u in problem.uses if u.phase == "backward"}
        self._uses = Counter((u.producer, u.output) for u in problem.uses)
        self._takers: Counter[int] = Counter()
        for (v, output), uses in self._uses.items():
            self._takers[v] += 1 if (v, output) in self._is_read_late else uses
        self._least_bytes: dict[tuple[int, int], float] = {}
        self._needs: dict[tuple[int, int], float] = {}
        self._prices: Prices | None = None

    def seconds(self, hub: HubPrices, prices: Prices) -> np.ndarray | None:
        """Priced seconds for one copy of a hub's tensor, by producer layout; None if it may not be made again."""
        v = hub.hub.example[0]
        if v not in self.inner:
            return None
        if prices != self._prices:
            self._prices, self._needs = prices, {}
        least = np.full(len(hub.sources), np.inf)
        np.minimum.at(least, hub.source_of, self.problem.choices(v).seconds)
        return (least * prices.compute("backward") + self._inputs(v)) / self._takers[v]

    def _inputs(self, v: int) -> float:
        return sum(self._need(p, o) for p, o in self.problem.vertices[v].inputs)

    def _need(self, v: int, output: int) -> float:
        """What one use of a tensor by something that is made again costs at least."""
        if (v, output) in self._is_read_late or self.problem.vertices[v].kind in RESIDENT_LEAVES:
            return 0.0
        if (v, output) not in self._needs:
            need = self._prices.byte_seconds * self._bytes(v, output) / self._uses[v, output]
            if v in self.inner:
                own = float(self.problem.choices(v).seconds.min()) * self._prices.compute("backward")
                need = min(need, (own + self._inputs(v)) / self._takers[v])
            self._needs[v, output] = need
        return self._needs[v, output]

    def _bytes(self, v: int, output: int) -> float:
        """Of a tensor in the layout that takes least, on the device that holds most of it."""
        if (v, output) not in self._least_bytes:
            layouts = self.problem.choices(v).output_layouts(output)
            self._least_bytes[v, output] = min(self.pricer.local_bytes(v, output, layout) for layout in dict.fromkeys(layouts))
        return self._least_bytes[v, output]
