"""Plans of one of a batch's micro-batches, as it is sharded inside of a stage: the fastest, and smaller ones."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ...cost.compute import ComputeCost
from ...frontend.export import Captured
from ...ir.graph import output_node
from ...ir.mesh import Mesh
from ...passes.pipeline.micro_batch import FewBlocks, MicroBatched, few_blocks, micro_batch
from ...passes.pipeline.sequence_chunks import few_in_chunks, in_chunks
from ...passes.pipeline.tail import Tail
from ...plans.pipeline import inside, sizes_of
from ..objective.tail_cost import NO_TAIL, TailCost, tail_cost
from ..problem.multipliers import Prices
from ..problem.recipes import Restriction
from ..solver.last_word import Room, last_word
from ..solver.minimize import Search
from ..solver.search import Outcome, RestrictedSearch, Starts
from ..solver.solver import Solver, replaced
from ..spmd.batch import samples_of
from ..spmd.fixed_recompute import AUTO, NONE
from ..spmd.plan import search, solvers_of
from ..spmd.plan_options import PlanOptions
from ..spmd.planned import Planned

# What all memory of the hardware is worth, in times the compute. The prices are the same whatever the limit is, so that
# less memory finds no plan that more memory does not.
LITTLE = 1e-2  # to the fastest plan
MEMORY_PRICES = (0.1, *(10.0 ** (k / 2) for k in range(21)))  # to others
FEWER = 0.05  # of a plan's bytes, that the next one holds less if it is worth a search
DEAREST = 100.0  # what all memory for tensors is worth within the limit to the last of them
# As far as those are searched of which none is the best.
LARGEST_PROGRAM = 2_000  # variables of one with a row of memory that is far from the plan's: larger ones take minutes
ROUGH = Search(gap=1e-2, rounds=40, largest_program=0, last_word=False)
EXACT = Search(last_word=False)

Report = Callable[[str], None]


@dataclass
class Useful:
    """Says how many times as long as the last plan of a micro-batch the next one may take to be of use, as far as it is
    known."""

    times: float = math.inf

    def note(self, most_seconds: float, least_seconds: float) -> None:
        """Take down that pipelines of use take so many seconds at most, and those of the last plan at least."""
        self.times = most_seconds / least_seconds if least_seconds > 0 else math.inf


class MicroBatchPlans:
    """Plans of one of so many micro-batches of a captured graph of the whole batch, of which `row_chunks` that follow
    one another are chunks of the same rows, on the mesh of a stage, without the `axis` of the stages; of a deep model
    they are searched by few blocks. Raises MicroBatchError if the batch cannot be cut so."""

    def __init__(
        self,
        captured: Captured,
        micro_batches: int,
        mesh: Mesh,
        axis: str,
        options: PlanOptions,
        name: str,
        report: Report,
        row_chunks: int = 1,
    ):
        self.captured, self.micro_batches, self.name, self.report = captured, micro_batches, name, report
        self.row_chunks, rows = row_chunks, micro_batches // row_chunks
        self.mesh = inside(mesh, axis)
        self.ranks, self.limit = mesh.size(axis), float(options.memory_bytes or options.hardware.memory_bytes)
        self.few_rows: list[FewBlocks] = []  # of whole rows
        self.starts: Starts = ()  # choices that the fastest plan is at least as good as
        if captured.compact is None:
            self.micro = in_chunks(micro_batch(captured, rows), row_chunks)
        few = self._few(rows) if captured.compact else FewBlocks(self.micro.captured)
        self.few, self.few_blocks = few.captured, [few]  # of each size of micro-batches
        batch = samples_of(captured.signature)
        self.samples, self.share = batch, batch / (rows * sizes_of(batch, rows)[0]) if batch else 1.0
        smaller = self._few(rows, True) if captured.compact and self.share < 1 else None
        self.few_blocks += [smaller] if smaller else []
        overlay = smaller.captured if smaller else (self.micro.smaller if self.share < 1 else None)
        self.options = replace(
            options,
            within=mesh,
            micro_batches=micro_batches,
            baselines=False,
            memory_bytes=None,
            overlay=overlay.graph if overlay else None,
        )
        self.solvers = solvers_of(self.few, self.mesh, self.options, report)

    def _few(self, rows: int, smaller: bool = False) -> FewBlocks:
        """Return the few blocks of a micro-batch of so many, or of one of its chunks."""
        self.few_rows.append(few_blocks(self.captured, rows, smaller))
        return few_in_chunks(self.few_rows[-1], self.row_chunks)

    @cached_property
    def micro(self) -> MicroBatched:
        """Cut the batch of the whole graph into micro-batches."""
        self.report(f"cutting the batch into {self.micro_batches}")
        rows = micro_batch(self.captured, self.micro_batches // self.row_chunks, self.few_rows)
        return in_chunks(rows, self.row_chunks, self.few_blocks)

    @cached_property
    def tail(self) -> Tail | None:
        """Return what a step computes between the forwards of all micro-batches and their backwards, if it has such a
        tail."""
        waits = any(role.kind == "joined" for role in output_node(self.few.graph).meta["roles"])
        return self.micro.tail if waits else None

    @cached_property
    def tail_cost(self) -> TailCost:
        """Return what the tail costs, nothing if there is none."""
        cost = ComputeCost(self.options.hardware)
        return tail_cost(self.tail, cost, self.mesh) if self.tail is not None else NO_TAIL

    def under(self, strategy: str, pin: Mapping[str, str] | None = None) -> MicroBatchPlans:
        """Return the plans of what a strategy allows, with more parameters pinned."""
        other = copy.copy(self)
        other.options = replace(self.options, strategy=strategy, pin={**self.options.pin, **(pin or {})})
        other.starts = self.fastest.chosen.found
        for known in ("fastest", "free_of_memory", "_run"):
            other.__dict__.pop(known, None)
        return other

    def renamed(self, chosen: Outcome) -> Outcome:
        """Return a plan that a strategy allows as one that was found without it, with the bound of all plans."""
        of_all = self.fastest.chosen
        return replace(chosen, restriction=of_all.restriction, bound_seconds=of_all.bound_seconds)

    @cached_property
    def fastest(self) -> Planned:
        """Return the fastest plan of a micro-batch, whatever memory it takes; of almost equally fast ones a small
        one."""
        hardware, level = self.options.hardware, self.options.recompute
        solvers = [replaced(one, one.search, self.ranks * hardware.memory_bytes) for one in self.solvers]
        for solver in solvers:
            solver.free = replace(solver.free, byte_seconds=solver.unit_price * LITTLE)
        options = replace(self.options, refuses=False, recompute=NONE if level == AUTO else level)
        return search(self.few, self.mesh, options, self.name, self.report, solvers, self.starts)

    def at_prices(self, useful: Useful | None = None) -> Iterator[Planned]:
        """Iterate over plans of a micro-batch: the fastest, then those that are fastest where memory has ever higher
        prices, until all that are `useful` hold almost as much as the last one: if that costs least at a price, one
        that frees more takes longer by that price."""
        yield self.fastest
        if self.options.recompute != AUTO:
            return
        unit, seen = self.fastest.solver.unit_price, [self.fastest.evaluation.choice]
        last, room = self.fastest, max(self.limit - self.fastest.problem.reserve_bytes, 1.0)
        dearest = DEAREST * self.options.hardware.memory_bytes / room
        for price in itertools.takewhile(lambda price: price <= dearest, MEMORY_PRICES):
            one = self._run.at_if_new(replace(self.free_of_memory, byte_seconds=unit * price), ROUGH, seen)
            if one is not None:
                seen.append(one.evaluation.choice)
                yield (last := self._planned(one))
            e, more = last.evaluation, useful.times - 1 if useful else math.inf
            if more * e.seconds / (unit * price) < FEWER * e.bytes_:
                break

    @cached_property
    def free_of_memory(self) -> Prices:
        """Return the prices of a search in which memory costs nothing yet."""
        gradients = float(self._run.accumulates)  # those of all micro-batches before
        return replace(self.fastest.solver.free, byte_seconds=0.0, saved=True, gradients=gradients)

    def at(self, prices: Prices, effort: Search = EXACT) -> Planned:
        """Return the plan of a micro-batch that costs least at these prices."""
        return self._planned(self._run.at(prices, effort))

    def _planned(self, one: Outcome) -> Planned:
        return replace(self.fastest, chosen=replace(one, bound_seconds=self.fastest.chosen.bound_seconds))

    def in_room(self, inner: Planned, prices: Prices, room_bytes: float) -> Planned | None:
        """Return a faster plan of a micro-batch whose tensors take so many bytes at most, which the integer program
        finds around the plan `inner`; None if there is none."""
        run, e = self._run, inner.evaluation
        most = min(LARGEST_PROGRAM, run.search.largest_program)
        said = last_word(run, run.dual, prices, e, run.by_class(e), Room(room_bytes, run.accumulates), most)
        if said.choice is None:
            return None
        found = run.settled(prices, said.choice)
        chosen = replace(inner.chosen, evaluation=found, program=said.program)
        return replace(inner, chosen=chosen) if found.seconds < e.seconds else None

    @cached_property
    def _run(self) -> RestrictedSearch:
        restriction = Restriction.of(self.options.strategy, self.mesh, self.options.forbid)
        return self.fastest.solver.run(restriction, dict(self.options.pin), self.fastest.chosen.found)

    def within(self, limit: float) -> Planned:
        """Return the fastest plan of a micro-batch that holds so many bytes at most, roughly. Raise
        MemoryInfeasibleError."""
        solvers = [replaced(solver, ROUGH, min(limit, self.ranks * self.limit)) for solver in self.solvers]
        options, starts = replace(self.options, refuses=True), self.fastest.chosen.found
        return search(self.few, self.mesh, options, self.name, self.report, solvers, starts)

    def of_whole(self, inner: Planned) -> Planned:
        """Return the same plan of the whole graph; it is searched anew if the graph's blocks are not cut alike."""
        if self.few.compact is None or self.few.compact.whole:
            return inner
        if self.micro.captured.compact is None:  # its blocks are not cut alike
            options = replace(self.options, overlay=self.micro.overlay, refuses=False)
            return search(self.micro.captured, self.mesh, options, self.name, self.report)
        solver = next(s for s in self._whole_solvers if s.pricer.reduces_once == inner.pricer.reduces_once)
        return replace(inner, captured=self.micro.captured, solver=solver)

    @cached_property
    def _whole_solvers(self) -> list[Solver]:
        return [solver.of_whole(self.micro.captured) for solver in self.solvers]
