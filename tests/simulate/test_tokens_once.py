"""Tokens that go once to a device with several of their experts: gradients in fp64 under any routing, and what is
sent."""

from __future__ import annotations

import pytest
import torch

from autopar import compiler
from autopar.cost.exchange import OF_TOKENS, devices_of_token
from autopar.ir.mesh import Mesh
from autopar.ops import autopar
from autopar.planner.spmd.plan import make_plan
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.rules.experts import ONCE
from autopar.simulate import step
from autopar.simulate.compare import verify_plan
from autopar.simulate.oracle import global_values
from tests.planner.planning import toy

from .test_experts import EXACT, HIDDEN, ROUTINGS, Mixture, exchanges, inputs

SLOW_LINK, SLOW_MEMORY = {"link": 1e6}, {"link": 1e9, "memory": 1e6}
FP64, PLACE = 8, 4


def planned(model, mesh: str, given, machine=SLOW_LINK, strategy: str = "expert"):
    captured = compiler.trace(model, given)
    return make_plan(
        captured, Mesh.parse(mesh), PlanOptions(toy(**machine), strategy=strategy, baselines=False)
    ), captured


def ways(plan, captured, targets=OF_TOKENS) -> set[str]:
    """Return how each dispatch and combine of tokens crosses the axis ep, or those of some `targets`."""
    nodes = [n for n in captured.graph.nodes if n.target in OF_TOKENS]
    assert len(nodes) == 4
    place = plan.mesh.names.index("ep")
    return {plan.sharding.nodes[n.name].choice[place] for n in nodes if n.target in targets}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("mesh", "strategy", "experts", "active"),
    [("ep=2", "expert", 5, 3), ("ep=4", "expert", 8, 3), ("ep=3", "expert", 8, 3), ("dp=2,ep=2", "expert+zero1", 6, 4),
     ("ep=2,tp=2", "expert+megatron_sp", 6, 4), ("ep=2,dp=2", "expert+fsdp", 4, 3)],
)  # fmt: skip
def test_gradients(mesh, strategy, experts, active, routing):
    model, given = Mixture(experts, active, routing), inputs(12 if mesh == "ep=3" else 8)
    plan, captured = planned(model, mesh, given, strategy=strategy)
    assert ONCE in ways(plan, captured)
    report = verify_plan(captured, plan, model, given)
    assert max(report.errors.values()) <= EXACT, (report.errors, report.diverging)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("active", [1, 2])
def test_micro_batches_send_rows_too(active):
    model, given = Mixture(4, active), inputs()
    captured = compiler.trace(model, given)
    options = PlanOptions(toy(link=1e6), strategy="expert", baselines=False, micro_batches=2)
    plan = make_plan(captured, Mesh.parse("ep=2"), options)
    assert any(c.kind == "all_to_all" for c in plan.collectives)
    report = verify_plan(captured, plan, model, given)
    assert max(report.errors.values()) <= EXACT, (report.errors, report.diverging)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", ["ep=2", "ep=4"])
def test_bytes_are_those_of_the_routing(mesh):
    """All ranks together send a row for each token and each other device that has some of its experts, four times;
    beside them for each row its weight, the gradient of that and the place of its token."""
    model, given, experts, active = Mixture(8, 3), inputs(32), 8, 3
    plan, captured = planned(model, mesh, given)
    assert ways(plan, captured) == {ONCE}
    values = global_values(captured, model, given)
    result = step.simulate_step(captured, plan, values)
    tokens = model.first(given[0]).reshape(-1, HIDDEN)
    which = model.router(tokens).softmax(-1).topk(active)[1]
    devices, here = plan.mesh.devices, torch.arange(len(tokens)) * plan.mesh.devices // len(tokens)
    owner = which * devices // experts
    goes = torch.zeros(len(tokens), devices, dtype=torch.bool).scatter_(1, owner, True)
    goes[torch.arange(len(tokens)), here] = False
    rows = int((owner != here.unsqueeze(1)).sum())
    wanted = 4 * int(goes.sum()) * HIDDEN * FP64 + rows * (2 * FP64 + PLACE)
    others = sum(c.wire_bytes for c in plan.collectives if c.kind != "all_to_all") * devices
    counts = (devices - 1) * (devices + experts + 2) * FP64  # of tokens, and of the rows of each expert
    assert sum(result.bytes_sent) - others - counts == pytest.approx(wanted, rel=1e-12)


def test_told_bytes_are_those_of_balanced_routing():
    """The bytes are those of many tokens that pick any three of eight experts; the plan tells what the program says."""
    plan, captured = planned(Mixture(8, 3), "ep=4", inputs(32))
    tokens = 32 * 3 / 4
    wanted = 4 * tokens * devices_of_token(8, 3, 4) * 3 / 4 * HIDDEN * FP64
    found = exchanges(plan, captured)
    of_tokens = [n.meta["collective"].wire_bytes for n in found if "tokens" in n.name]
    assert sum(of_tokens) == pytest.approx(wanted)
    told = sum(c.wire_bytes for c in plan.collectives if c.kind == "all_to_all")
    places = sum(n.meta["collective"].wire_bytes for n in found if "places" in n.meta["collective"].tensor)
    assert told == pytest.approx(sum(n.meta["collective"].wire_bytes for n in found) - places)


@pytest.mark.parametrize(("experts", "active", "devices"), [(8, 2, 4), (8, 3, 8), (9, 4, 2), (7, 2, 3), (4, 4, 2)])
def test_devices_of_a_token(experts, active, devices):
    """The closed form is the mean over all choices."""
    block = -(-experts // devices)
    choices = torch.combinations(torch.arange(experts), active)
    mean = sum(len({int(e) // block for e in choice}) for choice in choices) / len(choices)
    assert devices_of_token(experts, active, devices) == pytest.approx(mean)


def test_prices_choose():
    """Once where links are slow. Where memory is, sums do not come back once, which passes through it more often than
    rows do; but tokens go once, as their rows are made by the pass that sorts them."""
    model, given = Mixture(16, 2), inputs()
    assert ways(*planned(model, "ep=4", given, SLOW_LINK)) == {ONCE}
    slow = planned(model, "ep=4", given, SLOW_MEMORY)
    assert ways(*slow, {autopar.dispatch_tokens.default}) == {ONCE}
    assert ONCE not in ways(*slow, {autopar.combine_tokens.default})


def test_tokens_of_one_expert_are_rows():
    _, captured = planned(Mixture(4, 1), "ep=4", inputs())
    assert not [n for n in captured.graph.nodes if n.target in OF_TOKENS]
