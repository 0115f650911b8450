"""Backwards that add to sums, and what a rank may let go of: without processes."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.api import entry as api
from autopar.compiler import lower_pipeline
from autopar.ir.graph import output_node
from autopar.runtime.pipeline_backward import adding
from autopar.runtime.pipeline_engine import sent_before
from autopar.schedule import KINDS, Action, make

from . import tiny


@pytest.mark.parametrize("rank", [0, 1])
def test_a_gradient_is_added_to_its_sum(rank):
    model, batch = tiny.gpt2()
    plan = autopar.plan(model, "pp=2", batch, hardware="cpu-gloo", baselines=False, schedule="1f1b", micro_batches=2)
    (program,) = lower_pipeline(api.trace(model, batch), plan, rank).stages.values()
    roles = output_node(program.backward.graph).meta["roles"]
    following, values = adding(program.backward), []
    torch.manual_seed(0)
    for node in program.backward.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            make_one = torch.randn if value.is_floating_point() else torch.zeros
            values.append(make_one(value.shape, dtype=value.dtype))
    first = [t.clone() for t in program.backward(*values)]
    sums = [t.clone() for t, role in zip(first, roles) if role.kind == "gradient"]
    results = following(*values, *sums)
    places = iter(sums)
    for role, once, result in zip(roles, first, results, strict=True):
        if role.kind == "gradient":
            assert result.data_ptr() == next(places).data_ptr(), role
            torch.testing.assert_close(result, once + once, equal_nan=True, msg=role.name)
        else:
            torch.testing.assert_close(result, once, equal_nan=True, msg=role.name)
    nodes = list(following.graph.nodes)
    added = [at for at, n in enumerate(nodes) if n.target is torch.ops.aten.add_.Tensor]
    assert len(added) == len(sums) and all(nodes[at].args[1] is nodes[at - 1] for at in added)


@pytest.mark.parametrize("name", KINDS)
def test_what_was_sent_is_let_go_of_once_and_after_it_was_taken(name):
    schedule = make(name, 4, 8)
    last = schedule.stages - 1
    for rank, order in enumerate(schedule.orders):
        found = sent_before(schedule, rank)
        let_go = [sent for taken in found.values() for sent in taken]
        assert len(let_go) == len(set(let_go))
        places = {action._replace(kind="B") if action.kind == "I" else action: at for at, action in enumerate(order)}
        for action, taken in found.items():
            for sent in taken:
                assert places[sent] < places[action], (name, rank, str(sent), str(action))
                there = sent.stage + (1 if sent.kind == "F" else -1)
                assert 0 <= there <= last and schedule.rank_of_stage[there] != rank


def test_one_forward_one_backward_keeps_what_is_in_flight():
    schedule = make("1f1b", 4, 16)
    for rank in range(3):
        found, sent, most = sent_before(schedule, rank), set(), 0
        for action in schedule.orders[rank]:
            sent -= {*found.get(action, ())}
            sent |= {action} if action.kind == "F" else set()
            most = max(most, sum(s.kind == "F" for s in sent))
        assert most <= 4 - rank + 1, (rank, most)
    assert Action("F", 0, 0) in sent_before(schedule, 0)[Action("B", 0, 0)]
