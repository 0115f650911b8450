"""Programs of further rounds: where they stand, what they read, and what cannot be done in rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar import compiler
from autopar.errors import VerifyError
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ops import autopar
from autopar.passes.distribute.add_rounds import add_rounds
from autopar.passes.distribute.localize import localize
from autopar.planner.spmd.plan import make_plan
from autopar.planner.spmd.plan_options import PlanOptions

from ..planner.planning import toy
from ..simulate.test_experts import Mixture, inputs

IN_ROUNDS = autopar.in_rounds.default


@pytest.fixture(scope="module")
def planned():
    captured = compiler.trace(Mixture(4, 2), inputs())
    return captured, make_plan(captured, Mesh.parse("ep=2"), PlanOptions(
        toy(link=1e8), strategy="expert", baselines=False, expert_capacity=1.0
    ))  # fmt: skip


def test_one_op_a_phase_stands_between_the_first_round_and_its_readers(planned):
    captured, plan = planned
    local = compiler.lower(captured, plan, 0, check=True).local
    forward, backward = (node for node in local.graph.nodes if node.target is IN_ROUNDS)
    assert (forward.meta["phase"], backward.meta["phase"]) == ("forward", "backward")
    for made in (forward, backward):
        for result in made.args[1]:
            written = [user for user in result.users if user is not made]
            assert result.name.endswith("_of_first_round") and len(result.users) == 2
            assert [user.target for user in written] == [autopar.written.default]
    assert len(forward.args[1]) == 1 and len(backward.args[1]) == 4  # rows and weights of rows, two stacks of experts
    assert backward.args[0].count("grouped_mm.default") == forward.args[0].count("grouped_mm.default") + 2


def test_without_a_capacity_there_is_none(planned):
    captured, plan = planned
    local = compiler.lower(captured, replace(plan, expert_capacity=None), 0, check=True).local
    new = {IN_ROUNDS, autopar.round_rows.default, autopar.counts_in_rounds.default, autopar.place_rows.default}
    assert not [node for node in local.graph.nodes if node.target in new]


def test_what_needs_all_rows_at_once_is_refused(planned):
    captured, plan = planned
    local = localize(captured.graph_module, plan.sharding, 0, expert_capacity=1.0)
    rows = next(node for node in local.graph.nodes if node.target is autopar.grouped_mm.default)
    with local.graph.inserting_after(rows):
        largest = local.graph.call_function(torch.ops.aten.amax.default, (rows, [0]))
    largest.meta = {"val": rows.meta["val"].amax(0), "phase": "forward", "layout": Layout(((),), (("ep", "max"),))}
    with pytest.raises(VerifyError, match="needs the rows of experts of all rounds at once"):
        add_rounds(local)
