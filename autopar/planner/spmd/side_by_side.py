"""Decide whether the micro-batches of a step without stages take turns, and say so in its plan.

A second micro-batch is in memory then. Where that is too much, and turns would gain much, a plan is looked for that
holds so much less: a search uses what memory there is for little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...errors import MemoryInfeasibleError
from ...plans.pipeline import Pairs
from ..objective.evaluate import Evaluation
from ..objective.expand import whole_of
from ..objective.memory_timeline import live_bytes
from ..objective.player import played_seconds
from ..objective.pricer import Pricer
from ..objective.side_by_side import in_turns
from ..problem.problem import Problem
from ..solver.minimize import BeyondCutoff, Search
from ..solver.search import Outcome
from ..solver.solver import Solver, replaced
from .fixed_recompute import AUTO
from .plan_options import PlanOptions

WORTH = 0.01  # of a step, that turns must save for plans of less memory to be looked for
MORE = 1.05  # times what is missing, by which such a plan is to hold less
MOST_SEARCHES = 3
ROUGH = Search(gap=1e-2, rounds=40, largest_program=0, last_word=False)


def with_pairs(
    chosen: Outcome,
    options: PlanOptions,
    searched_in: Callable[[float], Outcome | None] = lambda limit_bytes: None,
) -> Outcome:
    """Return a plan whose forwards run beside the backwards of the micro-batches before, where that gains and fits: the
    chosen one, or one of less memory that `searched_in` finds."""
    if not _may_be_paired(chosen, options):
        return chosen
    problem, pricer = chosen.pricer.problem, chosen.pricer
    room_bytes = max(chosen.evaluation.bytes_, options.memory_bytes or options.hardware.memory_bytes)
    limit_bytes, base = room_bytes, chosen
    for _ in range(MOST_SEARCHES):
        e = in_turns(problem, base.evaluation, pricer, options.hardware)
        one = replace(base, evaluation=e)
        if not e.turns or one.seconds >= chosen.seconds:
            return chosen
        peak_bytes = live_bytes(*whole_of(problem, e), pricer).peak_bytes
        if peak_bytes <= room_bytes:
            e = replace(e, uncharged_bytes=peak_bytes - e.charged_bytes)
            return replace(chosen, evaluation=e, fits=True, searched=chosen.searched or chosen)
        limit_bytes -= MORE * (peak_bytes - room_bytes)
        if one.seconds >= chosen.seconds * (1 - WORTH) or (found := searched_in(limit_bytes)) is None:
            return chosen
        base = found
    return chosen


def search_again(
    solvers: Sequence[Solver], chosen: Outcome, options: PlanOptions, beside: Callable[[Outcome, PlanOptions], Outcome]
) -> Callable[[float], Outcome | None]:
    """Return what finds a plan like the chosen one that holds less, roughly, None if there is none; `beside` puts
    products beside what it moves."""

    def searched_in(limit_bytes: float) -> Outcome | None:
        old = next((solver for solver in solvers if solver.pricer is chosen.pricer), None)
        if old is None or options.recompute != AUTO:
            return None
        old.report("searching for a plan that leaves memory to a second micro-batch")
        try:
            found = replaced(old, ROUGH, limit_bytes).solve(chosen.restriction, dict(options.pin), chosen.found)
        except (MemoryInfeasibleError, BeyondCutoff):
            return None
        return beside(found, replace(options, memory_bytes=int(limit_bytes))) if found.fits else None

    return searched_in


def _may_be_paired(chosen: Outcome, options: PlanOptions) -> bool:
    """Return whether there are several micro-batches of one stage, of which none waits for others."""
    e, pricer = chosen.evaluation, chosen.pricer
    is_free = pricer.in_flight == 1 and not pricer.tail.seconds and not pricer.problem.tiled and not e.on_host
    return e.overlap > 0 and e.micro_batches > 1 and options.within is None and is_free and chosen.fits


def pairs_of(problem: Problem, e: Evaluation, pricer: Pricer, passes: float) -> Pairs | None:
    """Return what a plan of the whole graph says of micro-batches that take turns, None if they do not. `passes`: of a
    step, as large as the largest."""
    if not e.turns:
        return None
    seconds = sum(one.seconds * one.copies for one in e.beside if one.vertex in e.turns)
    apart, paired = (played_seconds(problem, one, pricer) for one in (replace(e, turns=frozenset()), e))
    turns = tuple(problem.vertices[v].node.name for v in sorted(e.turns))
    return Pairs(turns, seconds * (passes - 1), max(0.0, apart - paired) * passes)
