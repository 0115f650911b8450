"""Backwards that add to sums."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar import compiler
from autopar.compiler import lower_pipeline
from autopar.ir.graph import output_node
from autopar.passes.pipeline.add_gradients import add_gradients
from tests.runtime import tiny


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_gradient_is_added_to_its_sum(rank):
    model, batch = tiny.gpt2(n_layer=1)
    plan = autopar.plan(model, "pp=2", batch, hardware="cpu-gloo", baselines=False, schedule="1f1b", micro_batches=2)
    (program,) = lower_pipeline(compiler.trace(model, batch), plan, rank).stages.values()
    roles = output_node(program.backward.graph).meta["roles"]
    following, values = add_gradients(program.backward), []
    torch.manual_seed(0)
    for node in program.backward.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            make_one = torch.randn if value.is_floating_point() else torch.zeros
            values.append(make_one(value.shape, dtype=value.dtype))
    first = [t.clone() for t in program.backward(*values)]
    sums = [t.clone() for t, role in zip(first, roles) if role.kind == "gradient"]
    results = following(*values, *sums)
    places = iter(sums)
    for role, once, result in zip(roles, first, results, strict=True):
        if role.kind == "gradient":
            assert result.data_ptr() == next(places).data_ptr(), role
            torch.testing.assert_close(result, once + once, equal_nan=True, msg=role.name)
        else:
            torch.testing.assert_close(result, once, equal_nan=True, msg=role.name)
    nodes = list(following.graph.nodes)
    added = [at for at, n in enumerate(nodes) if n.target is torch.ops.aten.add_.Tensor]
    assert len(added) == len(sums) and all(nodes[at].args[1] is nodes[at - 1] for at in added)
