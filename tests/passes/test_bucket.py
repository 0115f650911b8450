"""Buckets: fewer collectives, the same bytes, the same gradients."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from random import Random

import pytest
import torch

from autopar import Mesh, compiler
from autopar.codegen import pass_manager
from autopar.compiler import lower
from autopar.errors import StrategyError
from autopar.hardware.profile import load
from autopar.ir.graph import bytes_of
from autopar.models import build
from autopar.planner.spmd.plan import make_plan
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.plans.plan import Plan
from autopar.simulate import step
from autopar.simulate.compare import verify_model
from autopar.simulate.oracle import global_values
from tests.families import FAMILIES
from tests.helpers import kept

SMALL = "gpt:hidden=32,layers=1,heads=2,vocab=64,seq=16"


def planned(model: str, mesh: str, strategy: str, batch: int = 4, **options) -> tuple:
    module, inputs = build(model, batch=batch, seq=16, device="cpu")
    plan, captured = step.plan_and_capture(
        module, mesh, inputs, hardware="cpu-gloo", strategy=strategy, baselines=False, cache=kept.captures(), **options
    )
    return module, inputs, plan, captured


def sent(plan: Plan, captured, rank: int = 0) -> tuple[int, float]:
    """Collectives of a rank and the bytes that it sends."""
    local = lower(captured, plan, rank, check=True).local
    found = [n.meta["collective"] for n in local.graph.nodes if n.meta.get("collective")]
    return len(found), sum(c.wire_bytes for c in found)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [("dp=2", "ddp"), ("dp=3", "fsdp"), ("dp=2,tp=2", "fsdp")],
)
def test_buckets_keep_bytes_and_gradients(mesh, strategy):
    module, inputs, plan, captured = planned(SMALL, mesh, strategy, batch=12)
    single = replace(plan, bucket_bytes=0.0)
    count, bytes_ = sent(plan, captured)
    count_single, bytes_single = sent(single, captured)
    assert count < count_single / 2
    assert bytes_ == pytest.approx(bytes_single, rel=1e-12)
    values = global_values(captured, module, inputs)
    packed, alone = (step.simulate_step(captured, p, values) for p in (plan, single))
    for name, gradient in alone.gradients.items():
        assert torch.allclose(packed.gradients[name], gradient, rtol=1e-6, atol=1e-8), name


def test_ddp_reduces_all_gradients_at_once():
    _, _, plan, captured = planned("mlp-tiny", "dp=4", "ddp", batch=8)
    local = lower(captured, plan, 0).local
    found = [n.meta["collective"] for n in local.graph.nodes if n.meta.get("collective")]
    gradients = [c for c in found if c.phase == "backward"]
    assert len(gradients) == 1 and gradients[0].kind == "all_reduce"


def test_small_buckets_are_several():
    _, _, plan, captured = planned(SMALL, "dp=2", "ddp")
    one, _ = sent(plan, captured)
    many, _ = sent(replace(plan, bucket_bytes=plan.peak_bytes / 100), captured)
    assert one < many


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_buckets_hold_no_more_than_they_may(strategy):
    """The limit counts whole tensors: a gather starts from a fourth of them. A tensor that is larger travels alone."""
    _, _, plan, captured = planned(SMALL, "dp=4", strategy)
    limit = 4 * (4 * 32 * 32 + 32)
    local = lower(captured, replace(plan, bucket_bytes=float(limit)), 0).local
    packed = [n for n in local.graph.nodes if n.meta.get("bucket")]
    sizes = [bytes_of(n.args[0].meta["val"]) * (4 if n.meta["bucket"] == "gather" else 1) for n in packed]
    assert len(sizes) >= 2 and limit / 2 < max(sizes) <= limit


def test_every_rank_packs_alike():
    """Uneven shards: 3 devices cut 64 rows to 22, 22 and 20."""
    _, _, plan, captured = planned(SMALL, "dp=3", "fsdp", batch=6)
    lines = [lower(captured, plan, rank).collectives() for rank in range(3)]
    assert lines[0] == lines[1] == lines[2]


def test_passes_run_in_order():
    _, _, plan, captured = planned("mlp-tiny", "dp=2", "ddp")
    seen = []
    with pass_manager.observe(lambda result: seen.append(result.name)):
        lower(captured, plan, 0)
    assert seen == ["localize", "recompute", "lower_ops", "bucket", "in_place", "overlap", "partition"]


def test_a_gradient_reduced_over_two_axes_is_packed_in_their_order():
    """The router's gradient is scattered over tp and then summed over dp: a bucket of sums over dp has to wait for the
    first."""
    module, inputs = FAMILIES["mixtral"](4, 16)
    plan, captured = step.plan_and_capture(
        module, "dp=2,tp=2", inputs, hardware="cpu-gloo", strategy="hsdp", baselines=False
    )
    found = [
        n.meta["collective"] for n in lower(captured, plan, 0, check=True).local.graph.nodes if n.meta.get("collective")
    ]
    kinds = [c.kind for c in found if c.phase == "backward" and "linear_dw" in c.tensor]
    assert kinds.index("reduce_scatter") < kinds.index("all_reduce")


MESHES = ("dp=3", "dp=2,tp=2", "dp=2,tp=3", "dp=2,cp=2,tp=2")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(6))
def test_parameters_in_any_layout(seed):
    """Moves over several axes in any order: a bucket may need what other buckets bring, and takes it along."""
    print(f"seed {seed}")
    random = Random(seed)
    module, inputs = build("mlp:hidden=16,layers=2", batch=8, seq=4, device="cpu")
    captured = compiler.trace(module, inputs)
    plan = _pinned(random, captured, module)
    assert (
        len({tuple((g, t) for g, t, _ in lower(captured, plan, r).collectives()) for r in range(plan.mesh.devices)})
        == 1
    )
    values = global_values(captured, module, inputs)
    single = replace(plan, bucket_bytes=0.0)
    wanted, bytes_ = step.simulate_step(captured, single, values), sent(single, captured)[1]
    for packed in (plan, replace(plan, bucket_bytes=2000.0)):
        assert sent(packed, captured)[1] == pytest.approx(bytes_, rel=1e-12)
        gradients = step.simulate_step(captured, packed, values).gradients
        assert all(torch.allclose(gradients[name], g, rtol=1e-6, atol=1e-8) for name, g in wanted.gradients.items())


def _pinned(random: Random, captured, module) -> Plan:
    """A plan that follows random pins of all parameters; pins that no layout follows are drawn again."""
    while True:
        mesh = Mesh.parse(random.choice(MESHES))
        pins = {}
        for name, parameter in module.named_parameters():
            dims = {axis: random.randrange(-1, parameter.dim()) for axis in random.sample(mesh.names, len(mesh.names))}
            pins[name] = " ".join(f"{axis}:S({dim})" for axis, dim in dims.items() if dim >= 0) or "R"
        strategy = random.choice((None, "ddp", "fsdp"))
        options = PlanOptions(load("cpu-gloo"), pin=pins, strategy=strategy, baselines=False)
        with contextlib.suppress(StrategyError):
            return make_plan(captured, mesh, options, "mlp")


@pytest.mark.slow
def test_a_small_tensor_over_three_axes():
    """BERT's two token types on eight devices: the bucket of the second gather takes results of two first ones."""
    module, inputs = FAMILIES["bert"](8, 16)
    report = verify_model(module, inputs, "dp=2,cp=2,tp=2", strategy="fsdp")
    assert report.match, str(report)
