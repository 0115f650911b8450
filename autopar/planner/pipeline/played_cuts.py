"""Play the schedule with the seconds of a cut's segments, for many cuts at once, and move boundaries as long as the
played step gets shorter; where stages have plans of their own, these are exchanged too.

The formulas that a cut is chosen by (autopar/planner/pipeline/model.py) take the bubble for the same share of every
stage; a schedule's order may wait for a stage that is long, and not for one that is short. So what they choose is where
the search begins: a boundary, or several neighbours, is moved by a segment if that makes the played step shorter and
every rank still fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...schedule.timetable import Timetable
from .cut_interleaved import Loops
from .model import RankSegments, StageCut
from .segments import Chain

LEAST_GAIN = 1e-4  # of a step, that a move has to save
MOST_ACTIONS = 4_000_000  # that are played in all while boundaries are moved
MOST_MOVES = 120  # that are tried at a time: those of one boundary first, then those of two neighbours, and so on


class PlayedCuts:
    """Plays cuts of a model into stages. `chains`: its segments, by plan of a micro-batch."""

    def __init__(self, chains: Sequence[Chain], timetable: Timetable):
        self.timetable = timetable
        self.before = np.stack([chain.seconds_before for chain in chains])
        none, inner = (0.0, 0.0), [[one.boundary_seconds for one in chain.segments[:-1]] for chain in chains]
        self.sends = np.array(
            [[none, *own, none] for own in inner]
        )  # by plan, around each segment, (forward, backward)
        schedule = timetable.schedule
        self.on_rank = np.eye(schedule.ranks)[:, list(schedule.rank_of_stage)]  # (ranks, stages)

    def step_seconds(self, cuts: Sequence[Sequence[RankSegments]]) -> np.ndarray:
        """Return the seconds of a step with each of some cuts, with what it does once; what is computed again is in the
        backward."""
        # by cut and stage: what it runs, and the number of what a cut takes for a rank
        spans = [sorted((*span, i) for i, one in enumerate(cut) for span in one.spans) for cut in cuts]
        first, end, unit = np.array(spans).transpose(2, 0, 1)
        plan = np.take_along_axis(np.array([[one.plan for one in cut] for cut in cuts]), unit, 1)
        forward, input_, weight, once = np.moveaxis(self.before[plan, end] - self.before[plan, first], 2, 0)
        in_unit = unit[:, None] == np.arange(len(cuts[0]))[:, None]  # (cuts, units, stages)
        free = (in_unit * (forward + input_ + weight)[:, None]).sum(2)
        sends = (in_unit * (self.sends[plan, end, 0] + self.sends[plan, first, 1])[:, None]).sum(2)
        taken = np.array([[one.seconds for one in cut] for cut in cuts]) - sends
        slower = np.divide(taken, free, out=np.ones_like(free), where=free > 0)  # a stage may have views alone
        again = (forward + input_ + weight) * (np.take_along_axis(slower, unit, 1) - 1)
        border = first[:, 1:]  # the stage before one sends forward, the stage itself backward
        transfer = np.maximum(self.sends[plan[:, :-1], border, 0], self.sends[plan[:, 1:], border, 1])
        ends = self.timetable.ends(forward.T, (input_ + again).T, weight.T, transfer.T)
        return (ends + self.on_rank @ once.T).max(0)

    def improved(self, cut: StageCut, loops: Loops) -> StageCut:
        """Return a cut whose boundaries are moved, and whose ranks take other plans if there are several, as long as
        that shortens the played step; `loops` says what fits."""
        path, plans = loops.path(cut), [one.plan for one in cut.stages]
        moves = sorted(loops.moves(len(path)), key=lambda move: (move[1] - move[0], move))[:MOST_MOVES]
        exchanges = [(rank, k) for rank in range(len(plans)) for k in range(len(loops.under)) if len(loops.under) > 1]
        best, stages = float(self.step_seconds([cut.stages])[0]), cut.stages
        for _ in range(MOST_ACTIONS // (len(self.timetable.rows) * max(1, len(moves) + len(exchanges)))):
            near = [(other, plans) for move in moves if (other := loops.moved(path, *move))]
            near += [(path, [*plans[:rank], k, *plans[rank + 1 :]]) for rank, k in exchanges if k != plans[rank]]
            near = [one for one in near if not loops.excess(*one)]
            if not near:
                break
            steps = self.step_seconds([loops.stages(*one, counted=False) for one in near])
            i = int(steps.argmin())
            if steps[i] > best * (1 - LEAST_GAIN):
                break
            best, (path, plans) = float(steps[i]), near[i]
            stages = loops.stages(path, plans)
        apart = loops.apart(path)
        step = cut.timing.step_seconds([one.seconds for one in stages], cut.micro_batches) + apart
        return replace(cut, stages=stages, step_seconds=step, shared_seconds=apart)
