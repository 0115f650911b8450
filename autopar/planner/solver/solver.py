"""The searches of one problem: for the fastest plan under a memory limit, and for the plans of the expert
strategies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np

from ...errors import AutoparError, MemoryInfeasibleError, not_compared
from ...frontend.export import Captured
from ...rules import Strategy
from ...utils.format import size
from ..objective.checkpoint_blocks import Blocks
from ..objective.evaluate import Evaluation
from ..objective.memory_timeline import live_bytes
from ..objective.player import played_seconds
from ..objective.pricer import Pricer
from ..problem.allowed import allowed_strategies
from ..problem.hf_tp_plan import TensorPlan
from ..problem.multipliers import Prices, spans_of
from ..problem.problem import Problem
from ..problem.recipes import FREELY, Restriction
from ..problem.vertices import Vertex
from .dual import Dual
from .hyperedges import HyperedgePrices, hyperedges_of
from .memory_limit import WithinLimit
from .minimize import DUAL, BeyondCutoff, Search
from .on_host import fastest_with_host, smallest_with_host
from .search import Outcome, RestrictedSearch, Starts

MOST_TRIES = 4  # to make one plan fit
RECIPE_GAP = 5e-3  # good enough for a plan of a strategy
SWEEPS = 8  # of a dual, for a first bound
MARGIN = 0.05  # of the room for tensors


class Solver:
    """Searches one problem under one memory limit. `overlap`: share of a second that is gained when communication runs
    beside compute. `report(text)` is told what is being done."""

    def __init__(
        self,
        problem: Problem,
        pricer: Pricer,
        limit_bytes: float,
        search: Search = Search(),
        report: Callable[[str], None] = lambda text: None,
        overlap: float = 0.0,
        alike: Solver | None = None,
    ):
        """Make a solver; `alike`: one of the same problem and pricer."""
        self.problem, self.pricer, self.limit_bytes = problem, pricer, limit_bytes
        self.room_bytes = limit_bytes - problem.reserve_bytes  # for tensors
        self.search, self.report = search, report
        self.blocks: Blocks = alike.blocks if alike else Blocks(problem, pricer)
        self.alike = alike
        fastest = sum(float(c.seconds.min()) * c.copies for c in problem.classes.values())
        room = self.room_bytes if self.room_bytes > 0 else limit_bytes
        self.unit_price = max(fastest, 1e-6) / room  # at which the whole memory costs as much as all compute
        spans, classes = len(spans_of(pricer.micro_batches)), pricer.prices.streams - 1
        links = ((0.0,) * classes,) * spans if overlap else ()
        self.weights = spans * classes if overlap else 0  # of links
        # among equally fast plans the smaller one
        self.free = Prices(
            self.unit_price * 1e-5, gradients=0.0, overlap=overlap, links=links, micro_batches=pricer.micro_batches
        )

    @property
    def host_bytes_per_second(self) -> float:
        """Return the speed of the link to the host for values that wait there, 0 where none may."""
        return self.problem.offload.activation_bytes_per_second

    @cached_property
    def hyperedges(self) -> list[HyperedgePrices]:
        """Return the prices of all hyperedges, which a solver that evaluates plans alone does not need."""
        if self.alike:
            return self.alike.hyperedges
        return [HyperedgePrices(self.problem, self.pricer, hyperedge) for hyperedge in hyperedges_of(self.problem)]

    def of_whole(self, captured: Captured) -> Solver:
        """Return the same solver where it is known which nodes of the whole graph the compact one stands for."""
        problem = replace(self.problem, whole=captured.graph, compact=captured.compact)
        pricer = replace(self.pricer, problem=problem)
        return Solver(problem, pricer, self.limit_bytes, self.search, self.report, self.free.overlap)

    def run(
        self, restriction: Restriction, pins: dict[str, str] | None = None, starts: Starts = ()
    ) -> RestrictedSearch:
        """Return a search of what a restriction and pins allow, which does at least as well as the choices `starts`."""
        return RestrictedSearch(self, restriction, self.allowed(restriction, pins), self.search, starts)

    def solve(self, restriction: Restriction, pins: dict[str, str] | None = None, starts: Starts = ()) -> Outcome:
        """Return the fastest plan that fits; for `starts` see `run`. Raise MemoryInfeasibleError with what is missing
        if none does, and BeyondCutoff if none takes less than the cutoff."""
        run = self.run(restriction, pins, starts)
        first = self._first(run)
        return first if first.fits else replace(WithinLimit(run, first).outcome(), is_limited=True)

    def _first(self, run: RestrictedSearch) -> Outcome:
        """Return the fastest plan as it is if it fits, or if it is to be one of a strategy, whose shardings hardly
        differ, with as much computed again as makes it fit, if anything does. A strategy's plan has no last word, so
        that it is the one that stands beside others. Raise BeyondCutoff."""
        is_free = run.restriction.name == FREELY
        if not is_free:
            run.search = replace(run.search, gap=max(run.search.gap, RECIPE_GAP), last_word=False)
        fastest = run.fastest(is_limited=True)
        if fastest.bound_seconds >= self.search.cutoff_seconds:
            raise BeyondCutoff(fastest.bound_seconds)
        fitted = None if is_free or fastest.fits else self.made_to_fit(fastest.evaluation)
        if not is_free and not fastest.fits:
            mixed = fastest_with_host(self, [(fastest.evaluation, self.free)], fitted)
            found = [*([] if fitted is None else [fitted]), *mixed]
            fitted = min(found, key=lambda e: played_seconds(self.problem, e, self.pricer)) if mixed else fitted
        return fastest if fitted is None else replace(fastest, evaluation=fitted, fits=True)

    def allowed(self, restriction: Restriction, pins: dict[str, str] | None = None) -> dict[int, np.ndarray]:
        """Return a mask over the strategies of every class. What may be on the device stays there if gradients wait for
        one reduction: on the host they would wait unreduced."""
        masks = allowed_strategies(self.problem, restriction, pins)
        for cls, options in self.problem.classes.items() if self.pricer.reduces_once else ():
            on_device = np.array([not s.on_host for s in options.strategies])
            masks[cls] &= on_device | ~on_device.any()
        return masks

    def with_peak(self, e: Evaluation) -> Evaluation:
        """Return the evaluation with all that is alive at its peak."""
        live = live_bytes(self.problem, e, self.pricer)
        return replace(e, uncharged_bytes=live.peak_bytes - e.charged_bytes, peaks_early=live.peaks_early)

    def refusal(self, message: str, smallest: Evaluation) -> MemoryInfeasibleError:
        """Return the error of a message that ends before the bytes that are needed; `smallest` is a plan that needs
        fewest."""
        need, missing = smallest.bytes_, smallest.bytes_ - self.limit_bytes
        reserve, enough = self.problem.reserve_bytes, size(1.01 * need).replace(" ", "")
        times = math.ceil((need - reserve) / max(self.room_bytes, 1.0))  # what is reserved no device shares
        devices = f"about {times}x the devices, a smaller batch, or " if self.room_bytes > 0 else ""
        return MemoryInfeasibleError(
            f"{message} {size(need)}, {size(missing)} more",
            missing_bytes=math.ceil(missing),
            mesh=self.problem.mesh,
            micro_batches=self.pricer.micro_batches,
            breakdown=live_bytes(self.problem, smallest, self.pricer).at_peak,
            fix=f"{devices}memory={enough} would fit",
        )

    def made_to_fit(self, e: Evaluation) -> Evaluation | None:
        """Return the same sharding with as much computed again as the memory demands, None if that is of no use."""
        limit = self.limit_bytes
        for _ in range(MOST_TRIES):
            fitted, _ = self.blocks.fit(e, limit, self.free)
            fitted = fitted and self.with_peak(fitted)
            if fitted is None or fitted.bytes_ <= self.limit_bytes:
                return fitted
            limit -= fitted.bytes_ - self.limit_bytes  # more passes by than before
        return None

    def may_fit(self, restriction: Restriction, seconds: float) -> bool:
        """Return False if no plan of a restriction can fit that takes less than so many seconds: the bound of plans
        that recompute says so, at a price of memory at which little else counts."""
        run = self.run(restriction)
        price = seconds / (MARGIN * max(self.room_bytes, 1.0))
        prices = replace(self.free, byte_seconds=price, saved=True, gradients=float(run.accumulates))
        dual = Dual(self.problem, run.hyperedges, run.allowed, prices, restriction.keep, self.blocks.reruns)
        for i in range(2 * SWEEPS):
            dual.sweep(i % 2 == 0)
        return dual.bound() - price * self.room_bytes < seconds

    def is_too_large(self, restriction: Restriction, pins: dict[str, str] | None = None) -> bool:
        """Return whether one op makes more than fits under each strategy that is allowed, so that no plan fits."""
        problem = self.problem
        large = [v for v in problem.vertices if v.kind == "op" and v.index not in problem.views and self._is_large(v)]
        allowed = self.allowed(restriction, pins) if large else {}
        for v in large:
            strategies = itertools.compress(problem.choices(v.index).strategies, allowed[v.cls])
            if all(self._made_bytes(v.index, strategy) > self.room_bytes for strategy in strategies):
                return True
        return False

    def _is_large(self, v: Vertex) -> bool:
        """Return whether what an op makes would not fit on one device whole."""
        return sum(value.numel() * value.element_size() for value in v.values) > self.room_bytes

    def _made_bytes(self, vertex: int, strategy: Strategy) -> float:
        return sum(self.pricer.local_bytes(vertex, i, layout) for i, layout in enumerate(strategy.outputs))

    def may_be_fitted(self, restriction: Restriction, pins: dict[str, str] | None = None, starts: Starts = ()) -> bool:
        """Return whether the smallest plan that a search ends with fits, with all computed again or values on the
        host."""
        run = self.run(restriction, pins, starts)
        smallest = run.smallest()
        if smallest.bytes_ <= self.limit_bytes or not self.host_bytes_per_second:
            return smallest.bytes_ <= self.limit_bytes
        plain = self.with_peak(run.evaluate(self.free, smallest.choice, smallest.first))
        return bool(smallest_with_host(self, [(plain, self.free)]))

    def baseline(self, name: str, styles: Mapping[str, str] | None = None) -> Outcome | AutoparError:
        """Return the plan of an expert strategy, the one that is found if it is asked for, or with `styles` of the
        model's own; as it is if computing again does not make it fit; or why there is none."""
        try:
            mesh = self.problem.mesh
            restriction = (
                Restriction.of_model(TensorPlan(tuple(styles.items())), mesh) if styles else Restriction.of(name, mesh)
            )
            self.report(name)
            run = self.run(restriction)
            run.search = replace(run.search, solver=DUAL)
            return self._first(run)
        except Exception as error:
            return not_compared(error)


def replaced(old: Solver, search: Search, limit_bytes: float | None = None) -> Solver:
    """Return a solver of the same problem that goes as far as `search` says, under another limit if one is given."""
    limit = old.limit_bytes if limit_bytes is None else limit_bytes
    return Solver(old.problem, old.pricer, limit, search, old.report, old.free.overlap, old)
