"""Stages that are sharded apart train as one process does, also in calls that the plan was not made for."""

from __future__ import annotations

import pytest
import torch

from autopar import compiler
from autopar.passes.pipeline.micro_batch import micro_batch
from autopar.plans.pipeline_text import sharding_lines
from autopar.plans.plan import Plan
from tests.helpers import gloo, mixtures, staged

from . import tiny
from .parity import assert_close, device_mesh, pair

MESH = "pp=2,dp=2"


def _plan() -> Plan:
    captured = compiler.trace(*tiny.gpt2(n_layer=1))
    micro = micro_batch(captured, 2)
    plans = mixtures.plans_of(micro, MESH, ("ddp", "fsdp"))
    plan, _ = mixtures.mixture(captured, micro, plans, MESH, "1f1b", (0, 1), staged.even_cuts(micro.captured, 2))
    assert len(plan.shardings) == 2 and plan.shardings == Plan.from_json(plan.to_json()).shardings
    assert "stages are sharded apart" in "".join(sharding_lines(plan))
    return plan


def _train(rank: int, plan: Plan) -> tuple[str, ...]:
    """One stage with its parameters whole, one with them sharded: two steps, an evaluation, another batch size."""
    model, batch = tiny.gpt2(n_layer=1)
    parallel, reference = pair(model, device_mesh(MESH), batch, plan=plan)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (parallel, reference)]
    for _ in range(2):
        loss, wanted = parallel(**batch).loss, reference(**batch).loss
        assert_close(loss, wanted, "loss", 1e-5)
        loss.backward()
        wanted.backward()
        theirs = dict(reference.named_parameters())
        for name, parameter in parallel.named_parameters():
            assert_close(parameter.grad, theirs[name].grad, name, 1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    half = {name: value[:4] for name, value in batch.items()}
    with torch.no_grad():
        for m in (parallel, reference):
            m.eval()
        assert_close(parallel(**half).loss, reference(**half).loss, "loss of half the batch", 1e-5)
    return tuple(sorted({str(p.placements) for p in parallel.parameters() if hasattr(p, "placements")}))


@pytest.mark.gloo
def test_a_stage_of_whole_parameters_and_one_of_shards():
    found = gloo.run(4, _train, _plan(), seconds=240)
    assert found[0] == found[1] and found[2] == found[3] and found[0] != found[2]
