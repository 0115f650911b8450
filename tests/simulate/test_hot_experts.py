"""Hot experts whose matrices are copied to all devices: gradients in fp64 under any routing, how many rows a device
gets and how many bytes it sends."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from autopar import compiler
from autopar.cost.expert_copies import copies_of
from autopar.frontend.fake_parameters import forms_of
from autopar.ir.layout import chunk
from autopar.ir.mesh import Mesh
from autopar.ops import autopar
from autopar.planner.spmd.plan import make_plan
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.rules.experts import ONCE
from autopar.simulate import collectives, step
from autopar.simulate.compare import verify_plan
from autopar.simulate.oracle import global_values, one_device_step, relative_error
from tests.families import FAMILIES
from tests.helpers import mixture
from tests.planner.planning import toy

from .test_expert_capacity import MIXED, PICKS, SENDS, Blocks, Centred, drawn_mixture
from .test_experts import EXACT, HIDDEN, ROUTINGS, Mixture, inputs

ONCE_EACH = {"link": 1e6}


def planned(model, mesh: str, given, hot: int, machine=SENDS, strategy="expert", **options):
    """A plan that sends rows as it does without copies, with some."""
    captured = compiler.trace(model, given)
    asked = PlanOptions(toy(**machine), strategy=strategy, baselines=False, **options)
    return replace(make_plan(captured, Mesh.parse(mesh), asked), hot_experts=hot), captured


def check(model, mesh: str, strategy: str, samples: int = 8, length: int = 3, hot: int = 1, **options):
    """Plan, simulate and compare one step, in a plan that sends rows as it does without copies."""
    given = inputs(samples, length)
    options |= dict(hardware="cpu-gloo", baselines=False, strategy=strategy)
    plan, captured = step.plan_and_capture(model, mesh, given, **options)
    report = verify_plan(captured, replace(plan, hot_experts=hot), model, given)
    assert max(report.errors.values()) <= EXACT, (report.errors, report.diverging)


def targets(plan, captured) -> list[object]:
    """The ops of rank 0."""
    return [node.target for node in compiler.lower(captured, plan, 0).local.graph.nodes]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("hot", [1, 2, 6])
@pytest.mark.parametrize(
    ("mesh", "strategy", "experts", "active"),
    [
        ("ep=2", "expert", 3, 2), ("ep=3", "expert", 8, 2), ("ep=4", "expert", 4, 1), ("ep=8", "expert", 8, 2),
        ("dp=2,ep=2", "expert+zero1", 4, 2), ("ep=2,tp=2", "expert+megatron_sp", 4, 2),
        ("dp=2,ep=2", "expert+fsdp", 5, 2), ("ep=2,dp=2", "expert", 4, 1),
    ],
)  # fmt: skip
def test_gradients(mesh, strategy, experts, active, hot, routing):
    """Also of more hot experts than have rows, and than there are."""
    samples = 9 if mesh == "ep=3" else 8
    check(Mixture(experts, active, routing), mesh, strategy, samples, hot=hot)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("machine", [SENDS, PICKS, MIXED, ONCE_EACH])
def test_however_rows_get_there(machine, routing):
    """Sent, picked out of all, some of both, and tokens that are sent once for several experts."""
    model, given = Mixture(8, 2, routing), inputs(64)
    plan, captured = planned(model, "ep=4", given, 2, machine)
    report = verify_plan(captured, plan, model, given)
    assert max(report.errors.values()) <= EXACT, (report.errors, report.diverging)
    assert targets(plan, captured).count(autopar.added_to_owners.default) == 2
    is_once = any(ONCE in node.choice for node in plan.sharding.nodes.values())
    assert is_once == (machine in (SENDS, ONCE_EACH))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(12))
def test_any_shapes(seed):
    print(f"seed {seed}")
    random = Random(seed)
    model, mesh, strategy, ways = drawn_mixture(random, seed)
    samples, hot = 2 * ways * random.choice([1, 2]), random.choice([1, 2, 3, model.router.out_features])
    check(model, mesh, strategy, samples, random.choice([2, 4]), hot)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["expert+megatron_sp", "expert+megatron_sp+zero1"])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("mesh", "up", "down"),
    [
        ("ep=2,tp=2", "ep:S(0) tp:S(0)", "ep:S(0) tp:S(0)"), ("ep=2,tp=2", "ep:S(0) tp:S(2)", "ep:S(0) tp:S(1)"),
        ("ep=2,tp=2", "ep:S(0) tp:S(1)", "ep:S(0) tp:S(2)"), ("dp=2,tp=2", "dp:S(0)", "dp:S(0)"),
    ],
)  # fmt: skip
def test_tensor_axes_of_experts(mesh, up, down, routing, strategy):
    pins = {"experts.gate_up": up, "experts.down": down}
    check(Mixture(6, 2, routing), mesh, strategy, hot=2, pin=pins)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_rows_that_come_back_between_products(routing):
    model, given = Centred(4, 1, routing), inputs(16)
    plan, captured = planned(model, "ep=4", given, 1)
    report = verify_plan(captured, plan, model, given)
    assert max(report.errors.values()) <= EXACT, (report.errors, report.diverging)


def test_fewer_rows_than_devices():
    check(Mixture(4, 1, "all to one"), "ep=4", "expert", 4, 1, 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [
    dict(micro_batches=2), dict(mesh="pp=2,ep=2", micro_batches=2),
    dict(mesh="pp=2,ep=2", micro_batches=4, schedule="zb-h1"),
])  # fmt: skip
def test_micro_batches_and_stages(options):
    check(Mixture(4, 2, "all to one"), options.pop("mesh", "ep=2"), "expert", **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("bias", [0.0, 50.0, -50.0])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_layers_of_transformers(kind, bias):
    """GPT-OSS's have biases, which a row reads by its expert."""
    model, given = mixture.Mixture(kind, bias), (torch.randn(6, 5, 16, dtype=torch.float64),)
    plan, captured = planned(model, "ep=4", given, 1)
    compare(captured, plan, model, given)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", ["ep=2", "ep=4", "dp=2,ep=2"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_families(name, mesh):
    torch.manual_seed(0)
    model, given = FAMILIES[name](4, 5)
    plan, captured = step.plan_and_capture(
        model, mesh, given, hardware=toy(link=1e7), baselines=False, strategy="expert"
    )
    plan = replace(plan, hot_experts=1)
    assert autopar.added_to_owners.default in targets(plan, captured)
    report = verify_plan(captured, plan, model, given)
    assert max(report.errors.values()) <= 1e-5, (report.errors, report.diverging)  # of a router in fp32


@pytest.mark.sampled(1)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_recomputed_blocks_with_a_balance_loss(recompute, routing):
    """Each block finds its own hot experts, once."""
    model, given = Blocks(4, 2, routing), inputs()
    plan, captured = planned(model, "ep=4", given, 1, recompute=recompute)
    assert len(plan.recomputed) == (3 if recompute == "full" else 0)
    report = verify_plan(captured, plan, model, given)
    assert max(report.errors.values()) <= EXACT, (report.errors, report.diverging)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_adapters_of_stacked_experts(routing):
    model, given = Mixture(4, 2, routing), inputs()
    adapters = mixture.with_adapters(model)
    captured = compiler.trace(model, given, None, forms_of(model), "fp32", adapters)
    plan = make_plan(captured, Mesh.parse("ep=2"), PlanOptions(toy(), strategy="expert", baselines=False))
    plan = replace(plan, hot_experts=2)
    assert targets(plan, captured).count(autopar.copies_of.default) > 2  # of adapters as well
    compare(captured, plan, model, given)


def compare(captured, plan, model, given) -> None:
    """Compare all gradients with those of one device."""
    values = global_values(captured, model, given)
    wanted, found = one_device_step(captured, values), step.simulate_step(captured, plan, values)
    assert wanted.gradients and found.gradients.keys() == wanted.gradients.keys()
    for name, gradient in wanted.gradients.items():
        assert relative_error(found.gradients[name], gradient) <= EXACT, name


@pytest.fixture
def sizes(monkeypatch) -> list[list[int]]:
    """The rows that each device of a group gets, of every exchange of rows that is made, in order."""
    found: list[list[int]] = []
    exchange = collectives._exchange

    def counted(members):
        results, sent = exchange(members)
        if members[0].target is autopar.exchange_rows.default:
            found.append([len(result) for result in results])
        return results, sent

    monkeypatch.setattr(collectives, "_exchange", counted)
    return found


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("hot", [1, 3])
@pytest.mark.parametrize("ways", [2, 4])
def test_rows_and_bytes_are_as_counted(sizes, ways, hot, routing):
    """A device gets the rows of its own experts that are not hot, and keeps its own of the hot ones. What it sends: all
    others there, and back what came from others; three all-reduces of the matrices of hot experts, forward, backward
    and of gradients; a count for each expert and two more, in the place of one for each device; and as it was all
    that a plan without experts sends."""
    experts, rows = 8, 16 * 3 // ways
    model, given = Mixture(experts, 1, routing), inputs(16)
    plan, captured = planned(model, f"ep={ways}", given, hot)
    assert all("b" not in node.choice for node in plan.sharding.nodes.values())  # no device picks rows
    result = step.simulate_step(captured, plan, global_values(captured, model, given))
    which = model.router(model.first(given[0]).reshape(-1, HIDDEN)).argmax(-1)
    counts = which.bincount(minlength=experts)
    is_hot = torch.isin(torch.arange(experts), counts.argsort(descending=True, stable=True)[:hot])
    mine = [part.bincount(minlength=experts) for part in which.split(rows)]
    blocks = [slice(*chunk(experts, ways, i)) for i in range(ways)]
    assert sizes[0] == [
        int((counts * ~is_hot)[block].sum() + (part * is_hot).sum()) for block, part in zip(blocks, mine)
    ]
    there = [int((part * ~is_hot).sum() - (part * ~is_hot)[block].sum()) for block, part in zip(blocks, mine)]
    back = [int(((counts - part) * ~is_hot)[block].sum()) for block, part in zip(blocks, mine)]
    row, number = HIDDEN * 8, 8
    matrices = (HIDDEN * 12 + 6 * HIDDEN) * 8
    dense = sum(p.numel() for name, p in model.named_parameters() if "experts" not in name) * 8 + number  # and the loss
    for rank, sent in enumerate(result.bytes_sent):
        of_rows = there[rank] * 3 * row + back[rank] * 2 * row  # rows, again for gradients of weights
        reduced = 2 * (ways - 1) / ways * (3 * hot * matrices + dense)
        assert sent == pytest.approx(of_rows + reduced + (ways - 1) * number * (experts + 2), rel=1e-9)


def test_plans_count_what_is_sent():
    """The bytes of copies that a plan says are those of its all-reduces in the graph."""
    captured = compiler.trace(Mixture(8, 2), inputs(64))
    asked = PlanOptions(toy(link=1e8), strategy="expert", baselines=False, expert_load=2.0, hot_experts=2)
    plan = make_plan(captured, Mesh.parse("ep=4"), asked)
    assert plan.hot_experts == 2
    program = compiler.lower(captured, plan, 0)
    found = [n.meta["collective"] for n in program.local.graph.nodes if n.meta.get("collective")]
    wire = sum(one.wire_bytes for one in found if one.tensor.endswith("_copies"))
    assert wire == pytest.approx(plan.expert_copies.sent_bytes)
    assert sum(c.wire_bytes for c in plan.collectives if c.kind == "all_reduce") == pytest.approx(
        sum(one.wire_bytes for one in found if one.kind == "all_reduce"), rel=0.005
    )


def test_nothing_is_copied_where_no_rows_are_sent():
    model, given = Mixture(4, 2), inputs()
    captured = compiler.trace(model, given)
    asked = PlanOptions(toy(), strategy="ddp", baselines=False, hot_experts=2)
    plan = make_plan(captured, Mesh.parse("dp=2"), asked)
    assert plan.hot_experts == 0 and plan.expert_copies is None
    assert any("none is copied in their place" in warning for warning in plan.warnings)
    assert autopar.hot_experts.default not in targets(replace(plan, hot_experts=2), captured)
    products = [n for n in captured.graph.nodes if n.target is autopar.grouped_mm.default]
    assert products and copies_of(products[0], plan.sharding.nodes[products[0].name], plan.mesh, 2) is None
