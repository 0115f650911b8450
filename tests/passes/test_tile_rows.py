"""Row-wise regions in pieces: found in MLPs, right on every mesh, chosen where memory is short."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.adapt import order
from autopar.api import entry as api
from autopar.compiler import lower, trace
from autopar.errors import PlanIncompatible, StrategyError, VerifyError
from autopar.frontend.fake_parameters import forms_of
from autopar.hardware.profile import load
from autopar.ir.mesh import Mesh
from autopar.models import build
from autopar.ops import row_pieces
from autopar.passes.distribute.tile import tile
from autopar.planner.spmd.plan import make_plan
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.plans.plan import Plan
from autopar.plans.tiled import TiledRegion
from autopar.rules.row_regions import row_regions
from autopar.simulate.oracle import global_values, one_device_step
from autopar.simulate.step import plan_and_capture, simulate_step

from ..helpers.same_gradients import assert_step_like_eager

CPU = dict(hardware="cpu-gloo", baselines=False)
HIDDEN, WIDE, VOCABULARY = 6, 14, 11
SEVERAL = ["gelu", "gated", "square", "beside", "after", "no norm", "rms norm", "residual"]


class RMSNorm(nn.Module):
    """Written as models of transformers have it; `type_`: in which it computes."""

    def __init__(self, width: int, type_: torch.dtype | None = None):
        super().__init__()
        self.weight, self.type_ = nn.Parameter(torch.randn(width)), type_

    def forward(self, x):
        wide = x.to(self.type_ or x.dtype)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Block(nn.Module):
    """A block with an MLP. `kind` says what that is, and what lies around it."""

    def __init__(self, kind: str):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.body, self.norm = nn.Embedding(VOCABULARY, HIDDEN), nn.LayerNorm(HIDDEN)
        self.up, self.gate = nn.Linear(HIDDEN, WIDE), nn.Linear(HIDDEN, WIDE, bias=False)
        self.down, self.other = nn.Linear(WIDE, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.inside, self.behind = nn.LayerNorm(WIDE), nn.LayerNorm(HIDDEN)
        if kind in ("rms norm", "residual"):
            self.norm = RMSNorm(HIDDEN)
        if kind == "rms inside":
            self.inside = RMSNorm(WIDE)

    def mlp(self, x):
        wide = self.up(x)
        if self.kind == "gated":
            return self.down(F.silu(self.gate(x)) * wide)
        if self.kind == "square":
            return self.down(F.relu(wide).square())
        if self.kind in ("norm inside", "rms inside"):
            wide = self.inside(wide)
        if self.kind == "softmax":
            wide = wide.softmax(-1)
        if self.kind == "dropout":
            wide = F.dropout(wide, 0.5)
        return self.down(F.gelu(wide))

    def forward(self, ids):
        x = self.body(ids)
        if self.kind == "residual":  # to whose gradient that of the norm is added part by part
            x = x + self.other(x)
        normed = x if self.kind == "no norm" else self.norm(x)
        made = self.mlp(normed)
        if self.kind == "beside":
            made = made + self.other(normed)
        if self.kind == "after":
            made = self.behind(made)
        loss = (x + made).tanh().square().mean()
        return loss + self.up(normed).mean() if self.kind == "read twice" else loss


def ids(rows: int = 3, length: int = 5):
    return (torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1)),)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(row_pieces, "MOST_ROWS", 3)


def test_regions():
    (region,) = row_regions(trace(Block("gated"), ids()).graph)
    assert len(region.sums) == 4 and len(region.results) == 1 and len(region.again) == 5  # 3 weights and a bias
    assert region.node.target is torch.ops.autopar.linear.default and len(region.never_made) == 5 + 6


def test_norms_are_regions_of_their_own():
    """With the weight, and with casts around the norm, where its backward gives one tensor."""
    aten = torch.ops.aten
    norm, mlp = row_regions(trace(Block("rms norm"), ids()).graph)
    assert norm.source is mlp.source.args[1].args[0] and norm.node is mlp.source and norm.node.target is aten.mul.Tensor
    assert [node.target for node in norm.sums] == [aten.sum.dim_IntList] and len(norm.again) == 6

    class Wide(nn.Sequential):
        def forward(self, x):
            return super().forward(x).square().mean()

    model = Wide(nn.Linear(HIDDEN, HIDDEN), RMSNorm(HIDDEN, torch.float64), nn.Linear(HIDDEN, HIDDEN))
    (norm,) = row_regions(trace(model, (torch.randn(3, 5, HIDDEN),)).graph)
    assert norm.source.target is torch.ops.aten.add.Tensor  # with the bias of the layer before
    assert [node.meta["val"].dtype for node in norm.results] == [torch.float32] and len(norm.sums) == 1
    assert any(node.target is aten.expand.default for node in norm.backward)


@pytest.mark.parametrize("kind", ["softmax", "dropout"])
def test_what_is_not_row_wise_or_draws_is_no_region(kind):
    assert not row_regions(trace(Block(kind), ids()).graph)
    with pytest.raises(StrategyError, match="no row-wise ops"):
        api.search(Block(kind), "dp=2", ids(), tile="mlp", **CPU)


def pieces_in(program) -> int:
    return sum(node.target is torch.ops.autopar.in_pieces.default for node in program.local.graph.nodes)


def assert_like_eager(model, inputs, mesh, strategy, **options) -> Plan:
    plan, captured = plan_and_capture(model, mesh, inputs, strategy=strategy, tile="mlp", **CPU | options)
    again = sum(region.node in plan.sharding.recomputed for region in plan.tiled)
    assert plan.tiled and 0 <= pieces_in(lower(captured, plan, 0, check=True)) - 2 * len(plan.tiled) <= again
    assert_step_like_eager(captured, plan, model, inputs)
    return plan


MESHES = [
    ("dp=2", "ddp"), ("dp=3", "fsdp"), ("tp=2", "megatron"), ("dp=2,tp=2", "megatron_sp+fsdp"), ("dp=2,tp=2", None),
]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("kind", SEVERAL)
@pytest.mark.parametrize("mesh, strategy", MESHES)
def test_gradients_are_those_of_eager(mesh, strategy, kind, recompute):
    """In fp64, with sizes that neither meshes nor pieces divide."""
    plan = assert_like_eager(Block(kind).double(), ids(), mesh, strategy, recompute=recompute)
    assert len(plan.tiled) == 1 + (kind in ("rms norm", "residual"))
    assert 1 < plan.tiled[0].pieces <= 5 and plan.tiled[0].bytes_ > 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["ring", "all_gather_kv"])
@pytest.mark.parametrize("mesh", ["cp=2", "cp=3", "cp=2,tp=2"])
def test_norms_and_mlps_of_a_sequence_in_zigzag(mesh, strategy):
    """Rows that two blocks of a sequence give a device are cut into pieces like any others."""
    model, inputs = build("llama-tiny:layers=2", batch=1, seq=60, device="cpu")
    plan = assert_like_eager(model.double(), inputs, mesh, f"{strategy}+megatron" if "tp" in mesh else strategy)
    assert len(plan.tiled) == 7 and all(region.pieces > 1 for region in plan.tiled)
    assert all("cp:Z(1)" in str(plan.sharding.nodes[region.node].outputs[0]) for region in plan.tiled)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("text", ["llama-tiny:layers=2", "gpt2-tiny:layers=2"])
@pytest.mark.parametrize("mesh, strategy", [
    ("dp=2", "fsdp"), ("dp=2,tp=2", "megatron_sp+fsdp"), ("cp=2", "ring"), ("cp=2,tp=2", "ulysses+megatron"),
    ("cp=2,dp=2", "all_gather_kv+zero1"), ("dp=2,tp=2", None),
])  # fmt: skip
def test_models(text, mesh, strategy):
    model, inputs = build(text, batch=2, seq=8, device="cpu")
    plan = assert_like_eager(model.double(), inputs, mesh, strategy)
    assert len(plan.tiled) == (2 if text.startswith("gpt2") else 7)  # and every norm that is written out
    assert "in pieces" not in str(plan) and "pieces:" in str(plan)


@pytest.mark.parametrize("kind", ["norm inside", "rms inside"])
@pytest.mark.parametrize("mesh, strategy, recompute", [("dp=3", "fsdp", "full"), ("dp=2,tp=2", None, "none")])
def test_a_norm_inside_of_an_mlp_is_a_part_of_it(mesh, strategy, recompute, kind):
    plan = assert_like_eager(Block(kind).double(), ids(), mesh, strategy, recompute=recompute)
    assert len(plan.tiled) == 1
    with pytest.raises(StrategyError, match="move tensors inside of a region"):  # sums of rows over `tp`
        api.search(Block(kind), "tp=2", ids(), strategy="megatron", tile="mlp", **CPU)


@pytest.mark.slow
@pytest.mark.parametrize("targets, mesh, strategy", [
    ("all-linear", "dp=2", "fsdp"), ("all-linear", "cp=2", "ring"), (["q_proj"], "tp=2", "megatron"),
])  # fmt: skip
def test_adapters(targets, mesh, strategy):
    """LoRA on the MLP's own layers, whose narrow tensors are inside, or elsewhere: then no weight of it trains."""
    torch.manual_seed(1)
    model, inputs = build("llama-tiny:layers=1", batch=4, seq=8, device="cpu")
    adapt = order.checked([autopar.LoRA(target_modules=targets, r=2)])
    order.attach(model, adapt, "cpu")
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    model.double()
    captured = trace(model, inputs, None, forms_of(model), "fp32", adapt)
    options = PlanOptions(load("cpu-gloo"), strategy=strategy, baselines=False, tile="mlp")
    plan = make_plan(captured, Mesh.parse(mesh), options, "adapted")
    values = global_values(captured, model, inputs)
    wanted, found = one_device_step(captured, values), simulate_step(captured, plan, values)
    assert plan.tiled and wanted.gradients.keys() == found.gradients.keys()
    for name, gradient in wanted.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_numbers_and_bytes_sent_are_those_of_whole_tensors_in_bf16():
    model, inputs = build("llama-tiny:layers=2", batch=4, seq=8, device="cpu")
    plan, captured = plan_and_capture(model, "dp=2,tp=2", inputs, strategy="megatron_sp+fsdp", precision="bf16",
                                      tile="loss+mlp", hardware="h100", baselines=False)  # fmt: skip
    values = global_values(captured, model, inputs)
    step, whole = (simulate_step(captured, one, values) for one in (plan, replace(plan, tiled=())))
    torch.testing.assert_close(step.loss, whole.loss, rtol=1e-6, atol=1e-6)
    for name, gradient in whole.gradients.items():
        torch.testing.assert_close(step.gradients[name], gradient, rtol=3e-2, atol=2e-3)


def test_micro_batches_run_in_pieces_each():
    plan = assert_like_eager(Block("gelu").double(), ids(4), "dp=2", "ddp", micro_batches=2)
    assert plan.micro_batches == 2


def test_other_plans_and_parted_regions_are_refused():
    """A region of another graph, one that a redistribution parts, and stages of a pipeline."""
    plan, captured = plan_and_capture(Block("gelu"), "tp=2", ids(), strategy="megatron", tile="mlp", **CPU)
    odd = replace(plan, tiled=(TiledRegion("up", "up", 0.0, 0.0, 2),))
    with pytest.raises(PlanIncompatible, match="no end of row-wise ops"):
        odd.check_fits(captured.graph, plan.mesh)
    local = lower(captured, replace(plan, tiled=()), 0).local
    parted = [TiledRegion(node.name, "", 0.0, 0.0, 2) for node in local.graph.nodes if "gelu" in node.name]
    with pytest.raises(VerifyError, match="parts the ops"):
        tile(local, parted[:1])
    with pytest.raises(StrategyError, match="stages of a pipeline"):
        api.search(Block("gelu"), "pp=2,dp=2", ids(4), tile="mlp", **CPU)
