"""Plans copy hot experts where that pays, hold memory for them, and say so."""

from __future__ import annotations

import pytest

import autopar
from autopar.api.entry import search
from autopar.errors import StrategyError
from autopar.planner.explain import explain_plan
from autopar.plans.expert_balance import ExpertBalance, LayerBalance
from autopar.plans.plan import Plan
from autopar.plans.routing import routing_lines
from autopar.view.report import report_page
from tests.planner.planning import toy
from tests.simulate.test_experts import Mixture, inputs

SKEWED = (9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)


def planned(load=1.0, hot: int | str = "auto", mesh: str = "ep=4", samples: int = 64, **options) -> Plan:
    options = dict(strategy="expert", hardware=toy(link=1e8), baselines=False, fixes=False) | options
    return autopar.plan(Mixture(8, 2), mesh, inputs(samples), expert_load=load, hot_experts=hot, **options)


def test_nothing_is_copied_under_balanced_routing():
    plan = planned()
    assert plan.hot_experts == 0 and plan.expert_copies is None and plan.hash == planned(hot=0).hash
    assert not {"hot_experts", "expert_copies"} & plan.to_json().keys() and "hot experts" not in str(plan)


@pytest.mark.parametrize("load", [1.5, 3.0, SKEWED])
def test_as_many_are_copied_as_make_a_step_fastest(load):
    plans = {hot: planned(load, hot) for hot in (0, 1, 2, 4)}
    chosen = planned(load)
    assert chosen.hot_experts > 0 and chosen.hash == plans[chosen.hot_experts].hash
    assert chosen.step_seconds == min(plan.step_seconds for plan in plans.values()) < plans[0].step_seconds
    assert chosen.routing.load < chosen.expert_copies.load


def test_shares_say_more_than_a_load():
    """That one expert alone has many rows: one copy is enough."""
    plan, of_load = planned(SKEWED), planned(2.5)
    assert plan.hot_experts == 1 < of_load.hot_experts
    assert plan.expert_copies.load == of_load.expert_copies.load == 2.5
    assert plan.routing.load == pytest.approx(9 / 16 + 4 * 2 / 16)


def test_matrices_that_are_larger_than_their_rows_are_not_copied():
    assert planned(1.5, samples=64).hot_experts > 0 == planned(1.5, samples=4).hot_experts


def test_a_measured_balance_is_a_load():
    balance = ExpertBalance(1.0, (LayerBalance("experts", 1, 100.0, 300),))
    assert planned(balance).hash == planned(3.0).hash != planned(1.0).hash


def test_memory_of_copies_is_planned():
    """A busiest device holds less rows, all hold copies; at worst there are more rows, but not all of them."""
    plain, copied = planned(3.0, 0), planned(3.0, 2)
    assert copied.peak_bytes < plain.peak_bytes and copied.memory["op workspace"] == copied.expert_copies.held_bytes
    matrix = 8 * 12 * 8
    assert copied.expert_copies.held_bytes == (2 + 2 * 2) * matrix
    assert copied.peak_bytes < copied.routing.worst_peak_bytes < plain.routing.worst_peak_bytes
    assert "hot_experts" not in plain.memory


@pytest.mark.parametrize("strategy", ["expert", "expert+megatron_sp", None])
@pytest.mark.parametrize("hot", [0, 1, 4])
def test_no_op_takes_less_than_no_time(hot, strategy):
    """Rows of hot experts are on no link; what sends nothing gains nothing by that, or no minimum cut is found."""
    problem = search(
        Mixture(8, 2), "ep=2,tp=2", inputs(16), expert_load=3.0, hot_experts=hot, strategy=strategy,
        hardware="h100", baselines=False, fixes=False,
    ).problem  # fmt: skip
    assert all((problem.choices(v.index).seconds >= 0).all() for v in problem.vertices if v.kind == "op")


def test_bytes_of_copies():
    """Forward, backward and for gradients of each product an all-reduce of the copies, in each micro-batch."""
    matrices = (8 * 12 + 6 * 8) * 8
    for micro_batches in (1, 2):
        copies = planned(3.0, 2, micro_batches=micro_batches).expert_copies
        assert copies.sent_bytes == pytest.approx(micro_batches * 3 * 2 * (3 / 4) * 2 * matrices)


def test_stages_have_copies_too():
    plan = planned(3.0, mesh="pp=2,ep=2", micro_batches=2, hot=1)
    assert plan.hot_experts == 1 and "hot experts" in str(plan)
    assert Plan.from_json(plan.to_json()) == plan


def test_what_the_text_says_and_the_file_keeps():
    plan = planned(3.0)
    text = str(plan)
    assert f"the {plan.hot_experts} experts with most rows of each layer are copied to all devices" in text
    assert "3.00 times the mean of the rows without" in text
    assert "if one device got all others of its group" in text
    assert Plan.from_json(plan.to_json()) == plan


def test_explanations_and_reports_say_it_too():
    options = {"strategy": "expert", "hardware": toy(link=1e8), "baselines": False, "fixes": False, "expert_load": 3.0}
    found = search(Mixture(8, 2), "ep=4", inputs(64), **options)
    wanted = routing_lines(found.plan)
    assert len(wanted) == 3 and str(explain_plan(found, "experts.down")).splitlines()[1:4] == wanted
    assert all(f"{line[0].upper()}{line[1:]}" in report_page(found) for line in wanted)


@pytest.mark.parametrize("hot", [-1, "some", True, 1.5, None])
def test_impossible_numbers(hot):
    with pytest.raises(StrategyError, match="cannot copy hot_experts"):
        planned(1.0, hot)


def test_copies_beside_a_capacity():
    """A capacity has its own answer to uneven rows; both at once are refused, and "auto" copies nothing."""
    with pytest.raises(StrategyError, match="leave out expert_capacity") as error:
        planned(1.2, 2, expert_capacity=1.25)
    assert "rows beyond expert_capacity=1.25 go in further rounds" in str(error.value)
    assert planned(1.2, expert_capacity=1.25).hot_experts == 0


@pytest.mark.parametrize("shares", [(), (1.0, -1.0), (0.0,) * 8, (float("nan"),) * 8])
def test_impossible_shares(shares):
    with pytest.raises(StrategyError, match="no shares of rows"):
        planned(shares)


def test_shares_of_another_number_of_experts():
    with pytest.raises(StrategyError, match="shares of 4 experts, and a layer has 8"):
        planned((1.0, 1.0, 1.0, 2.0))
    with pytest.raises(StrategyError, match="expert_load is 'x'"):
        planned(["x"])
