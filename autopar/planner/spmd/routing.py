"""Say what a plan assumes of the routing of experts whose rows are sent to them, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from ...cost.exchange import OF_TOKENS, exchange_axes, exchange_bytes, is_of_experts, token_bytes
from ...cost.expert_copies import copies_of
from ...cost.expert_load import load_of_rows
from ...cost.skew import Skew
from ...ir.graph import bytes_of
from ...ir.layout import Layout, fraction
from ...plans.entries import ExpertCopies, Routing
from ...rules import Strategy
from ..objective.beside_exchange import with_beside
from ..objective.evaluate import Evaluation
from ..objective.memory_timeline import live_bytes
from ..objective.player import played_seconds
from ..objective.pricer import Pricer
from ..objective.side_by_side import one_by_one
from ..problem.problem import Problem


def routing_of(problem: Problem, e: Evaluation, pricer: Pricer, is_staged: bool = False) -> Routing | None:
    """Return what a plan assumes of routing, None if no device has rows by the owner of their expert; of a plan that
    `is_staged`, whose stages hold more than one micro-batch, neither the worst peak is known nor what is gained."""
    chosen = [problem.choices(v.index).strategies[e.choice[v.index]] for v in problem.vertices]
    if not any(layout.owned_axes for strategy in chosen for layout in strategy.outputs):
        return None
    sent = gathered = 0.0
    for v, strategy, copies in zip(problem.vertices, chosen, problem.copies(e.first)):
        axes = exchange_axes(v.node, strategy, problem.mesh)
        if axes and not is_of_experts(v.node):  # which nobody sends
            ways = math.prod(map(problem.mesh.size, axes))
            sent += copies * exchange_bytes(v.node, strategy, problem.mesh) * (1.0 - problem.skew.staying(ways))
            gathered += copies * (ways - 1) * _held_bytes(v.node, strategy, problem)
    times, worst, gained, alone = pricer.micro_batches, 0.0, 0.0, one_by_one(e)
    if not is_staged:
        worst, gained = _worst_peak_bytes(problem, e, pricer), _gained_seconds(problem, alone, pricer)
    parts = (sent, gathered, alone.travelling_seconds, gained)
    return Routing(_load(problem, chosen), worst, *(part * times for part in parts))


def copies_in(problem: Problem, e: Evaluation, pricer: Pricer) -> ExpertCopies | None:
    """Return what copies of hot experts cost in a plan, None if it has none."""
    mesh, cost = problem.mesh, problem.copy_cost
    sent = held = seconds = 0.0
    chosen = [problem.choices(v.index).strategies[e.choice[v.index]] for v in problem.vertices]
    for v, strategy, count in zip(problem.vertices, chosen, problem.copies(e.first)):
        if cost is not None and (made := copies_of(v.node, strategy, mesh, problem.skew.hot)):
            sent += count * made.sent_bytes(mesh)
            held = max(held, made.inside_bytes)
            seconds += count * cost.seconds(v.node, strategy, mesh)
    if not held:
        return None
    without = _load(problem, chosen, replace(problem.skew, hot=0))
    return ExpertCopies(without, sent * pricer.micro_batches, held, seconds * pricer.micro_batches)


def _load(problem: Problem, chosen: Sequence[Strategy], skew: Skew | None = None) -> float:
    """Return the load that is assumed where experts are cut over most devices."""
    skew = skew or problem.skew
    if not skew.hot and not skew.shares:
        return skew.load
    layouts = [layout for strategy in chosen for layout in strategy.outputs]
    return skew.at(max(math.prod(map(problem.mesh.size, layout.owned_axes)) for layout in layouts))


def _gained_seconds(problem: Problem, e: Evaluation, pricer: Pricer) -> float:
    """Return the seconds by which products beside exchanges make a pass faster."""
    if not e.beside:
        return 0.0
    apart, beside = (played_seconds(problem, one, pricer) for one in (with_beside(e, ()), e))
    return max(0.0, apart - beside)


def _held_bytes(node: fx.Node, strategy: Strategy, problem: Problem) -> float:
    """Return the bytes that a device would give to an all-gather, or get from a reduce-scatter, in the place of an
    exchange."""
    if node.target in OF_TOKENS:
        return token_bytes(node, strategy, problem.mesh)
    return bytes_of(node.meta["val"]) * fraction(strategy.outputs[0], problem.mesh)


def _worst_peak_bytes(problem: Problem, e: Evaluation, pricer: Pricer) -> float:
    """Return the peak of a device whose experts get all rows of its group, or all that can be on one device if hot
    experts are copied, in every layer."""
    worst = problem.skew.worst

    def times(layout: Layout) -> float:
        planned, most = (load_of_rows(layout, problem.mesh, load) for load in (pricer.expert_load, worst))
        return most / planned

    saved = {key: bytes_ * times(key[2]) for key, bytes_ in e.saved.items()}
    return live_bytes(problem, replace(e, saved=saved), pricer.with_load(worst)).peak_bytes
