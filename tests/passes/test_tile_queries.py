"""Attention in pieces of its queries: found in models, right on every mesh and for every kind of attention."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.api import entry as api
from autopar.compiler import lower, trace
from autopar.errors import PlanIncompatible, StrategyError, VerifyError
from autopar.hardware.profile import load
from autopar.ir.mesh import Mesh
from autopar.models import build
from autopar.ops import ATTENTION as ATTENTIONS
from autopar.ops import autopar, query_pieces, row_pieces
from autopar.passes.distribute.tile import tile
from autopar.planner.spmd.plan import make_plan
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.plans.plan import Plan
from autopar.plans.tiled import ATTENTION, QUERIES, TiledRegion
from autopar.rules.query_regions import query_regions
from autopar.simulate.oracle import global_values
from autopar.simulate.step import plan_and_capture, simulate_step

from ..helpers import staged
from ..helpers.attention_kinds import HEADS, KINDS, Model, inputs_of
from ..helpers.same_gradients import assert_step_like_eager

CPU = dict(hardware="cpu-gloo", baselines=False)
OP = autopar.queries_in_pieces.default


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(query_pieces, "MOST_QUERIES", 3)
    monkeypatch.setattr(query_pieces, "MOST_KEYS", 2)
    monkeypatch.setattr(row_pieces, "MOST_ROWS", 3)


def assert_like_eager(model, inputs, mesh, strategy, others=None, **options) -> Plan:
    """Plan with `inputs`, compare on `others`."""
    plan, captured = plan_and_capture(model, mesh, inputs, strategy=strategy, **{"tile": "queries"} | CPU | options)
    queries = [region for region in plan.tiled if region.kind]
    local = lower(captured, plan, 0, check=True).local.graph
    made = sum(node.target is OP for node in local.nodes)
    assert queries and not any(node.target in ATTENTIONS for node in local.nodes)
    assert 2 * len(queries) <= made <= 3 * len(queries)  # once more where a block is computed again
    assert_step_like_eager(captured, plan, model, inputs if others is None else others)
    return plan


def test_regions():
    """With the projection of the queries and of the output where each has its own, else from the queries' part on."""
    model, inputs = build("llama-tiny:layers=1", batch=2, seq=8, device="cpu")
    (region,) = query_regions(trace(model, inputs).graph)
    assert region.module == "layers.0.self_attn" and region.forward[0].target is autopar.linear.default
    assert [node.target for node in region.results] == [autopar.linear_dx.default]
    assert len(region.sums) == 3 and region.attention_bw in region.backward  # of keys, values and the weight
    assert region.source.meta["val"].shape == region.gradient.meta["val"].shape == (2, 8, 64)
    assert len(region.again) == len(region.forward) - 1
    model, inputs = build("gpt2-tiny:layers=1", batch=2, seq=8, device="cpu")
    (region,) = query_regions(trace(model, inputs).graph)
    assert len(region.forward) == 3 and len(region.sums) == 2  # one weight makes queries, keys and values
    (alone,) = query_regions(trace(model, inputs).graph, alone=True)
    assert alone.forward == (alone.node,) and not alone.again and not alone.never_made


MESHES = [
    ("dp=1", None), ("dp=2", "fsdp"), ("tp=2", "megatron"), ("cp=2", "all_gather_kv"), ("cp=2", "ulysses"),
    ("dp=2,tp=2", None), ("cp=2,tp=2", "all_gather_kv+megatron_sp"),
]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("text", ["llama-tiny:layers=2", "gpt2-tiny:layers=2"])
@pytest.mark.parametrize("mesh, strategy", MESHES)
def test_models(mesh, strategy, text, recompute):
    model, inputs = build(text, batch=2, seq=8, device="cpu")
    kinds = "queries" if "ulysses" in str(strategy) else random.choice(["queries", "mlp+queries"])
    print(kinds)
    plan = assert_like_eager(model.double(), inputs, mesh, strategy, recompute=recompute, tile=kinds)
    wanted = ATTENTION if "ulysses" in str(strategy) else QUERIES
    assert {region.kind for region in plan.tiled if region.kind} == {wanted}
    assert "queries of " in str(plan) and Plan.from_json(plan.to_json()) == plan


@pytest.mark.sampled(3)
@pytest.mark.parametrize("heads", list(HEADS))
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "t5"])
@pytest.mark.parametrize("mesh, strategy", [("dp=1", None), ("cp=2", "all_gather_kv"), ("cp=2", "ulysses")])
def test_kinds_of_attention(mesh, strategy, kind, heads):
    """Windows, documents, padding, numbers that are added to scores, caps and sinks, on other inputs than planned."""
    inputs = inputs_of(kind, 12)
    ids = torch.randint(0, 24, inputs["input_ids"].shape, generator=torch.Generator().manual_seed(5))
    assert_like_eager(Model((kind,), *HEADS[heads]), inputs, mesh, strategy, inputs | {"input_ids": ids})


def test_a_bias_that_trains_keeps_attention_whole():
    with pytest.raises(StrategyError, match="no attention has more than"):
        api.search(Model(("t5",), 4, 4), "dp=1", inputs_of("t5", 12), tile="queries", **CPU)


def test_keys_do_not_go_round():
    with pytest.raises(StrategyError):
        api.search(Model(("causal",), 4, 4), "cp=2", inputs_of("causal", 12), strategy="ring", tile="queries", **CPU)


def test_a_ring_that_is_short_of_memory_is_planned_without():
    """Pieces are tried where memory decides, and not where keys go round."""
    asked = dict(strategy="ring", **CPU)
    model, given = Model(("causal",), 4, 4), inputs_of("causal", 12)
    whole = api.search(model, "cp=2", given, **asked).plan
    tight = api.search(model, "cp=2", given, memory=0.9 * whole.peak_bytes, refuses=False, **asked).plan
    assert all("ring over cp" in one.scheme for one in tight.attentions) and not any(one.kind for one in tight.tiled)


FAMILIES = ["llama", "qwen3", "gemma2", "mistral", "phi3", "olmo2", "glm", "gpt2", "deepseek_v3", "gpt_oss"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("mesh, strategy", [("dp=1", None), ("dp=2,tp=2", None), ("cp=2", "all_gather_kv")])
def test_families(name, mesh, strategy):
    """In fp64 throughout: norms of queries, partial rotary embeddings, caps, windows, sinks, low-rank projections."""
    case, kinds = staged.family(name), random.choice(["queries", "mlp+queries"])
    print(kinds)
    options = PlanOptions(load("cpu-gloo"), strategy=strategy, baselines=False, tile=kinds)
    plan = make_plan(case.captured, Mesh.parse(mesh), options, name)
    assert any(region.kind for region in plan.tiled)
    step = simulate_step(case.captured, plan, case.values)
    outputs = {str(i): value for i, value in enumerate(step.outputs)}
    case.check(replace(step, outputs=outputs), (name, mesh, kinds))


class Dropped(nn.Module):
    """Drops weights of attention."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.qkv, self.out = nn.Embedding(11, 16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, ids):
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(self.body(ids)).split(16, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2)).square().mean()


@pytest.mark.parametrize("mesh, strategy", [("dp=1", None), ("cp=2", "all_gather_kv"), ("dp=2", "ddp")])
def test_the_same_weights_are_dropped(mesh, strategy):
    """A step equals that without pieces, as the place of a weight says whether it is dropped."""
    model, ids = Dropped().double(), (torch.randint(0, 11, (2, 10)),)
    plan, captured = plan_and_capture(model, mesh, ids, strategy=strategy, tile="queries", **CPU)
    values = global_values(captured, model, ids)
    step, whole = (simulate_step(captured, one, values) for one in (plan, replace(plan, tiled=())))
    assert plan.tiled and not torch.equal(step.loss, model.eval()(*ids))
    torch.testing.assert_close(step.loss, whole.loss, rtol=1e-12, atol=0)
    for name, gradient in whole.gradients.items():
        torch.testing.assert_close(step.gradients[name], gradient, rtol=1e-10, atol=1e-12)


def test_numbers_in_16_bits_are_nearly_those_of_whole_attention():
    model, inputs = build("llama-tiny:layers=2", batch=2, seq=16, device="cpu")
    plan, captured = plan_and_capture(model, "dp=2", inputs, tile="queries", precision="bf16", hardware="h100",
                                      baselines=False)  # fmt: skip
    values = global_values(captured, model, inputs)
    step, whole = (simulate_step(captured, one, values) for one in (plan, replace(plan, tiled=())))
    torch.testing.assert_close(step.loss, whole.loss, rtol=1e-3, atol=1e-3)
    for name, gradient in whole.gradients.items():
        assert (step.gradients[name] - gradient).norm() <= 2e-2 * gradient.norm()


def test_queries_are_never_whole():
    """No tensor of a local graph that lies between a projection and attention has all 12 queries."""
    model, inputs = Model(("causal",), 4, 4), inputs_of("causal", 12)
    plan, captured = plan_and_capture(model, "dp=1", inputs, tile="queries", **CPU)
    heads = [
        node
        for node in lower(captured, plan, 0).local.graph.nodes
        if isinstance(value := node.meta.get("val"), torch.Tensor) and value.shape == (2, 4, 12, 4)
    ]
    names = {str(node.meta.get("module")) for node in heads}
    assert names and not any(name.endswith(".q") for name in names)
    whole = replace(plan, tiled=())
    assert len(heads) < sum(
        isinstance(value := node.meta.get("val"), torch.Tensor) and value.shape == (2, 4, 12, 4)
        for node in lower(captured, whole, 0).local.graph.nodes
    )


def test_other_plans_are_refused():
    model, inputs = Model(("causal",), 4, 4), inputs_of("causal", 12)
    plan, captured = plan_and_capture(model, "dp=1", inputs, tile="queries", **CPU)
    odd = replace(plan, tiled=(TiledRegion("layer_norm", "", 0.0, 0.0, 2, QUERIES),))
    with pytest.raises(PlanIncompatible, match="no attention"):
        odd.check_fits(captured.graph, plan.mesh)
    with pytest.raises(StrategyError, match="stages of a pipeline"):
        api.search(model, "pp=2", inputs_of("causal", 12, 4), tile="queries", **CPU)
    local = lower(captured, replace(plan, tiled=()), 0).local
    (node,) = [n for n in local.graph.nodes if n.target is autopar.attention_bw.default] or [None]
    if node is not None:
        q = node.args[1]
        with local.graph.inserting_before(node):
            copy = local.graph.node_copy(q)
        node.replace_input_with(q, copy)
        with pytest.raises(VerifyError, match="parts"):
            tile(local, plan.tiled)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", range(24))
def test_random_models_on_random_meshes(case, monkeypatch):
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    monkeypatch.setattr(query_pieces, "MOST_QUERIES", draw.randint(1, 7))
    monkeypatch.setattr(query_pieces, "MOST_KEYS", draw.randint(1, 9))
    monkeypatch.setattr(row_pieces, "MOST_ROWS", draw.randint(2, 9))
    kinds = tuple(draw.choice([kind for kind in KINDS if kind != "t5"]) for _ in range(draw.randint(1, 2)))
    heads, lora = draw.choice(list(HEADS)), draw.random() < 0.2
    model = Model(kinds, *HEADS[heads], lora=lora)
    length = draw.choice([8, 12, 16])
    inputs, others = inputs_of(kinds[0], length), inputs_of(kinds[0], length)
    others["input_ids"] = torch.randint(
        0, 24, (2, length), generator=torch.Generator().manual_seed(draw.randint(0, 99))
    )
    mesh, strategy = draw.choice([*MESHES[:-1], ("dp=2", "ddp"), ("cp=4", "all_gather_kv"), ("cp=2,dp=2", None)])
    recompute, kind = draw.choice(["none", "selective", "full"]), draw.choice(["queries", "mlp+queries"])
    print(kinds, heads, lora, length, mesh, strategy, recompute, kind)
    assert_like_eager(model, inputs, mesh, strategy, others, recompute=recompute, tile=kind)
