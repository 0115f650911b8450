"""Search for the plan of a captured graph."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ...cost.collectives import CollectiveCost
from ...cost.compute import ComputeCost
from ...cost.host import HostCost
from ...cost.orthogonalize import OrthogonalizeCost
from ...cost.product_seconds import ProductSeconds
from ...cost.redistribute import Redistributor
from ...cost.transfer_prices import TransferPrices
from ...cost.update import UpdateCost
from ...errors import AutoparError, MemoryInfeasibleError, UnsupportedOpError
from ...frontend.export import Captured
from ...frontend.precision import reduce_type
from ...ir.graph import describe
from ...ir.mesh import Mesh
from ...plans.plan import Plan
from ...rules.register import suggestion
from ...utils.gc_pause import paused_collector
from ..objective import loops
from ..objective.beside import Beside
from ..objective.beside_exchange import beside_exchanges, choices_of, fitted, like_those_at
from ..objective.evaluate import Evaluation
from ..objective.memory_timeline import LiveBytes
from ..objective.pricer import Pricer
from ..objective.tail_cost import NO_TAIL, tail_cost
from ..problem import offload
from ..problem.overlay import fitting
from ..problem.problem import Problem, build, with_offload
from ..problem.recipes import MODELS_OWN, Restriction, globs_of, may_cut_sequence
from ..problem.symmetry import fold, unfolded
from ..solver.minimize import BeyondCutoff
from ..solver.on_host import may_leave_parameters
from ..solver.search import Outcome, Starts
from ..solver.solver import Solver
from . import accumulation, expert_plans, fixed_recompute, tiling
from .plan_options import IN_DOUBT, PlanOptions
from .planned import Planned
from .side_by_side import search_again, with_pairs


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

        def among(solvers: Sequence[Solver], options: PlanOptions) -> tuple[Solver, Outcome]:
            return tiling.fastest(accumulation.solvers_for(solvers, options.strategy), restriction, options, first)

        if options.offload != offload.AUTO or not solvers[0].host_bytes_per_second:
            return among(solvers, options)

        def narrow(cutoff_seconds: float) -> tuple[Solver, Outcome]:
            cutoff = replace(options.search, cutoff_seconds=min(cutoff_seconds, options.search.cutoff_seconds))
            alone = replace(options, offload=offload.ACTIVATIONS, search=cutoff)
            return among(solvers_of(captured, mesh, alone, report, solvers[0].pricer), alone)

        return _faster(lambda: among(solvers, options), narrow)

    others = expert_plans.rows(solvers, options.styles) if options.baselines not in (False, IN_DOUBT) else {}
    solver, chosen = found(others)
    if options.baselines == IN_DOUBT and chosen.gap > options.search.gap:
        others = expert_plans.rows(solvers, options.styles)
        solver, chosen = found(others)
    chosen = beside_products(not_worse(chosen, others, options), options)
    chosen = with_pairs(chosen, options, search_again(solvers, chosen, options, beside_products))
    others = {
        name: with_pairs(beside_products(one, options), options) if isinstance(one, Outcome) else one
        for name, one in others.items()
    }
    if options.refuses:
        offload.check_host(solver.problem, chosen.evaluation)
    report("done")
    return Planned(model, captured, options, solver, chosen, others, warnings, time.perf_counter() - start)


def _faster(
    free: Callable[[], tuple[Solver, Outcome]], narrow: Callable[[float], tuple[Solver, Outcome]]
) -> tuple[Solver, Outcome]:
    """Return what a search finds, or, if memory was short there, what a search of some of the same plans, below a
    cutoff in seconds, finds if that is faster. Raise what the first one raises if neither finds anything."""
    try:
        solver, outcome = free()
    except MemoryInfeasibleError as refused:
        try:
            return narrow(math.inf)
        except (MemoryInfeasibleError, BeyondCutoff):
            raise refused from None
    e = outcome.evaluation
    is_short = outcome.is_limited or e.recomputed or e.on_host or not outcome.fits
    is_near = outcome.gap <= solver.search.gap  # to the bound of all plans, so to that of some of them
    if not is_short or outcome.fits and (is_near or not may_leave_parameters(solver, outcome)):
        return solver, outcome
    with suppress(MemoryInfeasibleError, BeyondCutoff):
        other, found = narrow(outcome.seconds if outcome.fits else math.inf)
        if found.fits and (not outcome.fits or found.seconds < outcome.seconds):
            return other, replace(found, bound_seconds=min(found.bound_seconds, outcome.bound_seconds))
    return solver, outcome


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
    tail = NO_TAIL if options.tail is None else tail_cost(options.tail, ComputeCost(hardware), mesh)
    pricers = [
        Pricer(
            problem,
            prices,
            bucket_bytes,
            options.micro_batches,
            once,
            gathers_once=is_cut,
            reduce_dtype=reduce_type(options.reduce_dtype),
            in_flight=options.in_flight,
            tail=tail,
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
    is_one = options.within is None and options.tail is None and options.recompute == fixed_recompute.AUTO
    on_host = offload.Offload(options.offload, cost, options.on_host, is_one)
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
        options.skew(captured.graph),
        options.expert_capacity,
        prices.collectives,
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


def beside_products(chosen: Outcome, options: PlanOptions) -> Outcome:
    """Return a plan with products beside what it moves, where that gains."""
    return with_exchanges(with_loops(chosen, options), options)


def with_exchanges(chosen: Outcome, options: PlanOptions) -> Outcome:
    """Return a plan with products beside its exchanges of experts' rows, as far as they fit, if all together gain; of
    stages they are put there when these are known."""
    pricer, e = chosen.pricer, chosen.evaluation
    problem = pricer.problem
    if options.within is not None:
        return chosen
    most_bytes = max(e.bytes_, options.memory_bytes or options.hardware.memory_bytes)

    def given_up(tried: Evaluation, live: LiveBytes) -> list[Beside]:
        full = live.order.runs[live.peak_at].vertex
        return like_those_at(problem, tried.beside, full) if live.peak_bytes > most_bytes else []

    best = chosen
    for found in choices_of(beside_exchanges(problem, e, pricer, options.hardware)):
        other = fitted(problem, e, found, pricer, given_up)
        if other is not None:
            one = replace(chosen, evaluation=other, searched=chosen.searched or chosen)
            best = one if one.seconds < best.seconds else best
    return best


def with_loops(chosen: Outcome, options: PlanOptions) -> Outcome:
    """Return a plan with the loops that are asked for; "auto": with those that gain by themselves, if all together
    do."""
    problem, e = chosen.pricer.problem, chosen.evaluation
    if options.loops == loops.NEVER or options.within is not None:
        return chosen
    around = options.around(problem.mesh)
    looped = loops.looped(problem, e, options.loops, options.hardware, around, options.execution)
    if not any(t.looped for t in looped.transfers):
        return chosen
    found = replace(chosen, evaluation=looped, searched=chosen)
    return found if options.loops == loops.ALWAYS or found.seconds < chosen.seconds else chosen


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
