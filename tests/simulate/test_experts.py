"""Experts cut over an axis, the strategy `expert` alone and beside others: any routing, against the model itself in
fp64."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import nn

from autopar import compile as compile_
from autopar import compiler
from autopar.cost.compute import GROUPED, ComputeCost
from autopar.errors import StrategyError
from autopar.frontend.fake_parameters import forms_of
from autopar.ir.graph import operand
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ops import autopar
from autopar.planner.spmd.plan import make_plan
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.rules import rule_of, strategies
from autopar.rules.experts import ONCE
from autopar.rules.lookup import has_rows
from autopar.simulate import step
from autopar.simulate.compare import verify_plan
from autopar.simulate.oracle import global_values, one_device_step, relative_error
from tests.families import FAMILIES
from tests.helpers import gloo, mixture
from tests.planner.planning import toy

EXACT = 1e-10
HIDDEN = 8
ROUTINGS = {"balanced": lambda experts: torch.zeros(experts), "all to one": lambda experts: one_hot(experts, -1, 50.0),
            "one without tokens": lambda experts: one_hot(experts, 0, -50.0)}  # fmt: skip


def one_hot(experts: int, place: int, value: float) -> torch.Tensor:
    bias = torch.zeros(experts)
    bias[place] = value
    return bias


class Experts(nn.Module):
    """Two products of each row with the matrices of its expert."""

    def __init__(self, experts: int):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(experts, HIDDEN, 12) / 3)
        self.down = nn.Parameter(torch.randn(experts, 6, HIDDEN) / 3)

    def forward(self, rows, expert):
        gate, up = torch.bmm(rows.unsqueeze(1), self.gate_up[expert]).squeeze(1).chunk(2, -1)
        return torch.bmm((nn.functional.silu(gate) * up).unsqueeze(1), self.down[expert]).squeeze(1)


class Mixture(nn.Module):
    """A layer as Mixtral's with a loss: tokens (B, S, H) through the `active` experts that a router picks, between two
    linear layers."""

    def __init__(self, experts: int, active: int = 2, routing: str = "balanced", seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.active = active
        self.first, self.last = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 4)
        self.router = nn.Linear(HIDDEN, experts)
        self.router.bias.data = ROUTINGS[routing](experts)
        self.experts = Experts(experts)
        self.double()

    def forward(self, x):
        hidden = self.first(x)
        tokens = hidden.reshape(-1, HIDDEN)
        weights, which = self.router(tokens).softmax(-1).topk(self.active)
        rows, expert = tokens.repeat_interleave(self.active, 0), which.reshape(-1)
        y = self.experts(rows, expert)
        y = (y * weights.reshape(-1, 1)).view(len(tokens), self.active, HIDDEN).sum(1)
        return self.last(hidden + y.view_as(x)).square().mean()


def inputs(samples: int = 8, length: int = 3) -> tuple[torch.Tensor, ...]:
    return (torch.randn(samples, length, HIDDEN, dtype=torch.float64),)


def check(model: nn.Module, mesh: str, strategy: str, samples: int = 8, length: int = 3, **options):
    """Plan, simulate and compare one step; return the plan."""
    given = inputs(samples, length)
    plan, captured = step.plan_and_capture(
        model, mesh, given, hardware="cpu-gloo", baselines=False, strategy=strategy, **options
    )
    report = verify_plan(captured, plan, model, given)
    assert max(report.errors.values()) <= EXACT, (report.errors, report.diverging)
    return plan


def experts_axis(plan, name: str) -> str:
    """The axes that cut the experts of a parameter."""
    return " ".join(Layout.parse(plan.layouts[name], 3).dims[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("mesh", "strategy", "experts"),
    [
        ("ep=2", "expert", 3), ("ep=3", "expert", 8), ("ep=4", "expert", 4), ("ep=8", "expert", 8),
        ("dp=2,ep=2", "expert+zero1", 4), ("ep=2,tp=2", "expert+megatron_sp", 4), ("dp=2,ep=2", "expert+fsdp", 5),
        ("ep=2,dp=2", "expert", 4),
    ],
)  # fmt: skip
def test_gradients(mesh, strategy, experts, routing):
    samples = 9 if mesh == "ep=3" else 8
    plan = check(Mixture(experts, 2, routing), mesh, strategy, samples)
    assert experts_axis(plan, "experts.gate_up").split()[0] == experts_axis(plan, "experts.down").split()[0] == "ep"
    assert "ep" not in plan.layouts["router.weight"] or "zero" in strategy or "fsdp" in strategy


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(6))
def test_any_shapes(seed):
    print(f"seed {seed}")
    random = Random(seed)
    ways = random.choice([2, 3, 4])
    experts = random.choice([n for n in range(2, 10) if -(-n // ways) * (ways - 1) < n])
    model = Mixture(experts, random.choice([1, 2]), random.choice(list(ROUTINGS)), seed)
    check(model, f"ep={ways}", "expert", ways * random.choice([1, 2]), random.choice([1, 2, 5]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "mesh", "strategy"),
    [
        ("dbrx", "ep=2", "expert"), ("jetmoe", "ep=2,tp=2", "expert+megatron_sp"), ("dbrx", "ep=2,dp=2", "expert+fsdp"),
        ("jetmoe", "ep=4", "expert+zero1"), ("switch_transformers", "ep=2", "expert"), ("nllb-moe", "ep=2", "expert"),
    ],
)  # fmt: skip
def test_families_that_loop_over_experts(name, mesh, strategy):
    """They compute their routers in fp32."""
    torch.manual_seed(0)
    model, given = FAMILIES[name](4, 5)
    plan, captured = step.plan_and_capture(
        model, mesh, given, hardware="cpu-gloo", baselines=False, strategy=strategy
    )  # fmt: skip
    report = verify_plan(captured, plan, model, given)
    assert max(report.errors.values()) <= 1e-5, (report.errors, report.diverging)
    if name in ("dbrx", "jetmoe"):  # stacked
        assert all("ep:S(0)" in layout for key, layout in plan.layouts.items() if "experts.mlp" in key
                   or "_linear.weight" in key), plan.layouts  # fmt: skip


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_rows_of_every_layer_may_be_with_their_experts(name):
    """Layers are dispatched one after the other, and rules are asked for meanwhile."""
    captured = compiler.trace(*FAMILIES[name](4, 5))
    products = [node for node in captured.graph.nodes if node.target is autopar.grouped_mm.default]
    assert len(products) >= 8 or name == "mixtral" and len(products) == 4
    assert all(map(has_rows, products))


def test_fewer_rows_than_devices():
    check(Mixture(4, 1), "ep=4", "expert", 4, 1)


def test_the_axis_without_a_name_is_that_of_the_batch():
    plan = check(Mixture(4), "dp=2,tp=2", "expert+megatron_sp")
    assert experts_axis(plan, "experts.gate_up") == "dp"


@pytest.mark.parametrize("strategy", ["expert+megatron_sp", "expert+megatron_sp+zero1"])
@pytest.mark.parametrize(
    ("mesh", "up", "down"),
    [
        ("ep=2,tp=2", "ep:S(0) tp:S(0)", "ep:S(0) tp:S(0)"),  # folded: four devices of experts
        ("ep=2,tp=2", "ep:S(0) tp:S(2)", "ep:S(0) tp:S(1)"),  # expert-tensor parallelism
        ("dp=2,tp=2", "dp:S(0)", "dp:S(0)"),  # each expert on the two devices that share tensors elsewhere
        ("ep=3,tp=2", "ep:S(0) tp:S(0)", "ep:S(0) tp:S(0)"),
    ],
)  # fmt: skip
def test_tensor_axes_of_experts(mesh, up, down, strategy):
    """Beside tensor parallelism experts may be cut over its axis too, by expert or by their features, or be whole."""
    pins = {"experts.gate_up": up, "experts.down": down}
    samples = 9 if "3" in mesh else 8
    plan = check(Mixture(6, 2, "one without tokens"), mesh, strategy, samples, pin=pins)
    for name, wanted in pins.items():
        found, asked = Layout.parse(plan.layouts[name], 3), Layout.parse(wanted, 3)
        assert all(found.dim_of(axis) == asked.dim_of(axis) for axis in ("ep", "dp", "tp") if axis in wanted), found
    assert "tp:S(0)" in plan.layouts["first.weight"] + plan.layouts["first.bias"] + plan.layouts["last.weight"]


def test_adapters_of_stacked_experts():
    """The second factor has experts inside of a merged dim: it stays whole."""
    model, given = Mixture(4), inputs()
    adapters = mixture.with_adapters(model)
    captured = compiler.trace(model, given, None, forms_of(model), "fp32", adapters)
    plan = make_plan(captured, Mesh.parse("ep=2"), PlanOptions(toy(), strategy="expert", baselines=False))
    values = global_values(captured, model, given)
    wanted, found = one_device_step(captured, values), step.simulate_step(captured, plan, values)
    assert wanted.gradients and found.gradients.keys() == wanted.gradients.keys()
    for name, gradient in wanted.gradients.items():
        assert relative_error(found.gradients[name], gradient) <= EXACT, name
    whole = [name for name, layout in plan.layouts.items() if "experts" in name and "ep:S(0)" not in layout]
    assert len(whole) == 2 and all("lora_B" in name for name in whole), plan.layouts


def test_too_few_experts():
    with pytest.raises(StrategyError, match="no expert for every device"):
        check(Mixture(2), "ep=4", "expert")


def test_a_device_multiplies_the_rows_of_its_experts_alone(monkeypatch):
    """Experts 0 and 1 of 4 have the first two of five rows; the rows of another device stay zero."""
    x, weight, group = torch.randn(5, 3), torch.randn(4, 3, 2), torch.tensor([0, 1, 2, 3, 3])
    multiplied = []
    product = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out: multiplied.append(len(a)) or product(a, b, out=out))
    halves = [autopar.grouped_mm(x, weight[first : first + 2], group, first) for first in (0, 2)]
    assert multiplied == [1, 1, 1, 2]
    assert not halves[0][2:].any() and not halves[1][:2].any()
    torch.testing.assert_close(sum(halves), autopar.grouped_mm(x, weight, group))


def test_work_is_that_of_the_rows_of_a_devices_experts():
    _, captured = step.plan_and_capture(Mixture(4), "ep=2", inputs(), hardware="cpu-gloo", baselines=False)
    products = [n for n in captured.graph.nodes if n.target in GROUPED]
    assert len(products) == 6
    mesh, cost = Mesh.parse("ep=2"), ComputeCost(toy(launch=1e-15))
    for node in products:
        shapes = [tuple(a.meta["val"].shape) for a in node.all_input_nodes], [tuple(node.meta["val"].shape)]
        found = {s.choice: cost.seconds(node, s, mesh, 0.0) for s in strategies(rule_of(node), *shapes, mesh)}
        assert found[("g",)] == pytest.approx(found[("",)] / 2, rel=0.1)


def exchanges(plan, captured, rank: int = 0):
    """The nodes of a rank's program that send rows, and what they say that they send."""
    local = compiler.lower(captured, plan, rank).local
    return [n for n in local.graph.nodes if n.target is autopar.exchange_rows.default]


@pytest.mark.parametrize("ways", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_rows_are_sent_to_their_experts(ways):
    """Forward and back, and so do their gradients, and the rows once more for the gradient of the first matrices:
    T k d (P - 1) / P bytes of all devices each time; the plan tells no less than the program says."""
    tokens, active = 64 * 3, 1  # several a token: test_tokens_once.py
    model, given = Mixture(4, active), inputs(64)
    captured = compiler.trace(model, given)
    options = PlanOptions(toy(link=1e6), strategy="expert", baselines=False)
    plan = make_plan(captured, Mesh.parse(f"ep={ways}"), options)
    sent = [node.meta["collective"].wire_bytes for node in exchanges(plan, captured)]
    rows = tokens * active / ways * (ways - 1) / ways
    assert sent.count(rows * 8 * HIDDEN) == 5 and {*sent} <= {rows * 8 * HIDDEN, rows * 8}
    told = sum(c.wire_bytes for c in plan.collectives if c.kind == "all_to_all")
    report = verify_plan(captured, plan, model, given)
    assert max(report.errors.values()) <= EXACT
    assert told >= sum(sent)


class Layers(nn.Module):
    """Several mixtures one after the other."""

    def __init__(self, count: int, active: int):
        super().__init__()
        self.layers = nn.ModuleList(Mixture(4, active, seed=i) for i in range(count))

    def forward(self, x):
        return sum(layer(x) for layer in self.layers)


@pytest.mark.parametrize("active", [1, 2])
def test_every_layer_may_send_its_rows(active):
    """Rows between the products of each layer, forward and backward, may be where their experts are."""
    (x,) = inputs()
    captured = compiler.trace(Layers(3, active), (x,))
    products = [n for n in captured.graph.nodes if n.target in GROUPED]
    assert len(products) == 18 and all(has_rows(a) for n in products for a in (operand(n), operand(n, 2)))
    plan = make_plan(captured, Mesh.parse("ep=2"), PlanOptions(toy(link=1e6), strategy="expert", baselines=False))
    owned = [name for name, s in plan.sharding.nodes.items() if any(x.owned_axes for x in s.inputs)]
    assert {n.name for n in products} <= {*owned}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("active", [2, 1])
def test_no_row_is_lost_on_real_processes(active, routing):
    gloo.run(2, _on_processes, active, routing, seconds=200)


def _on_processes(rank: int, active: int, routing: str) -> None:
    model, given = Mixture(3, active, routing), inputs(4, 2)
    reference = Mixture(3, active, routing)
    reference(*given).backward()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    parallel = compile_(model, mesh, example_inputs=given, strategy="expert", hardware=toy(link=1e6))
    assert any(ONCE in node.choice for node in parallel.plan.sharding.nodes.values()) == (active > 1)
    parallel(*given).backward()
    wanted = dict(reference.named_parameters())
    for name, parameter in parallel.named_parameters():
        assert relative_error(parameter.grad.full_tensor(), wanted[name].grad) <= EXACT, name


@pytest.mark.sampled(1)
@pytest.mark.parametrize("bias", [0.0, 50.0, -50.0])
def test_halves_of_every_second_column_take_as_many_rows_as_come(bias):
    """GPT-OSS's gate: the backward of a slice with a step fills in columns of rows whose number run time says."""
    model, x = mixture.Mixture("gpt_oss", bias), torch.randn(6, 5, 16, dtype=torch.float64)
    captured = compiler.trace(model, (x,))
    values = global_values(captured, model, (x,))
    plan = make_plan(captured, Mesh.parse("ep=4"), PlanOptions(toy(), strategy="expert", baselines=False), "gpt_oss")
    assert plan.sharding.nodes["slice_backward"].outputs[0].owned_axes == ("ep",)
    found, wanted = step.simulate_step(captured, plan, values), one_device_step(captured, values)
    assert found.gradients.keys() == wanted.gradients.keys()
    for name, gradient in wanted.gradients.items():
        assert relative_error(found.gradients[name], gradient) < EXACT, name
