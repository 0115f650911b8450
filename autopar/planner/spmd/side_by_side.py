"""Decide whether the micro-batches of a step without stages take turns, and say so in its plan."""

from __future__ import annotations

from dataclasses import replace

from ...plans.pipeline import Pairs
from ..objective.evaluate import Evaluation
from ..objective.expand import whole_of
from ..objective.memory_timeline import live_bytes
from ..objective.player import played_seconds
from ..objective.pricer import Pricer
from ..objective.side_by_side import in_turns
from ..problem.problem import Problem
from ..solver.search import Outcome
from .plan_options import PlanOptions


def with_pairs(chosen: Outcome, options: PlanOptions) -> Outcome:
    """Return a plan whose forwards run beside the backwards of the micro-batches before, where that gains and fits."""
    e, pricer = chosen.evaluation, chosen.pricer
    if not _may_be_paired(chosen, options):
        return chosen
    paired = in_turns(pricer.problem, e, pricer, options.hardware)
    one = replace(chosen, evaluation=paired, searched=chosen.searched or chosen)
    if not paired.turns or one.seconds >= chosen.seconds:
        return chosen
    live = live_bytes(*whole_of(pricer.problem, paired), pricer)
    if live.peak_bytes > max(e.bytes_, options.memory_bytes or options.hardware.memory_bytes):
        return chosen
    return replace(one, evaluation=replace(paired, uncharged_bytes=live.peak_bytes - paired.charged_bytes))


def _may_be_paired(chosen: Outcome, options: PlanOptions) -> bool:
    """Return whether there are several micro-batches of one stage, of which none waits for others."""
    e, pricer = chosen.evaluation, chosen.pricer
    is_free = pricer.in_flight == 1 and not pricer.tail.seconds and not pricer.problem.tiled and not e.on_host
    return e.overlap > 0 and e.micro_batches > 1 and options.within is None and is_free


def pairs_of(problem: Problem, e: Evaluation, pricer: Pricer, passes: float) -> Pairs | None:
    """Return what a plan of the whole graph says of micro-batches that take turns, None if they do not. `passes`: of a
    step, as large as the largest."""
    if not e.turns:
        return None
    seconds = sum(one.seconds * one.copies for one in e.beside if one.vertex in e.turns)
    apart, paired = (played_seconds(problem, one, pricer) for one in (replace(e, turns=frozenset()), e))
    turns = tuple(problem.vertices[v].node.name for v in sorted(e.turns))
    return Pairs(turns, seconds * (passes - 1), max(0.0, apart - paired) * passes)
