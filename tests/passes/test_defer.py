"""Gradients that are reduced later are those that are reduced at once, and their reductions are the ones put off."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from autopar.compiler import lower, lower_deferred
from autopar.ir.graph import output_node
from autopar.passes.distribute.defer import unreduced_layouts
from autopar.simulate.collectives import Simulator
from autopar.simulate.oracle import global_values
from autopar.simulate.step import plan_and_capture
from tests.runtime import tiny

from .lowering import local_inputs

CASES = [("dp=2", "ddp"), ("dp=3", "zero1"), ("dp=2,tp=2", "fsdp"), ("dp=2,tp=2", "megatron")]


@pytest.mark.parametrize("mesh, strategy", CASES)
def test_reduced_later(mesh, strategy):
    x, y = tiny.Regressor.batch(7)
    model, inputs = tiny.Regressor(hidden=31, loss=True), dict(x=x, target=y)
    plan, captured = plan_and_capture(model, mesh, inputs, hardware="cpu-gloo", baselines=False, strategy=strategy)
    programs = [lower(captured, plan, rank) for rank in range(plan.mesh.devices)]
    later = [lower_deferred(captured, plan, p.rank, p.parts.saved) for p in programs]
    feeds, tangents = zip(*(local_inputs(p.local, global_values(captured, model, inputs)) for p in programs))

    forward = Simulator(plan.mesh).run([p.parts.forward for p in programs], feeds)
    saved = [r[len(r) - len(p.parts.saved) :] for r, p in zip(forward, programs)]
    values = [(*s, *t) for s, t in zip(saved, tangents)]
    together, apart, reducing = (Simulator(plan.mesh) for _ in range(3))
    expected = together.run([p.parts.backward for p in programs], values)
    partial = apart.run([d.backward for d in later], values)
    names = [r.name for r in output_node(captured.graph).meta["roles"] if r.kind == "gradient"]
    put_off = list(unreduced_layouts(captured.graph, plan.sharding))
    assert put_off == list(later[0].layouts) and {"up.weight", "down.weight"} <= set(put_off)
    # twice the same micro-batch: twice the gradient, for one reduction
    sums = [[2 * gradients[names.index(name)] for name in put_off] for gradients in partial]
    reduced = reducing.run([d.reduce for d in later], sums)
    for rank, gradients in enumerate(expected):
        for name, whole in zip(names, gradients):
            found = reduced[rank][put_off.index(name)] / 2 if name in put_off else partial[rank][names.index(name)]
            torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-7, msg=f"{name} on rank {rank}")
    calls = Counter((op, axes) for op, axes, _ in apart.calls + reducing.calls)
    assert reducing.calls and calls.total() <= len(together.calls)
    assert sum(apart.bytes_sent) + sum(reducing.bytes_sent) <= sum(together.bytes_sent) * (1 + 1e-9)
    if strategy == "ddp":
        assert not apart.calls
