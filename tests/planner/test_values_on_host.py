"""Activations on the host: what they cost and free, when they are put there, and that they compute the same."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from autopar.api import entry as api
from autopar.compiler import lower
from autopar.errors import MemoryInfeasibleError, StrategyError
from autopar.hardware.profile import Host
from autopar.ir.graph import bytes_of
from autopar.models import build
from autopar.ops import autopar
from autopar.planner.objective.expand import whole_of
from autopar.planner.objective.host_travels import host_travels
from autopar.planner.objective.host_values import may_wait_on_host, saved_on_device, saved_on_host, taken
from autopar.planner.objective.memory_timeline import SAVED, live_bytes
from autopar.planner.objective.player import played_seconds
from autopar.planner.objective.timeline import HOST_LINK, simulate
from autopar.planner.spmd.planned import Planned
from autopar.plans.plan import Plan
from autopar.simulate import step
from autopar.simulate.oracle import global_values
from tests.helpers import kept

from .planning import make, toy

HOST = Host(link_bytes_per_second=2e10, memory_bytes_per_second=4e9, memory_bytes=10**9)
MACHINE = replace(toy(flops=1e10, memory=1e10, latency=1e-6, bucket=1 << 16), host=HOST)
MODELS = {
    "gpt": "gpt:hidden=32,layers=3,heads=2,vocab=32,seq=32",
    "llama": "llama:hidden=32,layers=3,heads=2,kv_heads=2,ffn=64,vocab=32,seq=32",
    "moe": "moe-tiny:layers=3",
}
OPTIONS = {"hardware": MACHINE, "baselines": False, "tile": "none", "fixes": False}


@functools.cache
def found(family: str, mesh: str, share: float | None = None, offload: str = "none", **options) -> Planned:
    """The search under a share of the memory that the fastest plan takes."""
    module, inputs = built(family)
    memory = None if share is None else share * found(family, mesh, **options).plan.peak_bytes
    asked = OPTIONS | options | {"offload": offload, "memory": memory}
    return api.search(module, mesh, inputs, cache=kept.captures(), **asked)


@functools.cache
def built(family: str):
    torch.manual_seed(0)
    module, inputs = build(MODELS[family], batch=8, seq=32, device="cpu")
    return module.double(), inputs


def sent_bytes(plan: Plan, captured, rank: int) -> int:
    nodes = lower(captured, plan, rank, check=True).parts.forward.graph.nodes
    return sum(bytes_of(n.args[0].meta["val"]) for n in nodes if n.target is autopar.to_host.default)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("family", "mesh", "strategy"), [
    ("gpt", "dp=2", "fsdp"), ("llama", "tp=2", "megatron"), ("llama", "dp=2,tp=2", None), ("moe", "dp=2", None),
    ("gpt", "tp=2", None), ("moe", "dp=2,tp=2", None),
])  # fmt: skip
def test_plans_with_little_memory_compute_the_same_in_less_time(family, mesh, strategy):
    module, inputs = built(family)
    options = {"strategy": strategy} if strategy else {}
    alone, planned = (found(family, mesh, 0.7, offload, **options) for offload in ("none", "activations"))
    plan, captured = planned.plan, planned.captured
    assert alone.plan.saved_on_host is None and plan.saved_on_host is not None
    assert plan.peak_bytes <= plan.memory_limit_bytes
    assert plan.bound <= plan.step_seconds <= alone.plan.step_seconds
    assert not strategy or plan.recompute_seconds < alone.plan.recompute_seconds
    assert "on the host between forward and backward" in str(plan) and Plan.from_json(plan.to_json()) == plan
    assert max(sent_bytes(plan, captured, rank) for rank in range(plan.mesh.devices)) == plan.saved_on_host.bytes_
    values = global_values(captured, module, inputs)
    want, got = (step.simulate_step(captured, p, values).gradients for p in (replace(plan, saved_on_host=None), plan))
    assert all(torch.equal(got[name], gradient) for name, gradient in want.items())
    module.zero_grad()
    module(**inputs).loss.backward()
    for name, parameter in module.named_parameters():
        assert (got[name] - parameter.grad).norm() <= 1e-10 * (1 + parameter.grad.norm()), name


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh"), [("gpt", "dp=2"), ("llama", "dp=2,tp=2"), ("moe", "tp=2")])
@pytest.mark.parametrize("offload", ["activations", "auto"])
def test_no_plan_is_slower_for_a_host(family, mesh, offload):
    for share in (1.1, 0.8, 0.5):
        try:
            without = found(family, mesh, share).plan.step_seconds
        except MemoryInfeasibleError:
            without = float("inf")
        try:
            plan = found(family, mesh, share, offload).plan
        except MemoryInfeasibleError:
            assert without == float("inf")
            continue
        assert plan.step_seconds <= without * (1 + 1e-9) and plan.peak_bytes <= plan.memory_limit_bytes
        assert share < 1 or plan.saved_on_host is None


@pytest.mark.slow
def test_what_fits_on_the_device_alone_goes_nowhere():
    model = MODELS["gpt"].replace("layers=3", "layers=1")
    plans = [make(model, "dp=2", MACHINE, offload=offload) for offload in ("none", "activations")]
    assert plans[0].saved_on_host is plans[1].saved_on_host is None
    assert plans[0].to_json() == plans[1].to_json()


def test_no_more_waits_on_the_host_than_that_has():
    """Values for which it has no room are computed again."""
    free = found("llama", "tp=2", 0.7, "activations", strategy="megatron").plan
    small = replace(HOST, memory_bytes=0.8 * free.saved_on_host.bytes_)
    less = {"strategy": "megatron", "hardware": replace(MACHINE, host=small)}
    plan = found("llama", "tp=2", 0.7, "activations", **less).plan
    assert 0 < plan.saved_on_host.bytes_ <= small.memory_bytes < free.saved_on_host.bytes_
    assert plan.peak_bytes <= plan.memory_limit_bytes and plan.recompute_seconds > free.recompute_seconds


def on_host(planned: Planned, speed: float = HOST.link_bytes_per_second, overlap: float = 0.0):
    """A plan with all values on the host that may be there."""
    e = replace(planned.evaluation, overlap=overlap)
    values = may_wait_on_host(planned.solver.blocks, e, speed)
    assert taken(values, sum(v.bytes_ * v.count for v in values)) == values
    return planned.solver.with_peak(saved_on_host(e, values))


def test_the_link_is_a_stream_of_its_own():
    """Copies beside compute cost nothing, those beyond that their own time."""
    planned = found("gpt", "dp=2")
    problem, pricer = planned.problem, planned.pricer
    plain = played_seconds(problem, replace(planned.evaluation, overlap=0.5), pricer)
    quick, slow = (on_host(planned, speed, 0.5) for speed in (1e15, 1e6))
    assert played_seconds(problem, quick, pricer) == pytest.approx(plain) and quick.seconds <= plain * (1 + 1e-9)
    update = slow.parameter_seconds
    assert slow.seconds == pytest.approx(slow.host_seconds + update)
    assert slow.seconds <= played_seconds(problem, slow, pricer) <= slow.host_seconds + plain
    assert slow.host_bytes == pytest.approx(slow.host_seconds / 2 * 1e6)
    timeline = simulate(problem, slow, pricer)
    assert timeline.busy_seconds[HOST_LINK] == pytest.approx(slow.host_seconds)
    assert {e.kind for e in timeline.events if e.streams == (HOST_LINK,)} == {"to host", "from host"}
    at_once = replace(slow, overlap=0.0)
    assert at_once.seconds == pytest.approx(replace(planned.evaluation, overlap=0.0).seconds + slow.host_seconds)
    assert played_seconds(problem, at_once, pricer) == pytest.approx(at_once.seconds)


def test_the_device_holds_values_on_their_way():
    planned = found("llama", "dp=2")
    problem, e = planned.problem, on_host(planned)
    assert saved_on_device(e).saved == pytest.approx(planned.evaluation.saved)
    before, after = (live_bytes(problem, one, planned.pricer) for one in (planned.evaluation, e))
    border = next(i for i, run in enumerate(after.order.runs) if run.phase == "backward")
    blocks = {planned.solver.blocks.block[value.key[0]] for value in e.on_host}
    assert len(blocks) == 2  # the last one's stay
    made = np.zeros(len(after.order.runs))
    for travel in host_travels(problem, e, after.order):
        made[travel.made :] += travel.value.bytes_
    on_their_way = (after.kinds[SAVED] - before.kinds[SAVED] + made)[:border]
    assert on_their_way[-1] == 0 < e.host_bytes / 2 < on_their_way.max()
    assert after.peak_bytes < before.peak_bytes and e.bytes_ == pytest.approx(after.peak_bytes)


@pytest.mark.slow
def test_a_deep_model_is_written_out_block_by_block():
    """The plan of few blocks costs what that of the whole graph does."""
    model = "llama:hidden=32,layers=14,heads=2,kv_heads=2,ffn=64,vocab=32,seq=32"
    module, inputs = build(model, batch=8, seq=32, device="meta")
    free = api.search(module, "dp=2", inputs, **OPTIONS)
    planned = api.search(module, "dp=2", inputs, **OPTIONS, offload="activations", memory=0.6 * free.plan.peak_bytes)
    assert planned.problem.compact is not None and planned.plan.saved_on_host is not None
    problem, e = whole_of(planned.problem, planned.evaluation)
    assert e.seconds == pytest.approx(planned.evaluation.seconds) and e.saved_bytes == pytest.approx(
        planned.evaluation.saved_bytes)  # fmt: skip
    assert len(planned.plan.saved_on_host.values) == len(e.on_host) > len(planned.evaluation.on_host)
    assert played_seconds(problem, e, planned.pricer) == pytest.approx(planned.chosen.seconds, rel=0.02)
    assert planned.plan.peak_bytes <= 1.02 * planned.plan.memory_limit_bytes


@pytest.mark.slow
def test_what_nothing_else_fits_is_planned():
    """Many blocks each save what they are computed again from."""
    module, inputs = build("gpt:hidden=32,layers=16,heads=2,vocab=32,seq=32", batch=32, seq=32, device="meta")
    options = OPTIONS | {"cache": kept.captures(), "strategy": "ddp"}
    with pytest.raises(MemoryInfeasibleError) as refused:
        api.search(module, "dp=2", inputs, **options, memory="1MiB")
    memory = 0.97 * (2**20 + refused.value.missing_bytes)
    with pytest.raises(MemoryInfeasibleError):
        api.search(module, "dp=2", inputs, **options, memory=memory)
    plan = api.search(module, "dp=2", inputs, **options, memory=memory, offload="activations").plan
    assert plan.saved_on_host is not None and plan.peak_bytes <= memory


def test_profiles_without_a_host_are_refused():
    module, inputs = built("gpt")
    for mesh in ("dp=2", "pp=2,dp=2"):
        with pytest.raises(StrategyError, match="nothing of a host"):
            api.plan(module, mesh, inputs, **OPTIONS | {"hardware": toy()}, offload="activations")


@pytest.mark.slow
def test_a_host_has_an_end():
    module, inputs = built("gpt")
    with pytest.raises(MemoryInfeasibleError, match="on the host"):
        small = replace(MACHINE, host=replace(HOST, memory_bytes=1000))
        memory = 0.7 * found("gpt", "dp=2", strategy="fsdp").plan.peak_bytes
        api.plan(module, "dp=2", inputs, **OPTIONS | {"hardware": small}, strategy="fsdp", offload="activations",
                 memory=memory)  # fmt: skip
