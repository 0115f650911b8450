import json

import pytest

from autopar.errors import ScheduleError
from autopar.schedule import KINDS, Action, Schedule, make


def test_an_action_reads_as_torch_writes_it():
    from torch.distributed.pipelining.schedules import _Action

    for kind in "FBIW":
        action = Action(kind, 12, 3)
        torchs = _Action.from_str(str(action))
        assert (torchs.stage_index, torchs.computation_type.value, torchs.microbatch_index) == (12, kind, 3)
        assert Action.parse(repr(torchs)) == action


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2F0 ", "-1F0", "2SEND_F0", None])
def test_a_text_that_is_no_action(text):
    with pytest.raises(ScheduleError, match="as an action"):
        Action.parse(text)


def test_the_stages_of_a_rank():
    looped, v = make("interleaved_1f1b", 3, 3, 2), make("zbv", 3, 3)
    assert [looped.stages_of(rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]
    assert [v.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert (v.stages, v.stages_per_rank) == (6, 2)


def test_which_schedules_split_the_backward():
    whole = {name for name in KINDS if not make(name, 2, 4).splits_backward}
    assert whole == {"naive", "gpipe", "1f1b", "interleaved_1f1b"}


def test_the_text_is_one_line_a_rank():
    assert str(make("1f1b", 2, 2)).splitlines() == [
        "1f1b: 2 ranks, 2 stages, 2 micro-batches",
        "rank 0: 0F0 0F1 0B0 0B1",
        "rank 1: 1F0 1B0 1F1 1B1",
    ]


@pytest.mark.parametrize("name", KINDS)
def test_json_round_trip(name):
    schedule = make(name, 3, 5)
    assert Schedule.from_json(schedule.to_json()) == schedule


def changed(**fields):
    return json.dumps({**json.loads(make("1f1b", 2, 2).to_json()), **fields})


@pytest.mark.parametrize("text, message", [
    ("{", "not JSON"),
    ("[]", "version 1"),
    (changed(version=2), "version 1"),
    (changed(name=3), "'name'"),
    (changed(micro_batches=True), "'micro_batches'"),
    (changed(rank_of_stage=[0, 2]), "'rank_of_stage'"),
    (changed(rank_of_stage=[0, "1"]), "'rank_of_stage'"),
    (changed(orders=[]), "'orders'"),
    (changed(orders=[["0F0"]]), "'orders'"),
    (changed(orders=["0F0 0Q0", ""]), "'0Q0'"),
])  # fmt: skip
def test_a_file_that_is_no_schedule(text, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_json(text)
