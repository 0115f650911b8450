"""Experts that take a capacity of rows at a time: gradients in fp64 under any routing, and how many rows a device gets
in each round."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import nn

from autopar import compiler
from autopar.errors import StrategyError, VerifyError
from autopar.frontend.fake_parameters import forms_of
from autopar.ir.layout import chunk
from autopar.ir.mesh import Mesh
from autopar.ops import autopar
from autopar.ops.capped_rows import limit_of
from autopar.planner.spmd.plan import make_plan
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.rules.experts import ONCE
from autopar.simulate import collectives, step
from autopar.simulate.compare import verify_plan
from autopar.simulate.oracle import global_values, one_device_step, relative_error
from tests.helpers import mixture
from tests.planner.planning import toy

from .test_experts import EXACT, HIDDEN, ROUTINGS, Mixture, check, inputs

SENDS, PICKS, MIXED = {"link": 1e8}, {"link": 1e9, "memory": 1e6}, {"link": 1e7, "memory": 1e8}


def planned(model, mesh: str, given, capacity: float | None, machine=SENDS, strategy="expert", **options):
    captured = compiler.trace(model, given)
    asked = PlanOptions(toy(**machine), strategy=strategy, baselines=False, expert_capacity=capacity, **options)
    return make_plan(captured, Mesh.parse(mesh), asked), captured


def programs(plan, captured, rank: int = 0) -> list[str]:
    """The programs of further rounds that a rank has."""
    local = compiler.lower(captured, plan, rank).local
    return [str(n.args[0]) for n in local.graph.nodes if n.target is autopar.in_rounds.default]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("mesh", "strategy", "experts", "active"),
    [
        ("ep=2", "expert", 3, 2), ("ep=3", "expert", 8, 2), ("ep=4", "expert", 4, 1), ("ep=8", "expert", 8, 2),
        ("dp=2,ep=2", "expert+zero1", 4, 2), ("ep=2,tp=2", "expert+megatron_sp", 4, 2),
        ("dp=2,ep=2", "expert+fsdp", 5, 2), ("ep=2,dp=2", "expert", 4, 1),
    ],
)  # fmt: skip
def test_gradients(mesh, strategy, experts, active, routing):
    plan = check(
        Mixture(experts, active, routing), mesh, strategy, 9 if mesh == "ep=3" else 8, expert_capacity=1.0
    )  # fmt: skip
    assert plan.expert_capacity == 1.0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("machine", [SENDS, PICKS, MIXED])
def test_however_rows_get_there(machine, routing):
    """Sent, picked out of all, and some of both; where nothing is sent on the way, a device makes rounds by itself."""
    model, given = Mixture(8, 2, routing), inputs(64)
    plan, captured = planned(model, "ep=4", given, 1.25, machine)
    report = verify_plan(captured, plan, model, given)
    assert max(report.errors.values()) <= EXACT, (report.errors, report.diverging)
    assert len(programs(plan, captured)) == 2


def drawn_mixture(random: Random, seed: int) -> tuple[Mixture, str, str, int]:
    """A layer of any shape and routing, a mesh, a strategy of experts for it, and how many devices share them."""
    ways, other = random.choice([2, 3, 4]), random.choice(["", "dp=2,", "tp=2,"])
    experts = random.choice([n for n in range(2, 10) if -(-n // ways) * (ways - 1) < n])
    model = Mixture(experts, random.choice([1, 2]), random.choice(list(ROUTINGS)), seed)
    strategy = random.choice({"": ["expert"], "dp=2,": ["expert", "expert+zero1", "expert+fsdp"]}.get(
        other, ["expert+megatron_sp", "expert+megatron_sp+zero1"]
    ))  # fmt: skip
    return model, f"ep={ways},tp=2" if other == "tp=2," else f"{other}ep={ways}", strategy, ways


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(8))
def test_any_shapes(seed):
    print(f"seed {seed}")
    random = Random(seed)
    model, mesh, strategy, ways = drawn_mixture(random, seed)
    samples, capacity = 2 * ways * random.choice([1, 2]), random.choice([1.0, 1.1, 1.7, 3.0])
    check(model, mesh, strategy, samples, random.choice([2, 4]), expert_capacity=capacity)


@pytest.mark.parametrize("strategy", ["expert+megatron_sp", "expert+megatron_sp+zero1"])
@pytest.mark.parametrize(
    ("mesh", "up", "down"),
    [
        ("ep=2,tp=2", "ep:S(0) tp:S(0)", "ep:S(0) tp:S(0)"), ("ep=2,tp=2", "ep:S(0) tp:S(2)", "ep:S(0) tp:S(1)"),
        ("dp=2,tp=2", "dp:S(0)", "dp:S(0)"),
    ],
)  # fmt: skip
def test_tensor_axes_of_experts(mesh, up, down, strategy):
    pins = {"experts.gate_up": up, "experts.down": down}
    check(Mixture(6, 2, "all to one"), mesh, strategy, expert_capacity=1.0, pin=pins)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("down", ["ep:S(0) tp:S(1)", "ep:S(0) tp:S(2)"])
def test_sums_over_other_axes_between_products(down, routing):
    """Devices that share experts add up what they made of some features each, in every round."""
    model, given = Mixture(6, 2, routing), inputs(4, 1)
    pins = {"experts.gate_up": "ep:S(0) tp:S(1)", "experts.down": down}
    plan, captured = planned(model, "ep=2,tp=2", given, 1.0, strategy="expert+megatron_sp", pin=pins)
    report = verify_plan(captured, plan, model, given)
    assert max(report.errors.values()) <= EXACT, (report.errors, report.diverging)
    assert all("all_reduce" in program for program in programs(plan, captured))


class Centred(Mixture):
    """Takes the mean of all rows off between the products of experts."""

    def forward(self, x):
        tokens = self.first(x).reshape(-1, HIDDEN)
        weights, which = self.router(tokens).softmax(-1).topk(1)
        rows, expert = tokens, which.reshape(-1)
        rows = torch.bmm(rows.unsqueeze(1), self.experts.gate_up[expert]).squeeze(1)
        rows = rows - rows.mean(0, keepdim=True)
        rows = torch.bmm(rows[:, :6].unsqueeze(1), self.experts.down[expert]).squeeze(1)
        return self.last(x + (rows * weights).view_as(x)).square().mean()


@pytest.mark.parametrize("routing", ROUTINGS)
def test_rows_that_come_back_between_products(routing):
    """An op that needs all rows stands between two programs, each of which has rounds of its own."""
    model, given = Centred(4, 1, routing), inputs(16)
    plan, captured = planned(model, "ep=4", given, 1.0)
    report = verify_plan(captured, plan, model, given)
    assert max(report.errors.values()) <= EXACT, (report.errors, report.diverging)
    assert len(programs(plan, captured)) == 4


@pytest.mark.parametrize("mesh", ["dp=2,ep=2", "ep=2,tp=2"])
def test_gradients_are_still_added_up_in_place(mesh):
    """Rounds leave the memory of a gradient to the all-reduce over other devices, as nothing else reads it."""
    strategy = "expert+megatron_sp" if "tp" in mesh else "expert"
    found = []
    for capacity in (None, 1.0):
        plan, captured = planned(Mixture(4, 1), mesh, inputs(), capacity, strategy=strategy)
        graph = compiler.lower(captured, replace(plan, bucket_bytes=0.0), 0).local.graph
        reduced = [n for n in graph.nodes if "all_reduce" in str(n.target)]
        found.append(sorted(str(n.target) for n in reduced))
    assert found[0] == found[1] and any("all_reduce_" in target for target in found[0])


def test_fewer_rows_than_devices():
    check(Mixture(4, 1, "all to one"), "ep=4", "expert", 4, 1, expert_capacity=1.0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [
    dict(micro_batches=2), dict(mesh="pp=2,ep=2", micro_batches=2),
    dict(mesh="pp=2,ep=2", micro_batches=4, schedule="zb-h1"),
])  # fmt: skip
def test_micro_batches_and_stages(options):
    check(Mixture(4, 2, "all to one"), options.pop("mesh", "ep=2"), "expert", expert_capacity=1.0, **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("bias", [0.0, 50.0, -50.0])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_layers_of_transformers(kind, bias):
    """GPT-OSS's have biases, whose gradients are sums over rows too, and fill in every second column of rows."""
    model, given = mixture.Mixture(kind, bias), (torch.randn(6, 5, 16, dtype=torch.float64),)
    plan, captured = planned(model, "ep=4", given, 1.0)
    values = global_values(captured, model, given)
    found, wanted = step.simulate_step(captured, plan, values), one_device_step(captured, values)
    assert found.gradients.keys() == wanted.gradients.keys()
    for name, gradient in wanted.gradients.items():
        assert relative_error(found.gradients[name], gradient) < EXACT, name


class Blocks(nn.Module):
    """Several mixtures one after the other, with a loss that has a term for balanced routing in each."""

    def __init__(self, experts: int, active: int, routing: str):
        super().__init__()
        self.layers = nn.ModuleList(Block(experts, active, routing, seed) for seed in range(3))

    def forward(self, x):
        balance = 0.0
        for layer in self.layers:
            x, more = layer(x)
            balance = balance + more
        return x.square().mean() + 0.1 * balance


class Block(Mixture):
    def forward(self, x):
        tokens = self.first(x).reshape(-1, HIDDEN)
        probabilities = self.router(tokens).softmax(-1)
        weights, which = probabilities.topk(self.active)
        y = self.experts(tokens.repeat_interleave(self.active, 0), which.reshape(-1))
        y = (y * weights.reshape(-1, 1)).view(len(tokens), self.active, HIDDEN).sum(1)
        chosen = nn.functional.one_hot(which, probabilities.shape[-1]).sum(1).double()
        return x + y.view_as(x), (chosen.mean(0) * probabilities.mean(0)).sum()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_recomputed_blocks_with_a_balance_loss(recompute, routing):
    model, given = Blocks(4, 2, routing), inputs()
    plan, captured = planned(model, "ep=4", given, 1.0, recompute=recompute)
    assert len(plan.recomputed) == (3 if recompute == "full" else 0)
    report = verify_plan(captured, plan, model, given)
    assert max(report.errors.values()) <= EXACT, (report.errors, report.diverging)
    assert len(programs(plan, captured)) == 6


@pytest.mark.parametrize("routing", ROUTINGS)
def test_adapters_of_stacked_experts(routing):
    model, given = Mixture(4, 2, routing), inputs()
    adapters = mixture.with_adapters(model)
    captured = compiler.trace(model, given, None, forms_of(model), "fp32", adapters)
    asked = PlanOptions(toy(), strategy="expert", baselines=False, expert_capacity=1.0)
    plan, values = make_plan(captured, Mesh.parse("ep=2"), asked), global_values(captured, model, given)
    wanted, found = one_device_step(captured, values), step.simulate_step(captured, plan, values)
    assert wanted.gradients and found.gradients.keys() == wanted.gradients.keys()
    for name, gradient in wanted.gradients.items():
        assert relative_error(found.gradients[name], gradient) <= EXACT, name


@pytest.fixture
def received(monkeypatch) -> list[tuple[int, int]]:
    """(rank in its group, rows) of every exchange of rows that is made, in order."""
    found: list[tuple[int, int]] = []
    exchange = collectives._exchange

    def counted(members):
        results, sent = exchange(members)
        if members[0].target is autopar.exchange_rows.default:
            found.extend((rank, len(result)) for rank, result in enumerate(results))
        return results, sent

    monkeypatch.setattr(collectives, "_exchange", counted)
    return found


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("capacity", [1.0, 1.5])
@pytest.mark.parametrize("ways", [2, 4])
def test_no_device_gets_more_at_a_time(received, ways, capacity, routing):
    """In each round at most the limit of each pair. As many rounds are made as the fullest pair needs, one where it is
    within the limit."""
    model, given = Mixture(8, 1, routing), inputs(16)
    plan, captured = planned(model, f"ep={ways}", given, capacity)
    values = global_values(captured, model, given)
    step.simulate_step(captured, plan, values)
    rows = 16 * 3 // ways
    limit = limit_of(rows, ways, capacity)
    assert limit * ways <= capacity * rows + ways
    assert max(count for _, count in received) <= limit * ways
    which = model.router(model.first(given[0]).reshape(-1, 8)).argmax(-1).view(ways, rows)
    owned = [slice(*chunk(8, ways, i)) for i in range(ways)]
    fullest = max(int(mine.bincount(minlength=8)[part].sum()) for mine in which for part in owned)
    there_and_back, again = 5, 1  # exchanges of a round, and those that a backward of a further one makes again
    assert len(received) == ways * (there_and_back + (there_and_back + again) * (math.ceil(fullest / limit) - 1))


def test_nothing_more_is_sent_where_all_rows_fit():
    """The largest count of rows is told in the place of a count of tokens."""
    model, given, ways = Mixture(8, 1), inputs(16), 4
    sent = {}
    for capacity in (None, float(ways)):
        plan, captured = planned(model, f"ep={ways}", given, capacity)
        result = step.simulate_step(captured, plan, global_values(captured, model, given))
        sent[capacity] = result.bytes_sent
    assert sent[float(ways)] == sent[None]


def test_tokens_are_not_sent_once():
    """Nobody knows of a share of a token's rows what all of them on a device are together."""
    model, given = Mixture(8, 3), inputs(16)
    once, captured = planned(model, "ep=4", given, None, {"link": 1e6})
    assert any(ONCE in node.choice for node in once.sharding.nodes.values())
    plan, _ = planned(model, "ep=4", given, 1.0, {"link": 1e6})
    assert not any(ONCE in node.choice for node in plan.sharding.nodes.values())
    with pytest.raises(VerifyError, match="sends tokens once"):
        compiler.lower(captured, replace(once, expert_capacity=1.0), 0)


@pytest.mark.parametrize(("capacity", "load"), [(0.9, 1.0), (float("inf"), 1.0), (float("nan"), 1.0), (1.2, 1.5)])
def test_impossible_capacities(capacity, load):
    with pytest.raises(StrategyError, match="at a time"):
        planned(Mixture(4), "ep=2", inputs(), capacity, expert_load=load)
