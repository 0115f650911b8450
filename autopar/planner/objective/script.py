"""Write the script of a plan that is played: what the compute stream does one thing after the other, and which
collectives run beside it.

The compute stream works in the order of the step (autopar/planner/objective/step_order.py): ops, local copies, and
collectives that it waits for, each where its first reader is. What is hidden is issued at one place of that order and
waited for at another, as is an exchange of rows that has ops beside it. Blocks of a deep model that a compact graph
leaves out are written down as often as they run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from ...cost.redistribute import MoveStep
from ..problem.multipliers import PHASES
from ..problem.problem import Problem
from .beside import Beside
from .evaluate import Evaluation, Transfer
from .host_travels import HostTravel, host_travels
from .step_order import Execution, StepOrder, Travel, step_order

COMPUTES, HOST = 0, -1  # streams: the link to the host is one; collectives are on their classes' of links, from 1 on
Source = Execution | tuple[Travel, MoveStep] | HostTravel | Beside


class Piece(NamedTuple):
    """Something that takes a stream some time; `source`: what it is a part of."""

    stream: int
    seconds: float
    source: Source


@dataclass(frozen=True)
class Overlapped:
    """Collectives that run beside compute, one after the other: issued before the piece `issued` of the compute stream,
    and waited for before the piece `wanted`, if anything of the phase waits for them."""

    pieces: tuple[Piece, ...]
    issued: int
    wanted: int | None


@dataclass
class Script:
    """One phase of a pass, to be played."""

    main: list[Piece] = field(default_factory=list)
    overlapped: list[Overlapped] = field(default_factory=list)


@dataclass
class _Segment:
    """A block in one phase: its pieces, in `copies` equal copies. Of what runs beside it: whether it is issued in the
    block before, after which piece, and before which it is wanted. `sent`: what is copied to the host behind a piece,
    and waited for at the end of the next block."""

    copies: int
    main: list[Piece] = field(default_factory=list)
    overlapped: list[tuple[bool, int, int | None, tuple[Piece, ...]]] = field(default_factory=list)
    sent: list[tuple[int, Piece]] = field(default_factory=list)


def scripts_of(
    problem: Problem, e: Evaluation, streams: StreamOf, is_once: bool = True, order: StepOrder | None = None
) -> tuple[Script, Script]:
    """Return the forward and the backward of a pass. `is_once`: with what one pass of a step alone moves."""
    order = order or step_order(problem, e)
    forward, backward = (_Writer(problem, e, streams, is_once, order, phase).script() for phase in PHASES)
    return forward, backward


class StreamOf:
    """Says on which stream a move travels."""

    def __init__(self, pricer):
        self.stream_of = pricer.prices.stream_of

    def pieces(self, travel: Travel, seconds: float) -> tuple[list[Piece], list[Piece], list[Piece]]:
        """Return the pieces of a transfer that takes so many seconds: local work before its first collective, the
        collectives, and local work after them. Steps share the seconds of their stream as their own prices do."""
        t = travel.transfer
        local: tuple[list[Piece], list[Piece]] = ([], [])
        prices = [
            (s, self.stream_of(s.move.kind, s.move.axes), s.latency_seconds + s.seconds_per_byte * t.bytes_)
            for s in t.redistribution.steps
        ]
        by_stream: dict[int, float] = defaultdict(float)
        for _, stream, price in prices:
            by_stream[stream] += price
        left = [share * seconds for share in t.split]
        moves: list[Piece] = []
        for step, stream, price in prices:
            if stream < len(left) and by_stream[stream] > 0:
                piece = Piece(stream, left[stream] * price / by_stream[stream], (travel, step))
                (moves if stream != COMPUTES else local[bool(moves)]).append(piece)
        if left[COMPUTES] > 0 and not by_stream[COMPUTES] > 0:  # casts
            local[0].append(Piece(COMPUTES, left[COMPUTES], (travel, prices[0][0])))
        return local[0], moves, local[1]


class _Writer:
    """Writes one phase of a step down."""

    def __init__(self, problem: Problem, e: Evaluation, streams: StreamOf, is_once: bool, order: StepOrder, phase: str):
        self.problem, self.e, self.streams, self.is_once, self.phase = problem, e, streams, is_once, phase
        self.copies, self.micro_batches = problem.copies(e.first), e.micro_batches
        own = [i for i, run in enumerate(order.runs) if run.phase == phase]
        self.begin, self.end = (own[0], own[-1] + 1) if own else (len(order.runs), len(order.runs))
        self.runs, self.blocks = order.runs[self.begin : self.end], order.blocks[self.begin : self.end]
        self.travels = [t for t in order.travels if t.phase == phase]
        self.copied: dict[int, list[HostTravel]] = defaultdict(list)  # by run that makes a value or reads it first
        for travel in host_travels(problem, e, order):
            self.copied[(travel.sent if phase == PHASES[0] else travel.back) - self.begin].append(travel)
        self.seconds = problem.chosen(e.choice).seconds
        self.beside = {(one.vertex, one.recomputed): one for one in e.beside if one.phase == phase}
        self.recomputed_copies = {
            v: n for levels in e.recomputed.values() for step, n in levels.values() for v in step.recomputed
        }

    def script(self) -> Script:
        segments = self._segments()
        result, before = Script(), 0
        leaving: list[tuple[int, Piece]] = []  # for the host, from the block before
        for segment in segments:
            for _ in range(segment.copies):
                start = len(result.main)
                result.main += segment.main
                for is_before, issued, wanted, pieces in segment.overlapped:
                    at = min(before + issued, start) if is_before else start + issued
                    result.overlapped.append(Overlapped(pieces, at, None if wanted is None else start + wanted))
                before = start
                result.overlapped += [Overlapped((piece,), at, len(result.main)) for at, piece in leaving]
                leaving = [(start + behind, piece) for behind, piece in segment.sent]
        result.overlapped += [Overlapped((piece,), at, None) for at, piece in leaving]
        result.overlapped.sort(key=lambda b: (b.issued, len(result.main) if b.wanted is None else b.wanted))
        return result

    def _segments(self) -> list[_Segment]:
        """Return the segments of the phase, with their pieces."""
        grouped = [list(group) for _, group in groupby(range(len(self.runs)), self.blocks.__getitem__)]
        of_run = [s for s, positions in enumerate(grouped) for _ in positions]
        segments = [_Segment(self._copies_of(positions)) for positions in grouped] or [_Segment(1)]
        of_run, starts = of_run or [0], {positions[0] for positions in grouped}
        waited: dict[int, list[tuple[Travel, float]]] = defaultdict(list)  # by run before which it is made
        hidden: dict[int, list[tuple[Travel, float, int]]] = defaultdict(list)  # by run that it belongs to
        last = max(0, len(self.runs) - 1)
        for travel in self.travels:
            seconds = self._seconds(travel.transfer)
            if not seconds:
                continue
            first = min(max(0, travel.first - self.begin), len(self.runs))
            if self.e.overlap and travel.transfer.is_hidden:
                made = min(max(-1, travel.start - self.begin - 1), last)
                hidden[first if travel.first < self.end else max(0, made)].append((travel, seconds, made))
            else:
                waited[first].append((travel, seconds))
        at: list[int] = []  # by run, the piece of its segment that it is
        read_at: list[int] = []  # and before which it reads what travels beside compute
        begins: list[int] = []  # and before which nothing is done for it
        is_forward = self.phase == PHASES[0]
        for i, run in enumerate(self.runs):
            segment = segments[of_run[i]]
            main = segment.main
            begins.append(len(main))
            if i in waited:
                for travel, seconds in waited.pop(i):
                    main += self._in_line(travel, seconds / segment.copies)
            read_at.append(len(main))
            beside_this = hidden.get(i, ())
            for travel, seconds, _ in beside_this:
                if travel.first < self.end:  # local work of a hidden transfer
                    main += self._local(travel, seconds / segment.copies)
            at.append(len(main))
            copies = [self._host_piece(travel, segment.copies) for travel in self.copied.get(i, ())]
            if copies and not self.e.overlap and not is_forward:
                main += copies
            if self.beside and (one := self._beside(run)):
                piece = Piece(one.stream, one.seconds * one.copies / segment.copies, one)
                issued = begins[i - len(one.ops)] if one.ops else len(main)
                segment.overlapped.append((False, issued, len(main), (piece,)))
            if op_seconds := self._op_seconds(run):
                main.append(Piece(COMPUTES, op_seconds / segment.copies, run))
            if copies and not self.e.overlap and is_forward:
                main += copies
            if copies and self.e.overlap and is_forward:
                segment.sent += [(len(main), piece) for piece in copies]
            elif copies and self.e.overlap:
                segment.overlapped += [(True, 0, read_at[i], (piece,)) for piece in copies]
            for travel, seconds, _ in beside_this:
                if travel.first >= self.end:
                    main += self._local(travel, seconds / segment.copies)
        for travel, seconds in waited.pop(len(self.runs), ()):
            segments[-1].main += self._in_line(travel, seconds / segments[-1].copies)
        for i, travels in hidden.items():
            for travel, seconds, made in travels:
                own = of_run[min(i, last)]
                pieces = tuple(self.streams.pieces(travel, seconds / segments[own].copies)[1])
                is_wanted = travel.first < self.end
                is_before = made < 0 or of_run[made] != own or grouped[own][0] == made + 1
                if not is_wanted:
                    is_before, issued = False, min(at[made] + 1, len(segments[own].main)) if at and made >= 0 else 0
                elif is_before:
                    is_start = made < 0 or made + 1 in starts
                    issued = 0 if is_start else at[made] + 1
                else:
                    issued = at[made] + 1
                if pieces:
                    wanted = read_at[i] if is_wanted else None
                    segments[own].overlapped.append((is_before, issued, wanted, pieces))
        return segments

    def _beside(self, run: Execution) -> Beside | None:
        """Return what runs beside an exchange of rows, None if nothing does."""
        return self.beside.get((run.vertex, run.recomputed))

    def _host_piece(self, travel: HostTravel, copies: int) -> Piece:
        """Return the copy of a value one way, in the mean of so many copies of its block."""
        return Piece(HOST, travel.value.seconds * travel.value.count / copies, travel)

    def _in_line(self, travel: Travel, seconds: float) -> list[Piece]:
        before, moves, after = self.streams.pieces(travel, seconds)
        return [*before, *moves, *after]

    def _local(self, travel: Travel, seconds: float) -> list[Piece]:
        before, _, after = self.streams.pieces(travel, seconds)
        return [*before, *after]

    def _copies_of(self, positions: Sequence[int]) -> int:
        return self.copies[self.runs[positions[0]].vertex]

    def _op_seconds(self, run: Execution) -> float:
        """Return the seconds of an op in all its copies."""
        of_block = run.recomputed and not run.in_pieces
        times = self.recomputed_copies.get(run.vertex, 0) if of_block else self.copies[run.vertex]
        seconds = self.seconds[run.vertex] * times
        one = self._beside(run) if self.beside else None
        return seconds - one.seconds * one.copies if one else seconds

    def _seconds(self, t: Transfer) -> float:
        """Return the seconds of a transfer in all its copies, in the pass that is written down."""
        if t.times == self.micro_batches:
            return t.seconds * t.copies
        return t.seconds * t.copies * self.micro_batches if self.is_once else 0.0
