"""Choose a mesh for so many devices: factorizations are tried on the node's topology, cheap bounds first, and the
fastest plan wins.

An axis has no role of its own in the search space, so a mesh is its sizes, outermost first. The innermost of several
stays inside a node, since its neighbours are the closest; the outermost divides the batch. First come all meshes of one
and two axes, then those of three that refine the best of them: two axes can do what one can, and only the moves of a
few more tensors gain from a third. A mesh is searched only while its bound, some sweeps of the dual
(autopar/planner/solver/dual.py), is below the best plan, and roughly; the plan of the best mesh is then searched in
full. All bounds are of plans that fit, so that they can be compared; one axis, and one in the nodes beside one over
them, are searched whatever the others' bounds. If no mesh has a plan that fits, that which misses least is searched
once more with its plans changed op by op.

Where memory binds, a step of several micro-batches may be faster: of the meshes that would be fastest without the limit
some are searched again with as many as their activations are too large.

Axes are called dp, cp and tp as people would name them. Meshes with stages are tried by
autopar/planner/pipeline/mesh_search.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...errors import AutoparError, InputError, MemoryInfeasibleError
from ...frontend.export import Captured
from ...ir.mesh import Mesh
from ...plans.entries import MeshCandidate
from ..problem.recipes import Restriction
from ..solver.dual import Dual
from ..solver.minimize import BeyondCutoff, Search
from ..solver.solver import Solver, replaced
from . import expert_plans, plan
from .batch import at_least, excess, micro_batch_of
from .plan_options import PlanOptions
from .planned import Planned

if TYPE_CHECKING:
    from ...passes.pipeline.micro_batch import MicroBatched

SWEEPS = 4
MEMORY_UNITS = (0.3, 3.0)  # prices of memory, in units of the solver's, at which meshes are bounded
MOST_COARSE, MOST_FINE = 3, 2  # meshes that are searched, of one or two axes and of three
MOST_CUT = 3  # meshes that are searched with several micro-batches
BINDS = 1.02  # times the bound without a limit: above that memory binds
MOST_BOUNDED = 3  # meshes of three axes that are bounded, which takes longest: those whose middle axis is shortest
BEYOND, UNFIT = "a pipeline takes less than its bound", "does not fit"
ROUGH_GAP = 2e-2  # of the search that says which mesh is best


def candidates(devices: int, node: int, batch: int, axes: int = 2) -> list[Mesh]:
    """Return the meshes of up to two axes, or of three, over nodes of so many devices. The outermost axis divides a
    batch of several samples; one sample is cut along its sequence, and the mesh has no dp."""
    names = ("dp", "cp", "tp") if batch > 1 else ("cp", "sp", "tp")
    inner = [t for t in range(2, node + 1) if node % t == 0 and devices % t == 0 and t < devices]
    if axes == 3:
        sizes = [(devices // t // m, m, t) for t in inner for m in range(2, devices // t) if devices // t % m == 0]
    else:
        sizes = [(devices,), *((devices // t, t) for t in inner)]
    named = {1: names[:1], 2: names[::2], 3: names}
    return [Mesh(named[len(s)], s) for s in sizes if batch % s[0] == 0 or batch == 1]


def refines(mesh: Mesh, coarse: Mesh) -> bool:
    """Return whether neighbouring axes of a mesh of three make those of a coarser one."""
    a, b, c = mesh.sizes
    return coarse.sizes in ((a * b, c), (a, b * c), (a * b * c,))


@dataclass
class _SearchedMesh:
    """A mesh and a number of micro-batches with their problem. `bound`: seconds of a step that no plan that fits
    undercuts, `roomy` the same without a limit of memory. `bound` and `planned` are filled as the search goes on."""

    mesh: Mesh
    micro_batches: int
    solvers: list[Solver]
    bound: float
    roomy: float
    planned: Planned | None = None
    missing_bytes: float = math.inf  # where the smallest plan that was found does not fit
    note: str = ""

    @property
    def seconds(self) -> float:
        """Return the seconds of a step under its plan, infinite while it has none."""
        planned = self.planned
        return self.micro_batches * planned.chosen.seconds + planned.pricer.tail.seconds if planned else math.inf

    @property
    def is_short_of_memory(self) -> bool:
        """Return whether a smaller micro-batch may help: the mesh would be faster with more memory."""
        recomputes = self.planned is not None and bool(self.planned.evaluation.recomputed)
        return recomputes or self.note == UNFIT or self.bound > BINDS * self.roomy


class _MeshSearch:
    """The candidates of one search, and the best plan so far."""

    def __init__(self, captured: Captured, options: PlanOptions, model: str, report: Callable[[str], None]):
        self.captured, self.model, self.report = captured, model, report
        self.options = replace(options, baselines=False)
        self.rough = replace(options.search, gap=max(options.search.gap, ROUGH_GAP), squeezes=False)
        self.candidates: list[_SearchedMesh] = []
        self.refusals: list[AutoparError] = []
        self.calls: dict[int, tuple[MicroBatched | None, PlanOptions]] = {}

    def call(self, micro_batches: int) -> tuple[Captured, PlanOptions]:
        """Return the graph of one of so many micro-batches and the options of planning it."""
        if micro_batches not in self.calls:
            options = replace(self.options, micro_batches=micro_batches)
            self.calls[micro_batches] = micro_batch_of(self.captured, options)
        micro, options = self.calls[micro_batches]
        return micro.captured if micro else self.captured, options

    @property
    def refusal(self) -> AutoparError | None:
        """Return the refusal of the mesh that lacks least memory; if all failed otherwise, that of the last one; None
        if none failed."""
        missing = [e for e in self.refusals if isinstance(e, MemoryInfeasibleError)]
        return min(missing, key=lambda e: e.missing_bytes, default=self.refusals[-1] if self.refusals else None)

    @property
    def best(self) -> _SearchedMesh | None:
        """Return the try with the fastest plan, None if there is no plan yet."""
        return min((t for t in self.candidates if t.planned), key=lambda t: t.seconds, default=None)

    def visit(self, meshes: Sequence[Mesh], most: int, micro_batches: int) -> None:
        """Bound all meshes, then search the `most` promising ones, and plain ones."""
        bounded = [t for mesh in meshes for t in self._bounded(mesh, micro_batches)]
        self.candidates += bounded
        for i, one in enumerate(sorted(bounded, key=lambda t: t.bound)):
            if self.best and one.bound >= self.best.seconds:
                one.note = "its bound is above the best plan"
            elif i >= most and self.best and not self._is_plain(one.mesh):
                one.note = "its bound is not among the lowest"
            else:
                self._search(one)
            if one is not self.best:
                one.solvers = []

    def visit_cut(self) -> None:
        """Search meshes that are short of memory with several micro-batches, the most promising first."""
        short = sorted((one for one in self.candidates if one.is_short_of_memory), key=lambda t: t.roomy)
        for one in short[:MOST_CUT]:
            if self.best and one.roomy >= self.best.seconds:
                break
            batch, outer = _batch(self.call(1)[0]), one.mesh.sizes[0]
            counts = [k for k in range(2, batch // outer + 1) if batch % k == 0 and batch // k % outer == 0]
            least = excess(one.planned) if one.planned else excess(None)
            for count in dict.fromkeys(k for k in (at_least(counts, least), *counts[-1:]) if k):
                known = len(self.candidates)
                self.visit([one.mesh], 1, count)
                if any(t.planned for t in self.candidates[known:]):
                    break

    def _is_plain(self, mesh: Mesh) -> bool:
        """Return whether a mesh is that of fully sharded data parallelism: of one axis, or one in the nodes too."""
        node = self.options.hardware.links[0].devices or mesh.devices
        return len(mesh.sizes) == 1 or len(mesh.sizes) == 2 and mesh.sizes[-1] == node

    def _bounded(self, mesh: Mesh, micro_batches: int) -> Iterator[_SearchedMesh]:
        try:
            self.options.check(mesh)
        except AutoparError as error:
            self.refusals.append(error)
            return
        self.report(f"bounding {mesh}")
        solvers = plan.solvers_of(*self._call_on(mesh, micro_batches))
        restriction = Restriction.of(self.options.strategy, mesh, self.options.forbid)
        bounds = [_quick_bounds(s, restriction, dict(self.options.pin)) for s in solvers]
        bound, roomy = (micro_batches * min(values) for values in zip(*bounds))
        yield _SearchedMesh(mesh, micro_batches, solvers, bound, roomy)

    def _search(self, one: _SearchedMesh) -> None:
        def tell(text: str) -> None:
            self.report(f"{one.mesh}: {text}")

        before = self.best
        try:
            one.planned = self._planned(one, self.rough, tell)
            one.note, one.bound = "", max(one.bound, one.micro_batches * one.planned.chosen.bound_seconds)
        except BeyondCutoff as error:
            one.note, one.bound = BEYOND, one.micro_batches * error.bound_seconds
        except MemoryInfeasibleError as error:
            one.note, one.missing_bytes = UNFIT, error.missing_bytes
            self.refusals.append(error)
        if before and before is not self.best:
            before.solvers = []

    def squeeze(self) -> None:
        """Search the mesh that lacks least memory as exactly as a single one."""
        short = [one for one in self.candidates if one.missing_bytes < math.inf]
        if short:
            self.rough = replace(self.rough, squeezes=True)
            least = min(short, key=lambda one: one.missing_bytes)
            least.solvers = plan.solvers_of(*self._call_on(least.mesh, least.micro_batches))
            self._search(least)

    def _call_on(self, mesh: Mesh, micro_batches: int) -> tuple[Captured, Mesh, PlanOptions]:
        captured, options = self.call(micro_batches)
        return captured, mesh, options

    def _planned(self, one: _SearchedMesh, search: Search, tell: Callable[[str], None]) -> Planned:
        search = replace(search, cutoff_seconds=search.cutoff_seconds / one.micro_batches)
        one.solvers = [replaced(solver, search) for solver in one.solvers]
        starts = one.planned.chosen.found if one.planned else ()
        captured, options = self.call(one.micro_batches)
        found = plan.search(captured, one.mesh, options, self.model, tell, one.solvers, starts)
        micro, _ = self.calls[one.micro_batches]
        return replace(found, captured=self.captured, micro=micro) if micro else found

    def search_in_full(self, one: _SearchedMesh) -> None:
        """Search a mesh in full."""
        if self.options.search.gap < self.rough.gap:
            self.report(f"{one.mesh}: in full")
            full = self._planned(one, self.options.search, self.report)
            one.planned = min(one.planned, full, key=lambda planned: planned.chosen.seconds)
            one.bound = max(one.bound, one.micro_batches * full.chosen.bound_seconds)


def search(
    captured: Captured,
    devices: int,
    options: PlanOptions,
    model: str = "model",
    report: Callable[[str], None] = lambda t: None,
    is_free: bool = False,
) -> Planned:
    """Return the best plan of the captured call of a whole batch over all candidate meshes, which its `meshes` list;
    with `is_free` micro-batches are tried too. Raise InputError for a batch that no mesh divides; if there is no plan
    for any, what planning raises, of the mesh that misses least memory; BeyondCutoff, with its `candidates`, the meshes
    that were searched, if none takes less than the search's cutoff, as far as meshes of two axes tell."""
    tour = _MeshSearch(captured, options, model, report)
    many = options.micro_batches
    node, batch = options.hardware.links[0].devices or devices, _batch(tour.call(many)[0])
    coarse, fine = candidates(devices, node, batch), candidates(devices, node, batch, axes=3)
    if not coarse and not fine:
        raise _indivisible(devices, node, batch)
    tour.visit(coarse, MOST_COARSE, many)
    best = tour.best
    if best is None and any(t.note == BEYOND for t in tour.candidates) and not is_free:
        raise _beyond(tour)
    finer = [m for m in fine if best is None or refines(m, best.mesh)]
    tour.visit(sorted(finer, key=lambda m: m.sizes[1])[:MOST_BOUNDED], MOST_FINE, many)
    if is_free and many == 1:
        tour.visit_cut()
    if tour.best is None:
        tour.squeeze()
    best = tour.best
    if best is None:
        raise _beyond(tour) if any(t.note == BEYOND for t in tour.candidates) else tour.refusal or _beyond(tour)
    tour.search_in_full(best)
    planned = best.planned
    assert planned is not None
    if options.baselines:
        others = expert_plans.rows(best.solvers, options.styles)
        planned = replace(
            planned,
            options=replace(planned.options, baselines=True),
            others=others,
            chosen=plan.not_worse(planned.chosen, others, options),
        )
    return replace(planned, meshes=_reported_meshes(tour))


def _beyond(tour: _MeshSearch) -> BeyondCutoff:
    error = BeyondCutoff(min(one.bound for one in tour.candidates))
    error.candidates = _reported_meshes(tour)
    return error


def _reported_meshes(tour: _MeshSearch) -> tuple[MeshCandidate, ...]:
    return tuple(map(_reported, sorted(tour.candidates, key=_order)))


def _quick_bounds(solver: Solver, restriction: Restriction, pins: dict[str, str]) -> tuple[float, float]:
    """Return seconds of a pass that no plan that fits undercuts, and the same of plans of whatever memory. Where memory
    has a price, every op may run again."""
    allowed, free, room = solver.allowed(restriction, pins), solver.free, solver.room_bytes
    roomy = bound = _swept(Dual(solver.problem, solver.hyperedges, allowed, free, restriction.keep), solver.limit_bytes)
    accumulates = float(solver.pricer.micro_batches > 1)
    dual: Dual | None = None
    for units in MEMORY_UNITS:
        prices = replace(free, byte_seconds=units * solver.unit_price, saved=True, gradients=accumulates)
        if dual is None:
            dual = Dual(solver.problem, solver.hyperedges, allowed, prices, restriction.keep, solver.blocks.reruns)
        else:
            dual.price(prices)
        limited = _swept(dual, room)
        if limited <= bound:
            break
        bound = limited
    return bound, roomy


def _swept(dual: Dual, limit_bytes: float) -> float:
    """Return the bound of a dual after some sweeps, less what the limit is worth at its price of memory."""
    for _ in range(SWEEPS):
        dual.sweep(True)
        dual.sweep(False)
    return max(0.0, dual.bound() - dual.prices.byte_seconds * limit_bytes)


def _order(one: _SearchedMesh) -> tuple:
    return one.seconds, one.bound, str(one.mesh)


def _reported(one: _SearchedMesh) -> MeshCandidate:
    """Return how a mesh fared, in seconds of a step."""
    many = f"{one.micro_batches} micro-batches" if one.micro_batches > 1 else ""
    note = "; ".join(filter(None, (many, one.note)))
    if one.planned is None:
        return MeshCandidate(str(one.mesh), one.bound, None, None, None, note)
    return MeshCandidate(
        str(one.mesh), one.bound, one.seconds, one.planned.evaluation.bytes_, one.planned.chosen.gap, note
    )


def _batch(captured: Captured) -> int:
    """Return the samples of one pass, 1 if the model has no input with dims."""
    nodes = [n for n in captured.graph.nodes if n.op == "placeholder" and n.meta["role"].kind == "input"]
    return next((int(n.meta["val"].shape[0]) for n in nodes if n.meta["val"].dim()), 1)


def _indivisible(devices: int, node: int, batch: int) -> InputError:
    def fits(b: int) -> bool:
        return bool(candidates(devices, node, b) or candidates(devices, node, b, axes=3))

    near = [next(filter(fits, range(batch, 1, -1)), None), next(filter(fits, range(batch, batch + devices + 1)))]
    return InputError(
        f"a batch of {batch} samples cannot be cut evenly over the outer axis of any mesh of {devices} devices",
        fix=f"use a batch of {' or '.join(str(b) for b in near if b)}, or name a mesh whose axes cut the sequence",
    )
