"""Orders of chunks of rows: forwards in order, backwards in reverse, idle as a closed formula says, few in flight."""

from __future__ import annotations

import random

import pytest

from autopar.errors import ScheduleError
from autopar.schedule.catalogue import make
from autopar.schedule.play import check, play

ONE_STAGE = ("1f1b", "gpipe", "zb_h1", "zb_h2", "naive")


@pytest.mark.parametrize("name", ONE_STAGE)
def test_any_rows_in_any_chunks(name):
    seed = random.randrange(10**6)
    draw = random.Random(seed)
    for _ in range(20):
        ranks, rows, chunks = draw.randint(1, 6), draw.randint(1, 5), draw.randint(2, 6)
        note = f"seed {seed}: {name}, {ranks} ranks, {rows} rows of {chunks}"
        schedule = make(name, ranks, rows * chunks, row_chunks=chunks)
        check(schedule)
        for order in schedule.orders:
            for row in range(rows):
                own = range(row * chunks, (row + 1) * chunks)
                forwards = [a.micro_batch for a in order if a.kind == "F" and a.micro_batch in own]
                for kinds in ("BI", "W"):
                    backwards = [a.micro_batch for a in order if a.kind in kinds and a.micro_batch in own]
                    assert not backwards or backwards == forwards[::-1] == sorted(own, reverse=True), note


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_idle_time_is_that_of_as_many_micro_batches(name):
    """(p - 1) of m + p - 1: one row in c chunks waits as c rows do."""
    for ranks in (2, 3, 8):
        for rows, chunks in ((1, 2), (1, 16), (3, 4)):
            m = rows * chunks
            played = play(make(name, ranks, m, row_chunks=chunks), 1.0, 1.0, 1.0)
            assert played.bubble == pytest.approx((ranks - 1) / (m + ranks - 1))


def test_chunks_in_flight():
    """A rank holds as many chunks after a row's first as the row has, beside what 1F1B holds: each a part of a row."""
    for ranks, rows, chunks in ((2, 4, 4), (4, 4, 2), (4, 1, 8)):
        played = play(make("1f1b", ranks, rows * chunks, row_chunks=chunks), activation=1 / chunks)
        wanted = [min(rows * chunks, ranks - rank + chunks - 1) / chunks for rank in range(ranks)]
        assert [*played.peaks] == pytest.approx(wanted)


def test_several_stages_a_rank_are_refused():
    with pytest.raises(ScheduleError, match="one stage a rank") as error:
        make("interleaved_1f1b", 2, 8, row_chunks=4)
    assert "1f1b" in str(error.value)
