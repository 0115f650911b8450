"""Ranks find beside the steps that they did not call the same, and in the step nothing is sent for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn

from autopar._torch import c10d
from autopar.errors import DesyncError
from autopar.processes import agree, comparison, process_groups
from autopar.processes.call_log import CallLogs
from autopar.processes.causes import Cause
from autopar.processes.guarded import Guarded
from autopar.processes.watch import Watch

FORWARD, BACKWARD, WITHOUT = "forward", "backward", "forward without gradients"


class Ranks:
    """The ranks of one group in one process; `asked` counts the questions between them."""

    def __init__(self, world: int, monkeypatch):
        self.asked, self.watches = 0, [self._watch(rank, world) for rank in range(world)]
        monkeypatch.setattr(process_groups, "members", lambda name: list(range(world)))
        monkeypatch.setattr(process_groups, "release", lambda: None)
        graph = fx.Graph()
        started = graph.call_function(c10d.all_reduce.default, (graph.placeholder("x"), "sum", "group"))
        graph.output(graph.call_function(c10d.wait_tensor.default, (started,)))
        self.module = fx.GraphModule(nn.Module(), graph)

    def _watch(self, rank: int, world: int) -> Watch:
        watch = object.__new__(Watch)
        peers = SimpleNamespace(rank=rank, world=world, ask=lambda message, ranks: self._ask(rank, message, ranks))
        vars(watch).update(calls=0, step=1, last=[], logs=CallLogs(), running=None, inside=0, cause=None, peers=peers,
                           failed_at=None, record=lambda: None, record_file=None, begin_step=lambda: None,
                           heartbeat=SimpleNamespace(is_needed=False, mark=lambda *_: None))  # fmt: skip
        return watch

    def _ask(self, rank: int, message: dict, ranks) -> dict[int, dict]:
        self.asked += 1
        return {other: self.watches[other].logged(message) for other in ranks if other != rank}

    def said(self, of_first: dict) -> list[dict]:
        """Return what all say, given what the first one does."""
        return [watch.logged({key: True for key in of_first}) for watch in self.watches]

    def call(self, rank: int, *phases: str, run=lambda x: x) -> None:
        """Let a rank run graphs, of which `run` is what they do."""
        for phase in phases:
            Guarded(self.watches[rank], self.module, phase, "dp=4", run)(torch.ones(2))


@pytest.mark.parametrize(("alone", "skipped"), [
    ([FORWARD, FORWARD, BACKWARD], "called the forward graph once more"),
    ([FORWARD, WITHOUT, BACKWARD], "called the forward graph without gradients once more"),
])  # fmt: skip
def test_who_called_otherwise_is_found(alone, skipped, monkeypatch):
    ranks = Ranks(4, monkeypatch)
    for rank in range(4):
        ranks.call(rank, FORWARD, BACKWARD, FORWARD, BACKWARD)
    assert [comparison.look(watch) for watch in ranks.watches] == [None] * 4
    for rank in range(4):
        ranks.call(rank, *(alone if rank == 2 else [FORWARD, BACKWARD, FORWARD]))
    found = [comparison.look(watch) for watch in ranks.watches]
    assert found[0] is None and found[3] is None  # of ranks next to each other one is not rank 2
    assert [cause.ranks for cause in found[1:3]] == [[2], [2]] and skipped in found[1].what, found


def test_calls_ask_nobody(monkeypatch):
    ranks = Ranks(2, monkeypatch)
    ranks.call(0, FORWARD, BACKWARD)
    ranks.call(1, FORWARD, FORWARD)
    assert ranks.asked == 0
    assert comparison.look(ranks.watches[0]).ranks == [0, 1] and ranks.asked == 2


def test_a_rank_that_was_told_makes_no_further_call(monkeypatch):
    ranks = Ranks(2, monkeypatch)
    ranks.watches[0].cause = Cause("unlike", [1], "rank 1 skipped the backward graph")
    with pytest.raises(DesyncError, match="ranks did not call the same: rank 1 skipped the backward graph"):
        ranks.call(0, FORWARD)
    assert not ranks.watches[0].logs.groups or all(len(log.last) == 1 for log in ranks.watches[0].logs.groups.values())


def test_a_call_that_fails_before_its_collectives_may_be_made_again(monkeypatch):
    ranks = Ranks(2, monkeypatch)

    def fails(x):
        raise torch.OutOfMemoryError("CUDA out of memory")

    fails_first = Guarded(ranks.watches[0], ranks.module, FORWARD, "dp=4", fails)
    fails_first.code = fails.__code__
    with pytest.raises(torch.OutOfMemoryError):
        fails_first(torch.ones(2))
    ranks.call(0, FORWARD, BACKWARD)
    ranks.call(1, FORWARD, BACKWARD)
    assert comparison.look(ranks.watches[0]) is None


def test_where_all_ranks_meet_they_compare_before_they_go_on(monkeypatch):
    ranks = Ranks(3, monkeypatch)
    monkeypatch.setattr(agree, "_gather", lambda value: ranks.said(value))
    monkeypatch.setattr(agree.watch, "_current", ranks.watches[0])
    for rank in range(3):
        ranks.call(rank, FORWARD, BACKWARD)
    agree.check_alike()
    for rank in range(3):
        ranks.call(rank, *([FORWARD] if rank == 1 else [FORWARD, BACKWARD]), FORWARD)
    with pytest.raises(DesyncError, match="call 4 is the forward graph of step 1 on rank 1 .* rank 1 skipped") as error:
        agree.check_alike()
    assert error.value.ranks == (1,) and ranks.watches[0].cause.kind == "unlike"
