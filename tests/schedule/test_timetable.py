"""A timetable plays as `play` does, for many durations at once."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.schedule import timetable as module
from autopar.schedule.catalogue import KINDS, make
from autopar.schedule.play import play
from autopar.schedule.timetable import Timetable

CASES = [("gpipe", 3, 4, 1), ("1f1b", 4, 7, 1), ("interleaved_1f1b", 2, 4, 3), ("zb_h1", 4, 6, 1), ("zbv", 3, 6, 2)]


@pytest.mark.parametrize("name, ranks, micro_batches, v", CASES)
@pytest.mark.parametrize("uneven", [False, True])
def test_the_last_actions_end_when_play_says(name, ranks, micro_batches, v, uneven, monkeypatch):
    monkeypatch.setattr(module, "MOST_NUMBERS", 700)  # so that variants are played a few at a time
    assert name in KINDS
    rng = np.random.default_rng(len(name) + ranks)
    schedule, variants = make(name, ranks, micro_batches, v), 9
    shares = tuple([1.0] * (micro_batches - 1) + [0.5]) if uneven else ()
    forward, input_, weight = (rng.integers(0, 9, (schedule.stages, variants)) / 4 for _ in range(3))
    transfer = rng.integers(0, 3, (schedule.stages - 1, variants)) / 4
    ends = Timetable(schedule, shares).ends(forward, input_, weight, transfer)
    for k in range(variants):
        played = play(schedule, forward[:, k], input_[:, k], weight[:, k], transfer[:, k], shares=shares)
        assert ends[:, k].tolist() == [own[-1] for own in played.ends]
