"""Values of stages on the host: pipelines that memory slows down get faster, hold and copy what the plan says, and
compute the same."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from autopar.api import entry as api
from autopar.compiler import lower_plan
from autopar.errors import MemoryInfeasibleError
from autopar.hardware.profile import Host
from autopar.ir.graph import bytes_of
from autopar.models import build
from autopar.ops import autopar
from autopar.planner.pipeline.on_host import may_keep
from autopar.planner.spmd.planned import Planned
from autopar.plans.plan import Plan
from autopar.schedule.played import Played
from autopar.simulate.oracle import global_values
from autopar.simulate.pipeline import simulate_pipeline
from tests.helpers import kept

from .planning import toy

MACHINE = replace(toy(flops=1e10, memory=1e10, latency=1e-6, bucket=1 << 16), host=Host(2e10, 4e9, memory_bytes=10**9))
MODELS = {
    "gpt": "gpt:hidden=32,layers=4,heads=2,vocab=32,seq=32",
    "deep gpt": "gpt:hidden=32,layers=8,heads=2,vocab=32,seq=32",
    "deep llama": "llama:hidden=32,layers=8,heads=2,kv_heads=2,ffn=64,vocab=32,seq=32",
}
OPTIONS = {"hardware": MACHINE, "baselines": False, "tile": "none", "fixes": False, "micro_batches": 4}
CASES = [
    ("gpt", "pp=2", "1f1b", 0.8), ("deep gpt", "pp=2,dp=2", "gpipe", 0.6), ("deep llama", "pp=2,tp=2", "1f1b", 0.8),
    ("deep gpt", "pp=2,dp=2", "interleaved_1f1b", 0.6), ("deep llama", "pp=3", "1f1b", 0.8),
]  # fmt: skip


@functools.cache
def built(family: str):
    torch.manual_seed(0)
    module, inputs = build(MODELS[family], batch=8, seq=32, device="cpu")
    return module.double(), inputs


@functools.cache
def found(family: str, mesh: str, schedule: str, share: float | None = None, offload: str = "none") -> Planned:
    """The search under a share of the memory that the fastest plan takes."""
    module, inputs = built(family)
    memory = None if share is None else share * found(family, mesh, schedule).plan.peak_bytes
    asked = OPTIONS | {"schedule": schedule, "offload": offload, "memory": memory}
    return api.search(module, mesh, inputs, cache=kept.captures(), **asked)


def on_host_at_once(plan: Plan, captured, rank: int, played: Played) -> float:
    """The most bytes that the stages of a rank have on the host: what each copies, by micro-batches in flight."""
    program = lower_plan(captured, plan, rank, check=True)
    copied = [0.0] * len(plan.pipeline.costs)
    for stage, one in program.stages.items():
        nodes: Sequence = one.forward.graph.nodes
        copied[stage] = sum(bytes_of(n.args[0].meta["val"]) for n in nodes if n.target is autopar.to_host.default)
    return replace(played, activation=tuple(copied)).peak(plan.pipeline.pp_rank_of(plan.mesh.coordinate(rank)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("family", "mesh", "schedule", "share"), CASES)
def test_stages_with_little_memory_compute_the_same_in_less_time(family, mesh, schedule, share):
    module, inputs = built(family)
    try:
        alone = found(family, mesh, schedule, share).plan.step_seconds
    except MemoryInfeasibleError:
        alone = float("inf")
    planned = found(family, mesh, schedule, share, "activations")
    plan, captured = planned.plan, planned.captured
    saved = plan.saved_on_host
    assert saved is not None and plan.peak_bytes <= plan.memory_limit_bytes and plan.step_seconds < alone
    assert "on the host between forward and backward" in str(plan) and Plan.from_json(plan.to_json()) == plan
    played = planned.stages.evaluated.played
    ranks = range(plan.mesh.devices)
    assert max(on_host_at_once(plan, captured, rank, played) for rank in ranks) == saved.bytes_
    values = global_values(captured, module, inputs)
    step = simulate_pipeline(captured, plan, values, check=True)
    want = simulate_pipeline(captured, replace(plan, saved_on_host=None), values)
    assert all(torch.equal(step.gradients[name], gradient) for name, gradient in want.gradients.items())
    module.zero_grad()
    module(**inputs).loss.backward()
    for name, parameter in module.named_parameters():
        assert (step.gradients[name] - parameter.grad).norm() <= 1e-10 * (1 + parameter.grad.norm()), name


def test_what_fits_and_what_splits_its_backwards_stays_on_the_device():
    roomy = found("gpt", "pp=2", "1f1b", 1.1, "activations").plan
    assert roomy.saved_on_host is None
    assert roomy.step_seconds == found("gpt", "pp=2", "1f1b", 1.1).plan.step_seconds
    split = found("gpt", "pp=2", "zb_h1", 0.8, "activations")
    assert split.plan.saved_on_host is None and not may_keep(split.stages.best.estimate)
