"""The integer program has the last word: OR-tools decides what the bounds leave open.

A plan that takes an option costs at least the bound and the option's reduced cost. What so costs more than the best
plan is excluded; the rest is one program with all that prices stood for as rows of it:

    seconds = those of the stream that computes + what the busiest stream of each phase needs beyond that
    bytes at the two peaks (see full_program.py) <= the room, less what passes by in the best plan

Where too much is left for it the program takes the options of least reduced cost: a neighbourhood of the best plan, in
which all classes may change at once. Its plan is settled and played as all others are. Equal blocks decide alike in it,
which plans that mix do not, so that its bound is one of such plans alone: the plan's bound stays that of the prices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ...plans.program import DecidedProgram
from ..objective.evaluate import Evaluation
from ..problem.multipliers import Prices
from .dual import Dual
from .ilp import Program, flows_of

if TYPE_CHECKING:
    from .search import RestrictedSearch

SWEEPS = 4  # at the best prices, before reduced costs are read
GAP = 1e-3
ROUNDING = 1e-9  # of the bound
MOST_NODES = 40  # of the branching: enough, and the same on every machine
LARGE = 2_000  # variables; a node of a larger program takes longer, so that it has fewer
NARROWER = 0.5  # each time that too much is left
MOST_NARROWED = 14


@dataclass(frozen=True)
class LastWord:
    """The choice of options by class that the program found, None if none is better, and what is said of it."""

    choice: dict[int, int] | None
    program: DecidedProgram


@dataclass(frozen=True)
class Room:
    """The rows of memory: bytes for tensors, whether gradients are there when the forward ends, whether activations
    are priced."""

    bytes_: float
    accumulates: bool


def last_word(
    run: RestrictedSearch,
    dual: Dual,
    prices: Prices,
    best: Evaluation,
    joint: dict[int, int],
    room: Room | None = None,
    most: int | None = None,
) -> LastWord:
    """Return what the program decides among the options that can be in a plan faster than `best`, whose own options by
    class are `joint`. The dual has what was learned at prices near these; with `room` the plan has to fit it. `most`:
    variables of a program, as the search has it unless given."""
    most = run.search.largest_program if most is None else most
    dual.price(prices)
    for i in range(2 * SWEEPS):
        dual.sweep(i % 2 == 0)
    base, reduced = dual.reduced_costs()
    worth = prices.byte_seconds * room.bytes_ if room else 0.0
    slack = best.seconds + worth - base + ROUNDING * abs(base)
    held = best.resident_bytes + prices.gradients * (best.gradient_bytes + best.whole_gradient_bytes)
    slack += 0.0 if room else prices.byte_seconds * held  # among equally fast plans the smaller one
    total = sum(map(len, dual.index))
    left = sum(int((r <= slack).sum()) for r in reduced)
    for turn in range(MOST_NARROWED):
        keep = [
            index[(r <= slack * NARROWER**turn) | (index == joint[cls])]
            for cls, index, r in zip(dual.classes, dual.index, reduced)
        ]
        options = dict(zip(dual.classes, keep))
        if flows_of(dual.hyperedges, options) <= most:
            break
    else:  # the bounds say too little for a program of any use
        return LastWord(None, DecidedProgram(total, total - left, 0, 0, False))
    decided = sum(len(index) for index in keep if len(index) > 1)
    if not decided:
        return LastWord(None, DecidedProgram(total, total - left, 0, 0, turn == 0))
    program, costs = _program(run, dual, options, room, best)
    nodes = max(1, int(MOST_NODES * min(1.0, LARGE / program.variables) ** 2))
    found = program.solve(run.search.program_seconds, GAP, costs=costs, most_nodes=nodes)
    is_all = turn == 0 and (found is None or found.is_optimal)
    said = DecidedProgram(total, total - left, decided, program.variables, is_all)
    return LastWord(found.choice if found is not None else None, said)


def _program(
    run: RestrictedSearch, dual: Dual, options: dict[int, np.ndarray], room: Room | None, best: Evaluation
) -> tuple[Program, np.ndarray]:
    """Return the program with its rows, and its costs."""
    solver = run.solver
    free = replace(dual.prices, byte_seconds=0.0)
    prices, spans = one_hot(free)
    count = len(prices)
    if room is not None:
        unit = replace(prices[0], byte_seconds=1.0 / room.bytes_, saved=True)
        prices += [replace(unit, gradients=float(room.accumulates)), replace(unit, gradients=1.0)]
    else:
        prices.append(replace(prices[0], byte_seconds=solver.free.byte_seconds))  # the smaller of equal plans
    program = Program(
        run.problem, dual.hyperedges, run.allowed, prices, run.restriction.keep, dual.reruns, options=options
    )
    costs = program.costs()
    if room is not None:
        uncharged = (best.uncharged_bytes + best.transient_bytes) / room.bytes_
        limit_peaks(program, costs[count:] - costs[0], 1.0 - uncharged)
    return program, program.busiest(costs[0] if room is not None else costs[-1], costs[:count] - costs[0], spans)


def one_hot(free: Prices) -> tuple[list[Prices], list[list[int]]]:
    """Return prices at which all weight is on the streams that compute, then, for each span and class of links, those
    at which that span's is on these; and by span, which of the prices those are."""
    classes = len(free.links[0]) if free.links else 0
    zero = tuple((0.0,) * classes for _ in free.links)
    prices, spans = [replace(free, links=zero)], []
    for span in range(len(free.links)):
        spans.append([len(prices) + x for x in range(classes)])
        for x in range(classes):
            row = tuple(float(i == x) for i in range(classes))
            prices.append(replace(free, links=(*zero[:span], row, *zero[span + 1 :])))
    return prices, spans


def limit_peaks(program: Program, bytes_: np.ndarray, most: float) -> None:
    """Limit the bytes, in shares of the room, where the forward ends, and where the backward does, when nothing waits
    any more."""
    early, late = bytes_
    program.limit(early, most)
    program.limit(np.where(np.arange(len(late)) < program.binaries, late, 0.0), most)
