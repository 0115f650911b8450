"""The searches of one problem: for the fastest plan under a memory limit, and for the plans of the expert strategies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..errors import AutoparError
from .ascend import Search
from .blocks import Blocks
from .evaluate import Evaluation, Pricer
from .hubs import HubPrices, hubs_of
from .limit import WithinLimit
from .live_bytes import live_bytes
from .prices import Prices
from .problem import Problem
from .restrict import RECIPES, Restriction, allowed_strategies
from .search import Outcome, Run

BASELINE_GAP = 1e-2  # good enough for a plan that is only compared with


class Solver:
    """Searches one problem under one memory limit. `overlap`: share of a second that is gained when communication runs beside
    compute. `report(text)` is told what is being done."""

    def __init__(self, problem: Problem, pricer: Pricer, limit_bytes: float, search: Search = Search(),
                 report: Callable[[str], None] = lambda text: None, overlap: float = 0.0):  # fmt: skip
        self.problem, self.pricer, self.limit_bytes = problem, pricer, limit_bytes
        self.room_bytes = limit_bytes - problem.reserve_bytes  # for tensors
        self.search, self.report, self.blocks = search, report, Blocks(problem)
        self.hubs = [HubPrices(problem, pricer, hub) for hub in hubs_of(problem)]
        self.found: list[dict[int, int]] = []  # choices of all searches so far: each next one starts from the best of them
        fastest = sum(float(c.seconds.min()) * c.copies for c in problem.classes.values())
        self.unit_price = max(fastest, 1e-6) / limit_bytes  # at which the whole memory costs as much as all compute
        weight = 1.0 - overlap
        # among equally fast plans the smaller one
        self.free = Prices(self.unit_price * 1e-5, gradients=0.0, hidden_forward=weight, hidden_backward=weight, overlap=overlap)

    def solve(self, restriction: Restriction, pins: dict[str, str] | None = None) -> Outcome:
        """The fastest plan that fits. Raises MemoryInfeasibleError with what is missing."""
        run = Run(self, restriction, self.allowed(restriction, pins), self.search)
        fastest = run.fastest(is_limited=True)
        return fastest if fastest.fits else WithinLimit(run, fastest).outcome()

    def allowed(self, restriction: Restriction, pins: dict[str, str] | None = None) -> dict[int, np.ndarray]:
        """A mask over the strategies of every class. What may be on the device stays there if gradients wait for one reduction: on
        the host they would wait unreduced."""
        masks = allowed_strategies(self.problem, restriction, pins)
        for cls, options in self.problem.classes.items() if self.pricer.reduces_once else ():
            on_device = np.array([not s.on_host for s in options.strategies])
            masks[cls] &= on_device | ~on_device.any()
        return masks

    def settled(self, e: Evaluation) -> Evaluation:
        """The evaluation with all that is alive at its peak."""
        self.problem.split(e.first)
        return replace(e, passing_bytes=live_bytes(self.problem, e, self.pricer).peak_bytes - e.charged_bytes)

    def fastest(self, restriction: Restriction, pins: dict[str, str] | None = None) -> Outcome:
        """The fastest plan, whether it fits or not."""
        return Run(self, restriction, self.allowed(restriction, pins), self.search).fastest()

    def baseline(self, name: str) -> Outcome | AutoparError:
        """An expert strategy as experts use it: the fastest plan, whether it fits or not."""
        try:
            restriction = Restriction.of(name, self.problem.mesh)
            self.report(name)
            search = replace(self.search, gap=max(self.search.gap, BASELINE_GAP))
            return Run(self, restriction, self.allowed(restriction), search).fastest()
        except AutoparError as error:
            return error

    def baselines(self) -> dict[str, Outcome | AutoparError]:
        return {name: self.baseline(name) for name in RECIPES}
