"""The one clock: a script played on one compute stream and one stream for each class of links.

The compute stream goes from piece to piece. A collective that it waits for has the links of its class to itself: what
is hidden on them is pushed aside, and goes on afterwards. Hidden collectives of a class run in the order in which they
were issued, as soon as those of other classes that they follow have ended; while one runs, whatever the compute stream
does goes slower (`drag`). Copies between the host and the device are on a stream of their own, in one direction at a
time, and slow nothing down. Where the next piece wants something hidden that has not ended, the compute stream stands.

So a phase takes at least what its busiest stream needs (autopar/planner/objective/loads.py), which the search bounds.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..problem.multipliers import PHASES, drag
from ..problem.problem import Problem
from .evaluate import Evaluation
from .pricer import Pricer
from .script import HOST, Overlapped, Piece, Script, StreamOf, scripts_of
from .side_by_side import pair_script
from .step_order import StepOrder, step_order

Tell = Callable[[Piece, float, float], None]
LEAST = 1e-15  # seconds
SLOWEST = 1e-12  # share of its speed that compute keeps at least


@dataclass
class _Running:
    """Collectives beside compute that were issued: the number of the one that is next, and what is left of it."""

    overlapped: Overlapped
    next: int = 0
    left: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.next == len(self.overlapped.pieces)


class Player:
    """Plays one script. `tell` is given each stretch of a piece with its begin and end."""

    def __init__(self, script: Script, overlap: float, tell: Tell | None = None):
        classes = len({piece.stream for overlapped in script.overlapped for piece in overlapped.pieces} - {HOST})
        self.script, self.loss, self.tell, self.now = script, drag(overlap, classes), tell, 0.0
        self.queues: dict[int, deque[_Running]] = defaultdict(deque)

    def play(self) -> float:
        """Return the seconds until every stream has ended."""
        script, issued, wanted = self.script, iter([*self.script.overlapped, None]), defaultdict(list)
        coming = next(issued)
        for i, piece in enumerate(script.main):
            while coming is not None and coming.issued <= i:
                running = self._issue(coming)
                if coming.wanted is not None:
                    wanted[max(i, coming.wanted)].append(running)
                coming = next(issued)
            for running in wanted.pop(i, ()):
                while not running.is_over:
                    self._run(None)
            self._run(piece)
        while coming is not None:
            self._issue(coming)
            coming = next(issued)
        while any(self.queues.values()):
            self._run(None)
        return self.now

    def _issue(self, overlapped: Overlapped) -> _Running:
        running = _Running(overlapped, 0, overlapped.pieces[0].seconds)
        self.queues[overlapped.pieces[0].stream].append(running)
        return running

    def _run(self, piece: Piece | None) -> None:
        """Let a piece of the compute stream run to its end, or, without one, the next hidden collective to its."""
        left = piece.seconds if piece else float("inf")
        start = self.now
        while left > LEAST:
            heads = [q[0] for s, q in self.queues.items() if q and (piece is None or s != piece.stream)]
            slowing = sum(head.overlapped.pieces[head.next].stream != HOST for head in heads)
            speed = max(SLOWEST, 1.0 - self.loss * slowing)
            step = min([left / speed, *(head.left for head in heads)])
            for head in heads:
                self._advance(head, step)
            self.now += step
            left -= step * speed
            if piece is None:
                break
        if piece and self.tell:
            self.tell(piece, start, self.now)

    def _advance(self, running: _Running, step: float) -> None:
        piece = running.overlapped.pieces[running.next]
        if self.tell:
            self.tell(piece, self.now, self.now + step)
        running.left -= step
        if running.left <= LEAST:
            self.queues[piece.stream].popleft()
            running.next += 1
            if not running.is_over:
                following = running.overlapped.pieces[running.next]
                running.left = following.seconds
                self.queues[following.stream].append(running)


def merged(script: Script) -> Script:
    """Return a script that takes as long, with neighbouring pieces of one stream as one where nothing is issued or
    wanted between them."""
    borders = {b.issued for b in script.overlapped} | {b.wanted for b in script.overlapped if b.wanted is not None}
    main: list[Piece] = []
    place = []
    for i, piece in enumerate(script.main):
        if main and i not in borders and main[-1].stream == piece.stream:
            place.append(len(main) - 1)
            main[-1] = Piece(piece.stream, main[-1].seconds + piece.seconds, piece.source)
        else:
            place.append(len(main))
            main.append(piece)
    place.append(len(main))
    overlapped = [
        replace(b, issued=place[b.issued], wanted=None if b.wanted is None else place[b.wanted])
        for b in script.overlapped
    ]
    return Script(main, overlapped)


def stretch_of(problem: Problem, e: Evaluation, pricer: Pricer, order: StepOrder | None = None) -> float:
    """Return how much longer a pass takes as it is played than its busiest streams need, without what one pass of a
    step alone moves. `order`: of the step, if it is known."""
    least = sum(e.loads[phase].every.seconds(e.overlap) for phase in PHASES)
    scripts = scripts_of(problem, e, StreamOf(pricer), e.micro_batches == 1, order)
    return sum(Player(merged(s), e.overlap).play() for s in scripts) / least if least and e.overlap else 1.0


def gained_in_pairs(problem: Problem, e: Evaluation, turning: Evaluation, pricer: Pricer, order: StepOrder) -> float:
    """Return the seconds by which a forward and a backward that take turns are shorter than one after the other;
    `turning`: the plan `e` in turns; `order`: of both."""
    streams = StreamOf(pricer)
    apart = scripts_of(problem, e, streams, False, order)
    pair = pair_script(*scripts_of(problem, turning, streams, False, order), turning.turns)
    one_by_one, both = (sum(Player(merged(s), e.overlap).play() for s in scripts) for scripts in (apart, (pair,)))
    return one_by_one - both


def played_seconds(problem: Problem, e: Evaluation, pricer: Pricer) -> float:
    """Return the seconds of an average pass of a step, the optimizer's included. Of passes that take turns all but one
    forward and one backward are in pairs."""
    streams, order = StreamOf(pricer), step_order(problem, e)

    def seconds(is_once: bool) -> float:
        scripts: Sequence[Script] = scripts_of(problem, e, streams, is_once, order)
        if e.turns and not is_once:
            scripts = (pair_script(*scripts, e.turns),)
        return sum(Player(merged(s), e.overlap).play() for s in scripts)

    total = seconds(True)
    if e.turns or any(t.times < e.micro_batches for t in e.transfers):
        total = (total + (e.micro_batches - 1) * seconds(False)) / e.micro_batches
    return total + e.parameter_seconds
