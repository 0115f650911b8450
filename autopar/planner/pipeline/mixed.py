"""One plan of a micro-batch that is made of several: every stage takes its decisions from a plan of its own.

Decisions are by op of the whole graph, so that those of a stage's ops are simply the ones that its plan makes. What
several stages read is decided by the plan of the first of them: a parameter that they share, an input, a mask that each
computes. A tensor that is made under one plan and read under another is made as the one says and redistributed to what
the other wants, by the stage that reads it, and is priced like any other tensor. All the rest is served as its own plan
does, so that a mixture of one plan alone is that plan.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...ir.block_order import block_of
from ...ir.stage_placement import StagePlacement, first_of
from ..objective.evaluate import Evaluation, Served, evaluate, serve
from ..objective.memory_timeline import LiveBytes, live_bytes
from ..objective.pricer import Pricer
from ..problem.multipliers import Prices
from ..problem.problem import Problem
from ..problem.vertices import STATE, Use
from .stage_costs import parts_of_nodes

Whole = tuple[Problem, Evaluation]  # of every block


@dataclass(frozen=True)
class Mixture:
    """A plan with the memory of one micro-batch under it. `of`: by vertex the number of the plan that decided;
    `blocks`: those that make or read a tensor which passes from one plan to another."""

    problem: Problem
    evaluation: Evaluation
    live: LiveBytes
    of: list[int]
    blocks: frozenset[str]


def mixed(
    plans: Sequence[Whole], of_stage: Sequence[int], cuts: Sequence[str], pricer: Pricer, prices: Prices
) -> Mixture | None:
    """Return the plan whose stages, which begin at the forward ops `cuts`, take their decisions from those of `plans`
    with the numbers `of_stage`; None if no redistribution makes what a stage reads of what another one makes. `plans`
    compute nothing again; `prices` decide what is kept of tensors between two plans."""
    problem = plans[0][0]
    of = _deciding(problem, problem.placement(cuts), of_stage)
    problem = _in_classes_of(plans, of)
    pricer = replace(pricer, problem=problem)
    choice = {v.index: plans[of[v.index]][1].choice[v.index] for v in problem.vertices}
    between = [uses for uses in problem.uses_of.values() if any(of[u.consumer] != of[uses[0].producer] for u in uses)]
    if not all(_may_pass(problem, choice, pricer, uses) for uses in between):
        return None
    served = [_served(e) for _, e in plans]
    passing = {(uses[0].producer, uses[0].output) for uses in between}

    def known(uses: Sequence[Use]) -> Served | None:
        key = uses[0].producer, uses[0].output
        return None if key in passing else served[of[key[0]]].get(key, _UNMOVED)

    e = evaluate(problem, choice, pricer, prices, first=0, known=known)
    live = live_bytes(problem, e, pricer)
    e = replace(e, uncharged_bytes=live.peak_bytes - e.charged_bytes, peaks_early=live.peaks_early)
    touched = {v for uses in between for v in (uses[0].producer, *(u.consumer for u in uses))}
    blocks = frozenset(block_of(problem.vertices[v].node.meta.get("module", "")) for v in touched)
    return Mixture(problem, e, live, of, blocks)


_UNMOVED = Served((), (), ())


def border_seconds(
    problem: Problem, plans: Sequence[Evaluation], cut: str, pricer: Pricer, prices: Prices
) -> np.ndarray:
    """Return by plan of what is before the op `cut` and of what follows it the seconds of a micro-batch that
    redistribute what passes there, beyond what the two move themselves; inf where nothing redistributes it."""
    where = parts_of_nodes(problem.placement((cut,)))
    late = [first_of(where.get(v.node, 0), 0) == 1 for v in problem.vertices]
    passing = [u for u in problem.uses_of.values() if any(late[x.consumer] != late[u[0].producer] for x in u)]
    moved = np.zeros((len(plans), len(plans)))
    for i, one in enumerate(plans):
        for j, other in enumerate(plans):
            choice = {v: (other if late[v] else one).choice[v] for v in one.choice}
            for uses in passing:
                if not _may_pass(problem, choice, pricer, uses):
                    moved[i, j] = math.inf
                    break
                moved[i, j] += sum(t.seconds for t in serve(problem, choice, pricer, prices, None, uses, 1).transfers)
    own = np.diag(moved)
    found = np.maximum(0.0, moved - (own[:, None] + own) / 2)
    np.fill_diagonal(found, 0.0)
    return found


def _deciding(problem: Problem, placement: StagePlacement, of_stage: Sequence[int]) -> list[int]:
    """Return by vertex the number of the plan that decides about it."""
    where = parts_of_nodes(placement)
    return [of_stage[first_of(where.get(v.node, 0), 0)] for v in problem.vertices]


def _in_classes_of(plans: Sequence[Whole], of: Sequence[int]) -> Problem:
    """Return the problem with every vertex in the class that it has under its plan: blocks that a compact graph leaves
    out may be copies of one or of another."""
    problem = plans[0][0]
    theirs = [plans[k][0].vertices[i].cls for i, k in enumerate(of)]
    if all(v.cls == cls for v, cls in zip(problem.vertices, theirs)):
        return problem
    vertices = [copy.copy(v) for v in problem.vertices]
    for v, cls in zip(vertices, theirs):
        v.cls = cls
    found = replace(problem, vertices=vertices)
    found._placements.update(problem._placements)
    return found


def _may_pass(problem: Problem, choice: dict[int, int], pricer: Pricer, uses: Sequence[Use]) -> bool:
    """Return whether all that read a tensor can be given it: of a sum nothing makes terms."""
    producer, output = uses[0].producer, uses[0].output
    source = problem.choices(producer).strategies[choice[producer]].outputs[output]
    for use in uses:
        strategy = problem.choices(use.consumer).strategies[choice[use.consumer]]
        target = strategy.outputs[0] if use.slot == STATE else strategy.inputs[use.slot]
        if target != source and not math.isfinite(pricer.prices.pair(source, target, 1.0)):
            return False
    return True


def _served(e: Evaluation) -> dict[tuple[int, int], Served]:
    """Return how a plan serves each tensor that it moves, keeps or saves."""
    transfers, retained, saved = defaultdict(list), defaultdict(list), defaultdict(list)
    for t in e.transfers:
        transfers[t.producer, t.output].append(t)
    for key in e.retained:
        retained[key[:2]].append(key)
    for key, bytes_ in e.saved.items():
        saved[key[:2]].append((key, bytes_))
    keys = transfers.keys() | retained.keys() | saved.keys()
    return {key: Served(tuple(transfers[key]), tuple(retained[key]), tuple(saved[key])) for key in keys}
