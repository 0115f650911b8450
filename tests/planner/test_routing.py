"""Plans assume a routing of experts, in prices, in memory as planned and at worst, and say so."""

from __future__ import annotations

from functools import cache

import pytest

from autopar import compiler
from autopar.api.entry import search
from autopar.cost.expert_load import load_of_rows
from autopar.cost.skew import Skew
from autopar.errors import StrategyError
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.planner.explain import explain_plan
from autopar.planner.spmd.plan import make_plan
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.plans.plan import Plan
from autopar.plans.text import routing_lines
from autopar.view.report import report_page
from tests.planner.planning import toy
from tests.simulate.test_experts import HIDDEN, Mixture, inputs


@cache
def captured_of(active: int):
    return compiler.trace(Mixture(8, active), inputs(64))


def planned(
    load: float, mesh: str = "ep=4", active: int = 2, strategy: str = "expert", capacity: float | None = None
) -> Plan:
    captured = captured_of(active)
    options = PlanOptions(toy(link=1e8), strategy=strategy, baselines=False, expert_load=load, expert_capacity=capacity)
    return make_plan(captured, Mesh.parse(mesh), options)


def test_the_busiest_device_is_priced():
    """With all rows on one of four devices, the plan is that of four times the products and exchanges."""
    balanced, unbalanced, all_on_one = (planned(load) for load in (1.0, 1.5, 1e9))
    assert balanced.step_seconds < unbalanced.step_seconds < all_on_one.step_seconds
    assert balanced.peak_bytes < unbalanced.peak_bytes < all_on_one.peak_bytes
    assert all_on_one.step_seconds == pytest.approx(planned(4.0).step_seconds)


def test_worst_memory_is_that_of_a_plan_for_the_worst():
    balanced, all_on_one = planned(1.0), planned(4.0)
    assert balanced.routing.worst_peak_bytes > balanced.peak_bytes
    assert all_on_one.routing.worst_peak_bytes == pytest.approx(all_on_one.peak_bytes)


def test_sent_and_gathered_bytes():
    """One row a token: each of five exchanges of rows sends 3 / 4 of a device's rows, gathering would send 3 times all
    of them; the experts' numbers and the weights' gradients are beside them."""
    plan = planned(1.0, active=1)
    rows, row_bytes = 64 * 3 / 4, HIDDEN * 8
    assert plan.routing.gathered_bytes == pytest.approx(4 * plan.routing.sent_bytes)
    assert 5 * rows * row_bytes * 3 / 4 <= plan.routing.sent_bytes <= 5.5 * rows * row_bytes * 3 / 4


def test_what_the_text_says_and_the_file_keeps():
    plan = planned(1.5)
    assert "the busiest device is assumed to get 1.50 times the mean of the rows" in str(plan)
    assert "if one device got all rows of its group" in str(plan) and "if all tokens were gathered" in str(plan)
    assert Plan.from_json(plan.to_json()).routing == plan.routing


def test_plans_without_owners_say_nothing():
    captured = captured_of(2)
    plan = make_plan(captured, Mesh.parse("dp=4"), PlanOptions(toy(), strategy="ddp", baselines=False))
    assert plan.routing is None and "experts:" not in str(plan)
    assert load_of_rows(Layout((("dp",), ())), plan.mesh, Skew(2.0)) == 1.0


@pytest.mark.parametrize("load", [0.5, float("inf"), float("nan")])
def test_impossible_loads(load):
    with pytest.raises(StrategyError, match="times the mean"):
        planned(load)


def test_explanations_and_reports_say_it_too():
    options = {"strategy": "expert", "hardware": toy(link=1e8), "baselines": False, "fixes": False}
    planned = search(Mixture(8, 2), "ep=4", inputs(64), **options)
    wanted = routing_lines(planned.plan)
    assert len(wanted) == 2 and str(explain_plan(planned, "experts.down")).splitlines()[1:3] == wanted
    assert "ep:S(0)" in str(explain_plan(planned, "experts.down"))
    assert all(f"{line[0].upper()}{line[1:]}" in report_page(planned) for line in wanted)


def test_devices_that_share_tensors_send_rows_of_their_own_tokens():
    """Beside tensor parallelism each of two devices sends half of the rows, to eight owners instead of four."""
    alone, folded = planned(1.0, active=1), planned(1.0, "ep=4,tp=2", 1, "expert+megatron_sp")
    assert folded.layouts["experts.gate_up"] == folded.layouts["experts.down"] == "ep:S(0) tp:S(0)"
    assert folded.routing.sent_bytes == pytest.approx(alone.routing.sent_bytes / 2 * (7 / 8) / (3 / 4))
    assert "tp" in folded.layouts["first.weight"]


def test_an_axis_of_experts_is_not_said_to_have_none():
    assert "no part of experts" not in str(planned(1.0, "ep=4,tp=2", strategy="expert+megatron_sp"))


def test_memory_of_a_capacity_and_of_the_worst_are_told_apart():
    """A plan has room for what devices take at a time and for a further round, which there is none of where a device
    takes all rows at once; how long it takes is as without."""
    plain = planned(1.0, active=1)
    plans = {capacity: planned(1.0, active=1, capacity=capacity) for capacity in (1.0, 1.25, 4.0)}
    assert plain.peak_bytes < plans[1.0].peak_bytes < plans[1.25].peak_bytes < plain.routing.worst_peak_bytes
    assert {plan.routing.worst_peak_bytes for plan in plans.values()} == {plain.routing.worst_peak_bytes}
    kept = 64 * 3 / 4 * 24  # of rows, for rounds of the backward
    assert plans[4.0].peak_bytes == plain.routing.worst_peak_bytes + kept
    assert {plan.step_seconds for plan in plans.values()} == {plain.step_seconds}
    text = str(plans[1.25])
    assert "a device takes at most 1.25 times the mean of the rows at a time, more in further rounds" in text
    assert "if one device got all rows of its group at once" in text
    assert Plan.from_json(plans[1.25].to_json()) == plans[1.25] and plans[1.25].hash != plans[1.0].hash
    assert "expert_capacity" not in plain.to_json()


def test_a_load_beyond_the_capacity():
    with pytest.raises(StrategyError, match="1.5 times the mean are assumed to come"):
        planned(1.5, capacity=1.25)
