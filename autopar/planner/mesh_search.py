"""Choose a mesh for so many devices: factorizations are tried on the node's topology, cheap bounds first, and the
fastest plan wins.

An axis has no role of its own in the search space, so a mesh is its sizes, outermost first. The innermost of several
stays inside a node, since its neighbours are the closest; the outermost divides the batch. First come all meshes of one
and two axes, then those of three that refine the best of them: two axes can do what one can, and only the moves of a
few more tensors gain from a third. A mesh is searched only while its bound, some sweeps of the dual
(autopar/planner/solver/dual.py), is below the best plan, and roughly; the plan of the best mesh is then searched in
full.

Axes are called dp, cp and tp as people would name them. Meshes with stages are tried by
autopar/planner/pipeline/mesh_search.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..errors import AutoparError, InputError, MemoryInfeasibleError
from ..frontend.export import Captured
from ..ir.mesh import Mesh
from ..plans.plan import MeshCandidate
from . import expert_plans, plan
from .problem.recipes import Restriction
from .solver.dual import Dual
from .solver.minimize import BeyondCutoff, Search
from .solver.solver import Solver, replaced

SWEEPS = 4
MOST_COARSE, MOST_FINE = 3, 2  # meshes that are searched, of one or two axes and of three
MOST_BOUNDED = 3  # meshes of three axes that are bounded, which takes longest: those whose middle axis is shortest
BEYOND = "a pipeline takes less than its bound"
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
    """A mesh with its problem. `bound` and `planned` are filled as the search goes on."""

    mesh: Mesh
    solvers: list[Solver]
    bound: float
    planned: plan.Planned | None = None
    note: str = ""

    @property
    def seconds(self) -> float:
        """Return the seconds of a pass under its plan, infinite while it has none."""
        return self.planned.chosen.seconds if self.planned else math.inf


class _MeshSearch:
    """The candidates of one search, and the best plan so far."""

    def __init__(self, captured: Captured, options: plan.PlanOptions, model: str, report: Callable[[str], None]):
        self.captured, self.model, self.report = captured, model, report
        self.options = replace(options, baselines=False)
        self.rough = replace(options.search, gap=max(options.search.gap, ROUGH_GAP))
        self.candidates: list[_SearchedMesh] = []
        self.refusals: list[AutoparError] = []

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

    def visit(self, meshes: list[Mesh], most: int) -> None:
        """Bound all meshes, then search the `most` promising ones."""
        bounded = [t for mesh in meshes for t in self._bounded(mesh)]
        self.candidates += bounded
        for i, one in enumerate(sorted(bounded, key=lambda t: t.bound)):
            if self.best and one.bound >= self.best.seconds:
                one.note = "its bound is above the best plan"
            elif i >= most and self.best:
                one.note = "its bound is not among the lowest"
            else:
                self._search(one)
            if one is not self.best:
                one.solvers = []

    def _bounded(self, mesh: Mesh) -> Iterator[_SearchedMesh]:
        try:
            self.options.check(mesh)
        except AutoparError as error:
            self.refusals.append(error)
            return
        self.report(f"bounding {mesh}")
        solvers = plan.solvers_of(self.captured, mesh, self.options)
        restriction = Restriction.of(self.options.strategy, mesh, self.options.forbid)
        yield _SearchedMesh(mesh, solvers, min(_quick_bound(s, restriction, dict(self.options.pin)) for s in solvers))

    def _search(self, one: _SearchedMesh) -> None:
        def tell(text: str) -> None:
            self.report(f"{one.mesh}: {text}")

        before = self.best
        try:
            one.planned = self._planned(one, self.rough, tell)
            one.bound = max(one.bound, one.planned.chosen.bound_seconds)
        except BeyondCutoff as error:
            one.note, one.bound = BEYOND, error.bound_seconds
        except MemoryInfeasibleError as error:
            one.note = "does not fit"
            self.refusals.append(error)
        if before and before is not self.best:
            before.solvers = []

    def _planned(self, one: _SearchedMesh, search: Search, tell: Callable[[str], None]) -> plan.Planned:
        one.solvers = [replaced(solver, search) for solver in one.solvers]
        starts = one.planned.chosen.found if one.planned else ()
        return plan.search(self.captured, one.mesh, self.options, self.model, tell, one.solvers, starts)

    def search_in_full(self, one: _SearchedMesh) -> None:
        """Search a mesh in full."""
        if self.options.search.gap < self.rough.gap:
            self.report(f"{one.mesh}: in full")
            full = self._planned(one, self.options.search, self.report)
            one.planned = min(one.planned, full, key=lambda planned: planned.chosen.seconds)
            one.bound = max(one.bound, full.chosen.bound_seconds)


def search(
    captured: Captured, devices: int, options: plan.PlanOptions, model: str = "model",
    report: Callable[[str], None] = lambda t: None,
) -> plan.Planned:  # fmt: skip
    """Return the best plan over all candidate meshes, which its `meshes` list. Raise InputError for a batch that
    no mesh divides; if there is no plan for any, what planning raises, of the mesh that misses least memory;
    BeyondCutoff, with its `candidates`, the meshes that were searched, if none takes less than the search's cutoff, as
    far as meshes of two axes tell."""
    node, batch = options.hardware.links[0].devices or devices, _batch(captured)
    coarse, fine = candidates(devices, node, batch), candidates(devices, node, batch, axes=3)
    if not coarse and not fine:
        raise _indivisible(devices, node, batch)
    tour = _MeshSearch(captured, options, model, report)
    tour.visit(coarse, MOST_COARSE)
    best = tour.best
    if best is None and any(t.note == BEYOND for t in tour.candidates):
        raise _beyond(tour, options.micro_batches)
    finer = [m for m in fine if best is None or refines(m, best.mesh)]
    tour.visit(sorted(finer, key=lambda m: m.sizes[1])[:MOST_BOUNDED], MOST_FINE)
    best = tour.best
    if best is None:
        raise tour.refusal or _beyond(tour, options.micro_batches)
    tour.search_in_full(best)
    planned = best.planned
    if options.baselines:
        others = expert_plans.rows(best.solvers, options.styles)
        planned = replace(
            planned, options=options, others=others, chosen=plan.not_worse(planned.chosen, others, options)
        )
    return replace(planned, meshes=_reported_meshes(tour, options.micro_batches))


def _beyond(tour: _MeshSearch, micro_batches: int) -> BeyondCutoff:
    error = BeyondCutoff(min(one.bound for one in tour.candidates))
    error.candidates = _reported_meshes(tour, micro_batches)
    return error


def _reported_meshes(tour: _MeshSearch, micro_batches: int) -> tuple[MeshCandidate, ...]:
    return tuple(_reported(one, micro_batches) for one in sorted(tour.candidates, key=_order))


def _quick_bound(solver: Solver, restriction: Restriction, pins: dict[str, str]) -> float:
    """Return seconds that no plan of the problem undercuts, whatever memory it takes."""
    dual = Dual(solver.problem, solver.hyperedges, solver.allowed(restriction, pins), solver.free, restriction.keep)
    for _ in range(SWEEPS):
        dual.sweep(True)
        dual.sweep(False)
    return max(0.0, dual.bound() - solver.free.byte_seconds * solver.limit_bytes)


def _order(one: _SearchedMesh) -> tuple:
    return one.seconds, one.bound, str(one.mesh)


def _reported(one: _SearchedMesh, micro_batches: int) -> MeshCandidate:
    """Return how a mesh fared, in seconds of a step."""
    bound = one.bound * micro_batches
    if one.planned is None:
        return MeshCandidate(str(one.mesh), bound, None, None, None, one.note)
    e = one.planned.evaluation
    return MeshCandidate(str(one.mesh), bound, one.seconds * micro_batches, e.bytes_, one.planned.chosen.gap)


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
