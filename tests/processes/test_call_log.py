"""Tests of what a rank keeps of its calls, and whether two ranks called the same."""

from __future__ import annotations

from autopar.processes.call_log import KEPT, CallLogs, packed, unpacked
from autopar.processes.unlike import disagreeing

MESH, TP, DP = "dp=2,tp=2", (0, 1), (0, 2)


def _logs(*calls: bytes) -> CallLogs:
    logs = CallLogs()
    (log,) = logs.of(MESH, [TP], is_forward=True)
    for call in calls:
        log.add(call)
    return logs


def disagree(mine: dict, theirs: dict) -> bool:
    return disagreeing({0: {"digests": mine}, 1: {"digests": theirs}}) is not None


def test_ranks_disagree_from_the_first_other_call_on():
    """A rank that is only further than another has called the same; one with another past has not, whatever follows."""
    mine = _logs(b"forward", b"backward").last_calls()
    assert not disagree(mine, _logs(b"forward").last_calls()) and not disagree(mine, {})
    assert not disagree(mine, _logs(*[b"forward", b"backward"] * 9).last_calls())
    assert disagree(mine, _logs(b"forward", b"forward").last_calls())
    assert disagree(mine, _logs(b"forward", b"forward", *[b"forward", b"backward"] * 9).last_calls())
    long, shifted = [b"forward", b"backward"] * KEPT, [b"forward", *[b"forward", b"backward"] * KEPT]
    assert disagree(_logs(*long).last_calls(), _logs(*shifted).last_calls())


def test_groups_that_a_rank_does_not_share_are_not_compared():
    mine, theirs = CallLogs(), CallLogs()
    mine.of(MESH, [TP], is_forward=True)[0].add(b"forward")
    theirs.of(MESH, [DP], is_forward=True)[0].add(b"another")
    assert not disagree(mine.last_calls(), theirs.last_calls())


def test_a_call_that_is_taken_back_was_none():
    logs = _logs(b"forward", b"forward")
    logs.groups[MESH, TP].take_back()
    logs.groups[MESH, TP].add(b"backward")
    assert logs.last_calls() == _logs(b"forward", b"backward").last_calls()


def test_a_backward_counts_where_forwards_meet_and_a_step_everywhere():
    logs = CallLogs()
    (forward,), (backward,) = logs.of(MESH, [TP], is_forward=True), logs.of(MESH, [DP], is_forward=False)
    assert logs.of_backward(MESH, []) == [forward] and logs.of_backward(MESH, [backward]) == [backward, forward]
    assert logs.of_backward(MESH, [forward]) == [forward]
    other = CallLogs()
    other.of(MESH, [TP, DP], is_forward=True)
    logs.step({MESH}, has_gradients=True)
    other.step({MESH}, has_gradients=False)
    assert [log.last[-1][0] for log in logs.groups.values()] == [1, 1] and disagree(
        logs.last_calls(), other.last_calls()
    )


def test_what_is_called_on_one_mesh_says_nothing_of_another_ones_groups():
    logs = CallLogs()
    (flat,) = logs.of("dp=4", [(0, 1, 2, 3)], is_forward=True)
    (stage,) = logs.of("pp=2,dp=2", [TP], is_forward=False)
    assert logs.of_backward("pp=2,dp=2", [stage]) == [stage] and logs.of_backward("dp=4", []) == [flat]
    logs.step({"pp=2,dp=2"}, has_gradients=True)
    assert [log.last[-1][0] for log in (flat, stage)] == [0, 1]


def test_packed_calls_come_back():
    calls = [(7, 1, "forward"), (8, 1, "backward"), (9, 2, "forward")]
    assert unpacked(packed(calls)) == {7: (1, "forward"), 8: (1, "backward"), 9: (2, "forward")}
