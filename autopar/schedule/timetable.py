"""Play a schedule for many durations of its stages at once: the rules of autopar/schedule/play.py for arrays.

The order in which actions can be looked at, each after those that it waits for, is the same for all durations: it is
found once, and each action is then a few operations on arrays of one number a variant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .actions import Action, Schedule
from .play import needs, play

MOST_NUMBERS = 4_000_000  # ends of actions that are kept at once; of more variants some are played after the others


class _Row(NamedTuple):
    """An action. `needs`: what it waits for, as (row, the border of two stages between, -1 if they are on one rank)."""

    rank: int
    kind: str
    stage: int
    share: float
    needs: tuple[tuple[int, int], ...]


class Timetable:
    """The actions of a schedule in an order in which they can be played. `shares`: by micro-batch, what it takes of the
    seconds of its stages, all of them unless given. Raise ScheduleError as `play` does."""

    def __init__(self, schedule: Schedule, shares: Sequence[float] = ()):
        self.schedule, played = schedule, play(schedule)  # in which all actions take time: who is waited for is earlier
        starts = [
            (start, rank, action)
            for rank, (order, own) in enumerate(zip(schedule.orders, played.starts))
            for start, action in zip(own, order)
        ]
        rank_of, numbers = schedule.rank_of_stage, dict[Action, int]()
        self.rows: list[_Row] = []
        for _, rank, action in sorted(starts):
            waits = [
                (numbers[need], -1 if rank_of[need.stage] == rank else min(need.stage, action.stage))
                for need in needs(action, schedule.stages)
            ]
            share = shares[action.micro_batch] if shares else 1.0
            self.rows.append(_Row(rank, action.kind, action.stage, share, tuple(waits)))
            numbers[action._replace(kind="I") if action.kind == "B" else action] = len(self.rows) - 1

    def ends(self, forward: np.ndarray, input_: np.ndarray, weight: np.ndarray, transfer: np.ndarray) -> np.ndarray:
        """Return (ranks, variants): when the last action of each rank ends. Arguments are (stages, variants) seconds of
        a micro-batch's forward and of the two parts of its backward, and (stages - 1, variants) of its transfers."""
        variants, most = forward.shape[1], max(1, MOST_NUMBERS // len(self.rows))
        if variants > most:
            pieces = [slice(first, first + most) for first in range(0, variants, most)]
            given = (forward, input_, weight, transfer)
            return np.concatenate([self.ends(*(one[:, piece] for one in given)) for piece in pieces], axis=1)
        seconds = {"F": forward, "I": input_, "W": weight, "B": input_ + weight}
        clock = np.zeros((self.schedule.ranks, variants))
        ended = np.zeros((len(self.rows), variants))
        shares = {row.share for row in self.rows}
        taken = {share: {kind: share * each for kind, each in seconds.items()} for share in shares}
        sent = {share: share * transfer for share in shares}
        for at, (rank, kind, stage, share, waits) in enumerate(self.rows):
            start = clock[rank]
            for row, border in waits:
                start = np.maximum(start, ended[row] if border < 0 else ended[row] + sent[share][border])
            clock[rank] = ended[at] = start + taken[share][kind][stage]
        return clock
