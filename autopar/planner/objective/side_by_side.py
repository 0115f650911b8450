"""Two micro-batches side by side: the forward of one and the backward of the one before it, which take turns.

Where a step has several micro-batches, the graph of such a pair computes the one up to a wait for rows of experts, then
the other up to one of its own, and so on (passes/pipeline/side_by_side.py). Rows then travel beside whatever the other
micro-batch computes in its turn. Waits for exchanges that take far less than the longest one end no turn: what they
save would be less than what a turn of a few small ops leaves bare.

What a pair takes is played like all else: its script has the pieces of both scripts, turn by turn. In memory are at
once what one micro-batch holds in its turn and what the other one holds where it stands. The plan is searched for
without this; of a finished one it is known which exchanges end turns.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

import numpy as np

from ...cost.exchange import exchange_axes, is_all_latency, link_seconds
from ...cost.expert_load import load_of
from ...hardware.schema import Hardware
from ..problem.multipliers import PHASES
from ..problem.problem import Problem
from .beside import Beside
from .evaluate import Evaluation
from .pricer import Pricer
from .script import Overlapped, Piece, Script
from .step_order import StepOrder

LEAST_SHARE = 0.2  # of the seconds of the longest exchange, which one takes that ends a turn


def in_turns(problem: Problem, e: Evaluation, pricer: Pricer, hardware: Hardware) -> Evaluation:
    """Return a plan whose forwards and backwards take turns; the same plan if it has no exchange worth it. The seconds
    of an exchange that ends a turn are on its link, with nothing of its own micro-batch beside it unless there was."""
    seconds = {v: one for v, one in _link_seconds(problem, e, pricer, hardware)}
    least = LEAST_SHARE * max(seconds.values(), default=0.0)
    ending = {v for v, one in seconds.items() if one >= least}
    known = {one.vertex for one in e.beside}
    copies, recomputed = problem.copies(e.first), _recomputed_copies(e)
    beside, compute, recompute_seconds = [*e.beside], dict(e.compute), e.recompute_seconds
    for v in sorted(ending):
        vertex = problem.vertices[v]
        strategy = problem.choices(v).strategies[e.choice[v]]
        stream = pricer.prices.stream_of("all_to_all", exchange_axes(vertex.node, strategy, problem.mesh))
        if v not in known:
            beside.append(Beside(v, vertex.phase, seconds[v], stream, (), (), copies[v]))
            compute[vertex.phase] -= seconds[v] * copies[v]
        if times := recomputed.get(v, 0):
            beside.append(Beside(v, PHASES[1], seconds[v], stream, (), (), times, True))
            recompute_seconds -= seconds[v] * times
    return replace(
        e, beside=tuple(beside), compute=compute, recompute_seconds=recompute_seconds, turns=frozenset(ending)
    )


def one_by_one(e: Evaluation) -> Evaluation:
    """Return a plan as it was before its micro-batches took turns."""
    compute, recompute_seconds = dict(e.compute), e.recompute_seconds
    for one in e.beside if e.turns else ():
        if one.recomputed:
            recompute_seconds += one.seconds * one.copies
        elif not one.ops:
            compute[one.phase] += one.seconds * one.copies
    beside = tuple(one for one in e.beside if one.ops)
    return replace(e, beside=beside, compute=compute, recompute_seconds=recompute_seconds, turns=frozenset())


def _link_seconds(problem: Problem, e: Evaluation, pricer: Pricer, hardware: Hardware) -> Iterator[tuple[int, float]]:
    """Iterate over the exchanges of a pass and the seconds that their rows are on their way."""
    for v in problem.vertices:
        if v.kind == "op":
            strategy, mesh = problem.choices(v.index).strategies[e.choice[v.index]], problem.mesh
            if exchange_axes(v.node, strategy, mesh) and not is_all_latency(v.node, strategy, mesh, hardware):
                load = load_of(v.node, strategy, mesh, pricer.expert_load)
                yield v.index, load * link_seconds(v.node, strategy, mesh, hardware)


def _recomputed_copies(e: Evaluation) -> dict[int, int]:
    """Return how many copies of a vertex run again."""
    steps = [pair for levels in e.recomputed.values() for pair in levels.values()]
    return {v: copies for step, copies in steps for v in step.recomputed}


def pair_script(forward: Script, backward: Script, turns: Collection[int]) -> Script:
    """Return the script of a forward and a backward that take turns."""
    lists = [forward, backward]
    cuts = [_cuts(script, turns) for script in lists]
    main: list[Piece] = []
    starts: list[list[int]] = [[], []]  # by list and turn, where it begins in the pair
    for turn in zip_longest(*(zip(own, own[1:]) for own in cuts)):
        for which, span in enumerate(turn):
            if span is not None:
                starts[which].append(len(main))
                main += lists[which].main[slice(*span)]
    overlapped = []
    for script, own, begins in zip(lists, cuts, starts):

        def place(position: int, own: Sequence[int] = own, begins: Sequence[int] = begins) -> int:
            """Return where the piece at a position of a list is in the pair."""
            turn = min(bisect_right(own, position), len(begins)) - 1
            return begins[turn] + position - own[turn]

        for one in script.overlapped:
            issued = place(one.issued - 1) + 1 if one.issued else begins[0]
            overlapped.append(Overlapped(one.pieces, issued, None if one.wanted is None else place(one.wanted)))
    overlapped.sort(key=lambda one: (one.issued, len(main) if one.wanted is None else one.wanted))
    return Script(main, overlapped)


def _cuts(script: Script, turns: Collection[int]) -> list[int]:
    """Return where the turns of a script begin, and its end."""
    sources = [(one.pieces[0].source, one.wanted) for one in script.overlapped]
    waits = {at for source, at in sources if isinstance(source, Beside) and source.vertex in turns and at is not None}
    return [*sorted({0} | waits), len(script.main)]


def with_the_other(
    order: StepOrder, turns: Collection[int], held: Mapping[str, np.ndarray], saved: str
) -> dict[str, np.ndarray]:
    """Return the bytes of each kind at each run of a step whose micro-batches take turns: those that it `held` by
    itself, and those of the other micro-batch where it stands. All are of kinds that a micro-batch has of its own, that
    of what waits for the backward is `saved`."""
    phases = [[i for i, run in enumerate(order.runs) if run.phase == phase] for phase in PHASES]
    if not all(phases):
        return dict(held)
    begins = [[own[0], *(i for i in own[1:] if order.runs[i].vertex in turns)] for own in phases]
    middle = phases[1][0]  # a backward has not begun, or a forward has ended
    result = {}
    for kind, bytes_ in held.items():
        waiting = bytes_[middle] if kind == saved else bytes_.min()
        forward, backward = (bytes_[own] for own in begins)
        other = bytes_.copy()
        stands = [*forward[1:], waiting], [waiting, *backward[1:]]  # where one stands in each turn of the other
        for own, begin, at, after in zip(phases, begins, reversed(stands), (0.0, waiting)):
            for turn, (first, last) in enumerate(zip(begin, [*begin[1:], own[-1] + 1])):
                other[first:last] = at[turn] if turn < len(at) else after
        result[kind] = bytes_ + other
    return result
