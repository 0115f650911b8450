"""Search for the plan of a captured graph, which autopar/planner/describe.py writes down as a Plan."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from torch import fx

from ..cost.collectives import CollectiveCost
from ..cost.compute import EAGER, EXECUTIONS
from ..cost.host import HostCost
from ..cost.memory import Optimizer
from ..cost.orthogonalize import OrthogonalizeCost
from ..cost.product_seconds import ProductSeconds
from ..cost.redistribute import Redistributor
from ..cost.transfer_prices import TransferPrices
from ..cost.update import UpdateCost
from ..errors import AutoparError, StageError, StrategyError, UnsupportedOpError
from ..frontend.export import Captured
from ..frontend.precision import compute_dtype, reduce_type, state_type
from ..hardware.profile import Hardware
from ..ir.graph import describe
from ..ir.layout import Layout
from ..ir.mesh import Mesh
from ..plans.plan import BatchCandidate, MeshCandidate, Plan
from ..rules.register import suggestion
from ..utils.gc_pause import paused_collector
from . import accumulation, expert_plans, fixed_recompute, tiling
from .objective.evaluate import Evaluation
from .objective.expand import whole_of
from .objective.memory_timeline import LiveBytes, live_bytes
from .objective.pricer import Pricer
from .objective.timeline import Timeline, simulate
from .problem import offload
from .problem.overlay import fitting
from .problem.problem import Problem, build, with_offload
from .problem.recipes import MODELS_OWN, Restriction, globs_of, may_cut_sequence
from .problem.symmetry import fold, unfolded
from .solver.minimize import DUAL, ILP, Search
from .solver.search import Outcome, Starts
from .solver.solver import Solver

if TYPE_CHECKING:
    from ..passes.pipeline.micro_batch import MicroBatched
    from .pipeline.beside import StagedRow
    from .pipeline.plan import Staged


IN_DOUBT = "in doubt"  # of `baselines`: experts' plans are looked at where the bound leaves room for a better one


@dataclass(frozen=True)
class PlanOptions:
    """The options of a search. `fixed`: layouts by placeholder name. `forbid`: pairs of a glob and a layout
    that it may not take. `memory_bytes`: None takes the hardware's. `execution`: see `Plan`. `micro_batches`: of a
    step; the graph that is planned is that of one of them. `recompute`: "auto", or the level of every block; `tile`:
    "auto", or whether losses are computed in blocks (see autopar/planner/tiling.py);
    `refuses`: what does not fit the memory (else it is planned anyway). `offload`: see
    autopar/planner/problem/offload.py; `on_host`: placeholders of parameters that are on the host already. `styles`:
    the model's own tensor parallelism (see hf_tp_plan.py), one of the baselines. `reduce_dtype`, `state_dtype`: see
    `Plan`. `within`: the whole mesh, where the planned one is a stage's of a pipeline: links are those of the whole
    mesh, gradients are reduced once a step, and copies of parameters that are kept are gathered once. `overlay`:
    another graph that runs with the same decisions, of fewer samples. `expert_load`: see
    autopar/cost/expert_load.py."""

    hardware: Hardware
    memory_bytes: float | None = None
    optimizer: str = "adamw"
    precision: str = "fp32"
    execution: str = EAGER
    reduce_dtype: str | None = None
    state_dtype: str | None = None
    strategy: str | None = None
    pin: Mapping[str, str] = field(default_factory=dict)
    forbid: tuple[tuple[str, str], ...] = ()
    fixed: Mapping[str, Layout] = field(default_factory=dict)
    strict: bool = False
    baselines: bool | str = True
    folded: bool = True
    micro_batches: int = 1
    recompute: str = "auto"
    tile: str = "auto"
    refuses: bool = True
    offload: str = offload.NONE
    on_host: frozenset[str] = frozenset()
    styles: Mapping[str, str] = field(default_factory=dict)
    search: Search = Search()
    within: Mesh | None = None
    overlay: fx.Graph | None = None
    expert_load: float = 1.0

    def of_state(self) -> Optimizer:
        """Return the optimizer with the type that its state is kept in. Raise StrategyError for an unknown one."""
        dtype = state_type(self.state_dtype)
        return Optimizer.of(self.optimizer, None if dtype is None else dtype.itemsize)

    def around(self, mesh: Mesh) -> Mesh:
        """Return the mesh on which the distances between the devices of a planned mesh are measured."""
        if self.within is None:
            return mesh
        alone = [name for name in mesh.names if name not in self.within.names]  # of a stage that is one device
        return Mesh((*self.within.names, *alone), (*self.within.sizes, *map(mesh.size, alone)))

    def check(self, mesh: Mesh) -> None:
        """Raise StrategyError or MeshError for what can be known to be wrong before the model is traced."""
        Restriction.of(self.strategy, mesh)
        compute_dtype(self.precision)
        reduce_type(self.reduce_dtype)
        if self.execution not in EXECUTIONS:
            raise StrategyError(f"no execution {self.execution!r} is known", fix=f"use {' or '.join(EXECUTIONS)}")
        if not 1.0 <= self.expert_load < math.inf:
            raise StrategyError(
                f"experts of a device get {self.expert_load} times the mean of their rows",
                fix="give expert_load=1.0, balanced routing, or more",
            )
        accumulation.check(self.micro_batches)
        fixed_recompute.check(self.recompute)
        tiling.check(self.tile)
        offload.check(self.offload, self.on_host, self.hardware)
        if self.of_state().orthogonalizes and (self.state_dtype or self.offload != offload.NONE):
            raise StrategyError(
                f"{self.optimizer} orthogonalizes matrices on the device, in a state of their own type",
                fix="leave out state_dtype and offload, or use adamw",
            )
        if self.search.solver not in (DUAL, ILP):
            raise StrategyError(f"no solver {self.search.solver!r} is known", fix=f"use {DUAL} or {ILP}")


@dataclass(frozen=True, eq=False)
class Planned:
    """A finished search with all that it knows: what explanations, reports and traces read. `captured`: the call with
    the whole batch; `micro`: what it was cut into, if that was done, whose graph `problem` is about. `staged`: the
    stages that were found, if there are several; the rest is then the search for one micro-batch on the mesh of a
    stage."""

    model: str
    captured: Captured
    options: PlanOptions
    solver: Solver
    chosen: Outcome
    others: Mapping[str, Outcome | AutoparError]  # expert strategies, by name
    warnings: tuple[str, ...]
    seconds: float  # that planning took
    meshes: tuple[MeshCandidate, ...] = ()  # if the mesh was searched for too
    batches: tuple[BatchCandidate, ...] = ()  # if the batch was
    written: tuple[Problem, Evaluation] | None = None  # of every block, where copies of one compute not the same again
    micro: MicroBatched | None = None
    staged: Staged | None = None
    beside: tuple[StagedRow, ...] = ()  # experts' pipelines on the same devices, if they were asked for

    @property
    def problem(self) -> Problem:
        """Return the problem that was solved."""
        return self.solver.problem

    @property
    def pricer(self) -> Pricer:
        """Return the prices of ops and moves."""
        return self.solver.pricer

    @property
    def evaluation(self) -> Evaluation:
        """Return what the chosen plan costs."""
        return self.chosen.evaluation

    @cached_property
    def whole(self) -> tuple[Problem, Evaluation]:
        """Return the problem and the plan with every block of the model, which timelines and traces are about."""
        return self.written or whole_of(self.problem, self.evaluation)

    @cached_property
    def timeline(self) -> Timeline:
        """Play the chosen plan through, as it is priced."""
        return self.played()

    def played(self, slowdown: float | None = None) -> Timeline:
        """Play the chosen plan through with another slowdown of compute beside a collective, if one is given."""
        return simulate(*self.whole, self.pricer, slowdown)

    @cached_property
    def live_bytes(self) -> LiveBytes:
        """Return the memory of a device over the step."""
        return live_bytes(*self.whole, self.pricer)

    @property
    def stages(self) -> Staged:
        """Return the stages that were found. Raise StageError if there is one alone."""
        if self.staged is None:
            raise StageError(f"the plan for mesh {self.plan.mesh} has one stage", fix="plan for a mesh with an axis pp")
        return self.staged

    @property
    def inner(self) -> Planned:
        """Return the search for one micro-batch on the mesh of a stage."""
        return replace(self, staged=None)

    @cached_property
    def plan(self) -> Plan:
        """Describe the finished search as a Plan."""
        from .describe import describe_plan

        return describe_plan(self) if self.staged is None else self.staged.plan


def make_plan(
    captured: Captured,
    mesh: Mesh,
    options: PlanOptions,
    model: str = "model",
    report: Callable[[str], None] = lambda t: None,
) -> Plan:
    """Plan a captured graph on a mesh. Raise UnsupportedOpError (strict), StrategyError, or MemoryInfeasibleError."""
    return search(captured, mesh, options, model, report).plan


@paused_collector()
def search(
    captured: Captured,
    mesh: Mesh,
    options: PlanOptions,
    model: str = "model",
    report: Callable[[str], None] = lambda t: None,
    solvers: list[Solver] | None = None,
    starts: Starts = (),
) -> Planned:
    """Find the best plan of a captured graph and return it with the search that found it; `solvers`: what `solvers_of`
    gave, if it was called before; for `starts` see `Solver.run`. Raise what `make_plan` raises."""
    options.check(mesh)
    start = time.perf_counter()
    restriction = Restriction.of(options.strategy, mesh, options.forbid)
    solvers = solvers or solvers_of(captured, mesh, options, report)
    warnings = _unruled(solvers[0].problem, options.strict)

    def found(others: Mapping[str, Outcome | AutoparError]) -> tuple[Solver, Outcome]:
        report("searching")
        known = [one.found[-1] for one in others.values() if isinstance(one, Outcome)]
        first = starts if options.strategy else [*known, *starts]
        return tiling.fastest(accumulation.solvers_for(solvers, options.strategy), restriction, options, first)

    others = expert_plans.rows(solvers, options.styles) if options.baselines not in (False, IN_DOUBT) else {}
    solver, chosen = found(others)
    if options.baselines == IN_DOUBT and chosen.gap > options.search.gap:
        others = expert_plans.rows(solvers, options.styles)
        solver, chosen = found(others)
    chosen = not_worse(chosen, others, options)
    if options.refuses:
        offload.check_host(solver.problem, chosen.evaluation)
    report("done")
    return Planned(model, captured, options, solver, chosen, others, warnings, time.perf_counter() - start)


def solvers_of(
    captured: Captured,
    mesh: Mesh,
    options: PlanOptions,
    report: Callable[[str], None] = lambda t: None,
    known: Pricer | None = None,
) -> list[Solver]:
    """Return one solver for each way to reduce gradients, all of the same problem. `known`: a pricer on the same mesh,
    of other micro-batches or another offload, whose redistributions are priced already."""
    hardware, around = options.hardware, options.around(mesh)
    links, tiers = hardware.links_for(around), hardware.tiers_for(around)
    report("building the problem")
    prices = (
        known.prices
        if known
        else TransferPrices(
            Redistributor(mesh, {a: links[a] for a in mesh.names}, hardware.reached_memory_bytes_per_second),
            CollectiveCost(hardware, around),
            hardware.classes_for(around),
        )
    )
    problem = _problem(captured, mesh, options, prices, known.problem if known else None)
    bucket_bytes = max(tiers[a].bucket_bytes for a in mesh.names)
    limit = float(options.memory_bytes or hardware.memory_bytes)
    gain = hardware.overlap_gain
    asked = None if options.baselines else options.strategy  # strategies that are compared reduce in other ways
    ways = accumulation.ways(asked, options.micro_batches, options.offload == offload.OPTIMIZER)
    is_cut = options.micro_batches > 1
    pricers = [
        Pricer(
            problem,
            prices,
            bucket_bytes,
            options.micro_batches,
            once,
            gathers_once=is_cut,
            reduce_dtype=reduce_type(options.reduce_dtype),
        )
        for once in ((True,) if is_cut and options.within is not None else ways)
    ]
    return [Solver(problem, pricer, limit, options.search, report, gain) for pricer in pricers]


def _problem(
    captured: Captured, mesh: Mesh, options: PlanOptions, prices: TransferPrices, known: Problem | None
) -> Problem:
    """Return the problem of a captured graph; `known`: one that is like it, if it is of the same graph, but for the
    offload."""
    hardware, optimizer = options.hardware, options.of_state()
    cost = HostCost(hardware.host, options.micro_batches) if hardware.host else None
    on_host = offload.Offload(options.offload, cost, options.on_host)
    if known is not None and known.whole is captured.graph:
        update = UpdateCost(hardware.reached_memory_bytes_per_second, options.micro_batches)
        return with_offload(known, on_host, update)
    muon = None
    if optimizer.orthogonalizes:
        muon = OrthogonalizeCost(prices, ProductSeconds(hardware), options.micro_batches)
    problem = build(
        captured,
        mesh,
        hardware,
        optimizer,
        fold if options.folded else unfolded,
        dict(options.fixed),
        {**options.pin, **dict(options.forbid), **dict.fromkeys(globs_of(options.strategy), "")},
        on_host,
        options.micro_batches,
        muon,
        options.execution,
        may_cut_sequence(options.strategy, mesh, captured.signature.samples),
        options.expert_load,
    )
    problem.fits = fitting(problem, options.overlay) if options.overlay is not None else {}
    return problem


def _unruled(problem: Problem, strict: bool) -> tuple[str, ...]:
    """Return what is said of ops without a rule, which run whole on every device. Raise UnsupportedOpError for them if
    planning is `strict`."""
    if not problem.unruled:
        return ()
    lines = []
    for target, nodes in sorted(_by_target(problem).items()):
        seconds = sum(float(problem.choices(v).seconds[0]) for v in nodes)
        first = problem.vertices[nodes[0]].node
        where = f" at {first.meta['source']}" if first.meta.get("source") else ""
        lines.append(
            f"{target} has no sharding rule: {len(nodes)} ops run whole on every device, {seconds * 1e3:.3g} ms{where}"
        )
    if strict:
        raise UnsupportedOpError(
            f"{len(problem.unruled)} ops of {len(lines)} kinds have no sharding rule: " + "; ".join(lines),
            node=describe(problem.unruled[0]),
            mesh=problem.mesh,
            fix=f"leave out strict=True to run them whole on every device, or {suggestion(problem.unruled[0])}",
        )
    return tuple(lines)


def _by_target(problem: Problem) -> dict[str, list[int]]:
    unruled = set(problem.unruled)
    found = defaultdict(list)
    for v in problem.vertices:
        if v.node in unruled and v.kind == "op":
            found[str(v.node.target)].append(v.index)
    return found


def not_worse(chosen: Outcome, others: dict[str, Outcome | AutoparError], options: PlanOptions) -> Outcome:
    """Return the free plan, or an expert's if that fits and is faster by the same model (the search stops at a small
    gap). Keep a plan of which something was asked for."""
    if chosen.restriction.name != "auto" or options.pin or options.forbid or options.recompute != fixed_recompute.AUTO:
        return chosen
    for name, other in others.items():
        if isinstance(other, Outcome) and other.fits and other.seconds < chosen.seconds:
            restriction = chosen.restriction if name == MODELS_OWN else other.restriction  # one that can be asked for
            bound = min(chosen.bound_seconds, other.evaluation.seconds)
            chosen = replace(other, restriction=restriction, bound_seconds=bound, found=chosen.found)
    return chosen
