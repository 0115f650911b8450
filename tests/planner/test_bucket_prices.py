"""Price what travels in buckets as the buckets that are emitted."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autopar import Mesh, compiler
from autopar.compiler import lower
from autopar.cost.collectives import CollectiveCost
from autopar.cost.measured import SENT
from autopar.hardware.profile import load
from autopar.models import build
from autopar.planner.objective.pricer import average_fill
from autopar.planner.spmd.plan import make_plan
from autopar.planner.spmd.plan_options import PlanOptions

GPT = "gpt:hidden=64,layers=3,heads=2,vocab=128,seq=16"


def test_average_fill():
    assert average_fill([3, 3, 3], 6) == 4.5  # 3 + 3, 3
    assert average_fill([1, 2], 100) == 3  # one that is not full
    assert average_fill([4, 9, 4, 1], 8) == 4.5  # 4, then one alone, then 4 + 1
    assert average_fill([9], 8) == average_fill([], 8) == 8


@pytest.mark.sampled(1)
@pytest.mark.parametrize("bucket_bytes", [1 << 15, 1 << 17, 1 << 22])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_priced_as_the_buckets_that_are_emitted(captured, strategy, bucket_bytes):
    """Many buckets, few, and one that is far from full; each emitted collective is priced alone."""
    hardware = load("cpu-gloo")
    hardware = replace(hardware, links=(replace(hardware.links[-1], bucket_bytes=bucket_bytes),))
    plan = make_plan(captured, Mesh.parse("dp=4"), PlanOptions(hardware, strategy=strategy, baselines=False), "gpt")
    cost, sent = CollectiveCost(hardware, plan.mesh), {k: SENT[k](4) for k in SENT}
    nodes = lower(captured, plan, 0).local.graph.nodes
    run = [n.meta["collective"] for n in nodes if n.meta.get("collective")]
    emitted = math.fsum(cost.seconds(c.kind, c.axes, c.wire_bytes / sent[c.kind]) for c in run)
    assert plan.communication_seconds == pytest.approx(emitted, rel=0.15)


@pytest.fixture(scope="module")
def captured():
    module, inputs = build(GPT, batch=8, seq=16, device="meta")
    return compiler.trace(module, inputs)
