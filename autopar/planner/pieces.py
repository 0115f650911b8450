"""From a plan of one micro-batch to the chain of pieces that the stage solver cuts: where a cut is cheap, and what lies between.

A place to cut is looked for between each two ops that have FLOPs: where the fewest bytes of a device pass. Of those places the ones
stay that are no worse than the one before and the one after: block borders and the place between attention and mlp, not the middle
of either; a cut through a decoder passes what it reads of the encoder as well, and is still one of these. In a U-Net, where ever
more skips pass, those stay too that have none near them with far fewer bytes. Where that leaves few pieces for many stages, so do
the next best: what they send is weighed against even stages by the solver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..cost.compute import flops_of
from ..errors import StageError
from .evaluate import Evaluation, Pricer
from .live_bytes import LiveBytes
from .places import Places
from .problem import Problem
from .stage_parts import Part, Parts, crossing_bytes
from .stages import Level, Piece, Shared

NEAR = 0.25  # of a stage's mean seconds, in which a better place is looked for
FAR_FEWER = 1.6  # times as many bytes as at the best place near make a place a bad one
ENOUGH = 16  # pieces a stage: with fewer of them, places with more bytes are taken too, as the sends' seconds are weighed later
DIGITS = 9  # that the seconds of two equal pieces share

Send = Callable[[float], float]  # seconds of a tensor of so many bytes from one stage to the next


@dataclass(frozen=True)
class Chain:
    """Pieces that begin at the forward ops `starts`, all but the first. `shared`: parameters that several of them have."""

    pieces: tuple[Piece, ...]
    shared: tuple[Shared, ...]
    starts: tuple[str, ...]
    parts: tuple[Part, ...]

    def cuts(self, firsts: Sequence[int]) -> tuple[str, ...]:
        """The ops at which stages begin that begin at these pieces, in order; the first stage begins at none."""
        return tuple(self.starts[i - 1] for i in sorted(firsts) if i)


def chain(problem: Problem, e: Evaluation, pricer: Pricer, stages: int, send: Send, live: LiveBytes | None = None) -> Chain:
    """The pieces of a plan; `live`: its memory, if it is known. Raises StageError if they are too few for so many stages."""
    places = places_to_cut(problem, e, pricer, stages)
    starts = tuple(places)
    found = Parts(problem, e, pricer, starts, live=live)
    shared = [
        Shared(a, b, int(tied.state_bytes), 2 * send(tied.gradient_bytes))
        for tied in found.tied for a, b in zip(tied.parts, tied.parts[1:])
    ]  # fmt: skip
    parts = found.found
    more = [0.0] * len(parts)  # each part but the first has a tied parameter as well
    for tied in found.tied:
        for at in tied.parts[1:]:
            more[at] += tied.state_bytes
    return Chain(tuple(_pieces(parts, more, send, [*places.values(), 0.0])), tuple(shared), starts, tuple(parts))


def _pieces(parts: Sequence[Part], more: Sequence[float], send: Send, crossing: Sequence[float]) -> list[Piece]:
    """`crossing`: bytes that pass after each part. Where all parts are stages, more may pass: values that the backward of one part
    reads of others, which a stage of several parts has itself. So a message is no more than what passes."""
    levels: dict[tuple, tuple[str, Level]] = {}
    pieces = []
    for part, tied, most in zip(parts, more, crossing):
        forward, backward, saved = part.forward_seconds, part.backward_seconds, round(part.saved_bytes)
        key = (*(f"{seconds:.{DIGITS}g}" for seconds in (forward, backward)), saved)
        kind, level = levels.setdefault(key, (f"{part.name} {len(levels)}", Level(forward, backward, saved)))
        ahead, back = (min(sum(map(send, passing)), send(most)) for passing in (part.sent, part.returned))
        pieces.append(Piece(
            kind, (level,), round(part.state_bytes + tied), round(part.transient_bytes),
            round(min(sum(part.sent), most) + min(sum(part.returned), most)), (ahead, back), True,
        ))  # fmt: skip
    return pieces


def places_to_cut(problem: Problem, e: Evaluation, pricer: Pricer, stages: int) -> dict[str, float]:
    """The forward ops at which a piece may begin, in order, with the bytes of a device that pass a cut there. Raises StageError if
    there are fewer than the stages need."""
    order, crossing = crossing_bytes(problem, e, pricer, Places(problem.graph, ()).free)
    seconds = {v.node: float(problem.choices(v.index).seconds[e.choice[v.index]]) for v in problem.vertices if v.kind == "op"}
    ends = np.cumsum([seconds.get(node, 0.0) for node in order])
    heavy = [i for i, node in enumerate(order) if flops_of(node)]
    best = [min(range(a + 1, b + 1), key=crossing.__getitem__) for a, b in zip(heavy, heavy[1:])]
    if len(best) + 1 < stages:
        raise StageError(f"a model of {len(heavy)} ops with FLOPs cannot be cut into {stages} stages",
                         fix=f"use {max(1, len(best) + 1)} stages or less: fewer ranks along pp, or stages_per_rank=1")  # fmt: skip
    bytes_, at = np.array([crossing[i] for i in best]), np.array([ends[i - 1] for i in best])
    padded = np.concatenate([[np.inf], bytes_, [np.inf]])
    is_least = (bytes_ <= padded[:-2]) & (bytes_ <= padded[2:])
    near = NEAR * (ends[-1] if len(ends) else 0.0) / stages
    fewest = np.array([bytes_[np.abs(at - t) <= near].min() for t in at])
    worse = np.where(is_least, 1.0, bytes_ / np.maximum(fewest, 1.0))  # times the bytes of the best place near
    kept = worse <= max(FAR_FEWER, np.sort(worse)[: ENOUGH * stages - 1].max(initial=0.0))
    return {order[i].name: crossing[i] for i, good in zip(best, kept) if good}
