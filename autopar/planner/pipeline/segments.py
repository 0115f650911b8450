"""Turn a plan of one micro-batch into the chain of segments that the stage solver cuts: where a cut is cheap, and what
lies between.

A place to cut is looked for between each two ops that have FLOPs: where the fewest bytes of a device pass. Of those
places the ones stay that are no worse than the one before and the one after: block borders and the place between
attention and mlp, not the middle of either; a cut through a decoder passes what it reads of the encoder as well, and is
still one of these. In a U-Net, where ever more skips pass, those stay too that have none near them with far fewer
bytes. Where that leaves few segments for many stages, so do the next best: what they send is weighed against even
stages by the solver.

Of a deep model the few blocks of its compact graph are cut, and their segments stand for those of the blocks that it
leaves out. A segment has a level for some of the steps in which its blocks may be computed again
(autopar/planner/objective/checkpoint_blocks.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np
from torch import fx

from ...cost.compute import flops_of
from ...errors import StageError
from ...frontend.repeated_blocks import Compact
from ..objective.checkpoint_blocks import Blocks, taking
from ..objective.evaluate import Evaluation
from ..objective.expand import few_of, recomputes_alike, whole_of
from ..objective.memory_timeline import LiveBytes
from ..objective.pricer import Pricer
from ..problem.multipliers import Prices
from ..problem.problem import Problem
from .model import RecomputeOption, Segment, Shared, StageCut
from .pareto import Levels
from .spans import Spans
from .stage_costs import Part, Parts, crossing_bytes

NEAR = 0.25  # of a stage's mean seconds, in which a better place is looked for
FAR_FEWER = 1.6  # times as many bytes as at the best place near make a place a bad one
# Segments a stage: with fewer of them, places with more bytes are taken too, as the sends' seconds are weighed later.
ENOUGH = 16
DIGITS = 9  # that the seconds of two equal segments share
MOST_SEGMENTS = 256  # but not more than so many in all: the solver's time grows with their square
MOST_LEVELS = 4  # of a segment: the levels of a stage are counted, which takes longer the more there are

Send = Callable[[float], float]  # seconds of a tensor of so many bytes from one stage to the next


@dataclass(frozen=True)
class Chain:
    """Pieces that begin at the forward ops `starts` of the whole graph, all but the first. `shared`: parameters that
    several of them have. `parts`: of each segment, with nothing computed again."""

    segments: tuple[Segment, ...]
    shared: tuple[Shared, ...]
    starts: tuple[str, ...]
    parts: tuple[Part, ...]
    begins: tuple[fx.Node, ...] = ()  # the ops of a compact graph at which segments begin, all but the first
    order: tuple[int, ...] = ()  # the segments of the whole model as those of the compact graph

    @cached_property
    def levels(self) -> Levels:
        """Return the levels of any number of the segments, which all cuts of them share."""
        return Levels(self.segments)

    @cached_property
    def seconds_before(self) -> np.ndarray:
        """Return (segments + 1, 4): what all segments before one take together for a micro-batch, forward and the two
        parts of the backward, and once a step."""
        what = ("forward", "input", "weight", "once")
        seconds = [[getattr(part, f"{one}_seconds") for one in what] for part in self.parts]
        return np.concatenate((np.zeros((1, len(what))), np.cumsum(seconds, 0)))

    @cached_property
    def known_cuts(self) -> dict[tuple, StageCut]:
        """Return the best cuts that were found (autopar/planner/pipeline/best_cut.py), by what they are best for."""
        return {}

    def spans(self, stages: int) -> Spans:
        """Return all runs of segments that may be one of so many stages."""
        known = self.__dict__.setdefault("known_spans", {})
        if stages not in known:
            known[stages] = Spans(self.segments, stages, self.shared, self.levels, math.inf)
        return known[stages]

    def of_whole(self, compact: Compact, first: int) -> Chain:
        """Return the same segments with the ops of the whole graph at which they begin."""
        named = replace(self, starts=_names(compact, self.begins, self.order, first))
        known = ("levels", "seconds_before", "known_spans", "known_cuts")
        named.__dict__.update({name: self.__dict__[name] for name in known if name in self.__dict__})
        return named

    def cuts(self, firsts: Sequence[int]) -> tuple[str, ...]:
        """Return the ops at which stages begin that begin at these segments, in order; the first stage begins at
        none."""
        return tuple(self.starts[i - 1] for i in sorted(firsts) if i)

    @property
    def once_seconds(self) -> float:
        """Return the seconds that a step takes once, for all micro-batches, over all segments."""
        return sum(part.once_seconds for part in self.parts)


def chain(
    problem: Problem,
    e: Evaluation,
    pricer: Pricer,
    stages: int,
    send: Send,
    live: LiveBytes | None = None,
    prices: Prices | None = None,
) -> Chain:
    """Return the segments of a plan; `live`: its memory, if it is known. `prices`: of what may be computed again
    besides, None if nothing may. Raise StageError if the segments are too few for so many stages."""
    compact, first, seconds = problem.compact, e.first, e.compute["forward"]
    if not recomputes_alike(e):
        (problem, e), compact = whole_of(problem, e), None
    else:
        problem, e = few_of(problem, e)
    nodes = {node.name: node for node in problem.graph.nodes}
    copies = {n: len(compact.stands_for(compact.block(n), first)) for n in compact.origins} if compact else {}
    positions = cut_positions(problem, e, pricer, stages, seconds / stages, copies)
    starts = tuple(positions)
    blocks = [0, *(compact.block(nodes[name]) for name in starts)] if compact else []
    order = (
        _repeated(blocks, lambda block: len(compact.stands_for(block, first))) if compact else range(len(starts) + 1)
    )
    found = Parts(problem, e, pricer, starts, live=None if compact else live)
    levels = [found.under(one).found for one in _levels(problem, e, pricer, prices)]
    index_of = {i: at for at, i in reversed([*enumerate(order)])}
    shared = [
        Shared(index_of[a], index_of[b], int(tied.state_bytes), 2 * send(tied.gradient_bytes))
        for tied in found.tied
        for a, b in zip(tied.parts, tied.parts[1:])
    ]
    more = [0.0] * len(found.found)  # each part but the first has a tied parameter as well
    for tied in found.tied:
        for at in tied.parts[1:]:
            more[at] += tied.state_bytes
    segments = _segments(list(zip(found.found, *levels)), more, send, [*positions.values(), 0.0])
    begins = tuple(nodes[name] for name in starts) if compact else ()
    names = starts if compact is None else _names(compact, begins, order, first)
    parts = tuple(found.found[i] for i in order)
    return Chain(tuple(segments[i] for i in order), tuple(shared), names, parts, begins, tuple(order))


def _repeated(blocks: Sequence[int], copies: Callable[[int], int]) -> list[int]:
    """Return the segments in the order of the whole model: those that begin in one block follow each other once for
    each of its copies."""
    return [i for block, own in groupby(range(len(blocks)), blocks.__getitem__) for i in [*own] * copies(block)]


def _names(compact, starts: Sequence[fx.Node], order: Sequence[int], first: int) -> tuple[str, ...]:
    """Return the ops of the whole graph at which the segments begin, "" where only the compact one is known."""
    seen, names = [0] * (len(starts) + 1), []
    for i in order[1:]:
        origin, block = compact.origins[starts[i - 1]]
        node = compact.whole.get((origin, compact.stands_for(block, first)[seen[i]]))
        seen[i] += 1
        names.append(node.name if node is not None else "")
    return tuple(names)


def _levels(problem: Problem, e: Evaluation, pricer: Pricer, prices: Prices | None) -> list[Evaluation]:
    """Return plans with every block computed again up to ever later steps, to the last of them in the last plan; none
    if nothing may be computed again, or if something is already."""
    if prices is None or e.recomputed:
        return []
    steps: dict[str, list] = {}
    for step in Blocks(problem, pricer).recomputation(e, prices):
        steps.setdefault(step.block, []).append(step)
    most = max(map(len, steps.values()), default=0)
    counts = sorted({max(1, round(most * i / (MOST_LEVELS - 1))) for i in range(1, MOST_LEVELS)}) if most else []
    return [taking(e, [(step, 1) for own in steps.values() for step in own[:count]]) for count in counts]


def _segments(
    parts: Sequence[tuple[Part, ...]], more: Sequence[float], send: Send, crossing: Sequence[float]
) -> list[Segment]:
    """Make segments of the parts. `parts`: of every segment at each level; what comes and goes is that of the level
    where it is most. `crossing`: bytes that pass after each part. Where all parts are stages, more may pass: values
    that the backward of one part reads of others, which a stage of several parts has itself. So a message is no more
    than what passes."""
    known: dict[tuple, str] = {}
    segments = []
    for levels, tied, most in zip(parts, more, crossing):
        part, found = (
            levels[0],
            [RecomputeOption(p.forward_seconds, p.backward_seconds, round(p.saved_bytes)) for p in levels],
        )
        found = tuple(l for i, l in enumerate(found) if not i or l.activation_bytes < found[i - 1].activation_bytes)
        key = tuple(
            (f"{l.forward_seconds:.{DIGITS}g}", f"{l.backward_seconds:.{DIGITS}g}", l.activation_bytes) for l in found
        )
        kind = known.setdefault(key, (f"{part.name} {len(known)}", found))
        ahead, back = (min(sum(map(send, passing)), send(most)) for passing in (part.sent, part.returned))
        segments.append(
            Segment(
                *kind,
                round(part.state_bytes + tied),
                round(max(p.transient_bytes for p in levels)),
                round(min(sum(part.sent), most) + min(sum(part.returned), most)),
                (ahead, back),
                True,
            )
        )
    return segments


def cut_positions(
    problem: Problem, e: Evaluation, pricer: Pricer, stages: int, stage_seconds: float, copies: Mapping[fx.Node, int]
) -> dict[str, float]:
    """Return the forward ops at which a segment may begin, in order, with the bytes of a device that pass a cut there,
    for stages whose forward takes so long in the mean; `copies`: of ops that stand for several. Raise StageError if
    there are fewer than the stages need."""
    order, crossing = crossing_bytes(problem, e, pricer, problem.placement(()).free)
    seconds = {
        v.node: float(problem.choices(v.index).seconds[e.choice[v.index]]) for v in problem.vertices if v.kind == "op"
    }
    ends = np.cumsum([seconds.get(node, 0.0) for node in order])
    heavy = [i for i, node in enumerate(order) if flops_of(node)]
    best = [min(range(a + 1, b + 1), key=crossing.__getitem__) for a, b in zip(heavy, heavy[1:])]
    best = [i for i in best if crossing[i] < math.inf]
    count = np.array([copies.get(order[i], 1) for i in best], dtype=int)
    if 1 + count.sum() < stages:
        raise StageError(
            f"a model of {count.sum() + 1} ops with FLOPs cannot be cut into {stages} stages",
            fix=f"use {count.sum() + 1} stages or less: fewer ranks along pp, or stages_per_rank=1",
        )
    bytes_, at = np.array([crossing[i] for i in best]), np.array([ends[i - 1] for i in best])
    padded = np.concatenate([[np.inf], bytes_, [np.inf]])
    is_least = (bytes_ <= padded[:-2]) & (bytes_ <= padded[2:])
    fewest = np.array([bytes_[np.abs(at - t) <= NEAR * stage_seconds].min() for t in at])
    worse = np.where(is_least, 1.0, bytes_ / np.maximum(fewest, 1.0))  # times the bytes of the best place near
    rank = np.argsort(worse, kind="stable")
    wanted = max(stages, min(ENOUGH * stages, MOST_SEGMENTS)) - 1
    needed = worse[rank][: np.searchsorted(count[rank].cumsum(), wanted) + 1]
    accepted = worse <= max(FAR_FEWER, needed.max(initial=0.0))
    return {order[i].name: crossing[i] for i, good in zip(best, accepted) if good}
