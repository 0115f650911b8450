"""A pipeline of a mixture of experts is no slower than Megatron's mapping with as many micro-batches and its schedule,
whatever the search without a strategy finds by itself."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import autopar
from autopar import compiler
from autopar.hardware.profile import load
from autopar.ir.mesh import Mesh
from autopar.planner.pipeline.micro_batch_plans import FEWER, ROUGH, MicroBatchPlans, Useful
from autopar.planner.problem.recipes import mapping_of_experts
from autopar.planner.spmd.plan_options import PlanOptions

MAPPING = "expert+megatron_sp+zero1"


def mixtral(layers: int = 4):
    """A Mixtral whose experts are most of it, and a batch of 32."""
    from transformers import AutoModelForCausalLM, MixtralConfig

    with torch.device("meta"):
        config = MixtralConfig(
            vocab_size=512, hidden_size=2048, intermediate_size=4096, num_hidden_layers=layers, num_attention_heads=8,
            num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config)
    ids = torch.zeros(32, 512, dtype=torch.long, device="meta")
    return model, {"input_ids": ids, "labels": ids}


def planned(
    mesh: str, strategy: str = "auto", schedule: str = "1f1b", stages_per_rank: int = 1, experts: str = ""
) -> autopar.Plan:
    """Plan it; `experts`: the layout of their stacks, if that is pinned."""
    model, inputs = mixtral()
    pins = {f"*experts.{name}": experts for name in ("gate_up_proj", "down_proj") if experts}
    return autopar.plan(
        model, mesh, inputs, hardware="h100", precision="bf16", micro_batches=8, schedule=schedule,
        stages_per_rank=stages_per_rank, baselines=False, fixes=False, strategy=strategy, pin=pins,
    )  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("1f1b", 1), ("interleaved_1f1b", 2)])
@pytest.mark.parametrize("mesh", ["pp=2,dp=2,tp=2", "pp=2,ep=4,tp=2", "pp=2,dp=2,ep=2,tp=2"])
def test_no_plan_is_slower_than_the_mapping(mesh, schedule, stages_per_rank):
    mapping, free = (planned(mesh, strategy, schedule, stages_per_rank) for strategy in (MAPPING, "auto"))
    assert free.strategy == "auto"
    assert free.step_seconds <= mapping.step_seconds * (1 + 1e-9)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("1f1b", 1), ("interleaved_1f1b", 2)])
@pytest.mark.parametrize(
    ("mesh", "experts"),
    [
        ("pp=2,dp=4,tp=2", "dp:S(0) tp:S(0)"),
        ("pp=2,ep=2,tp=4", "ep:S(0) tp:S(0)"),
        ("pp=2,dp=2,tp=2", "dp:S(0) tp:S(0)"),
    ],
)
def test_no_plan_is_slower_than_the_mapping_with_experts_over_the_tensor_axis(mesh, experts, schedule, stages_per_rank):
    mapping = planned(mesh, MAPPING, schedule, stages_per_rank, experts)
    free = planned(mesh, "auto", schedule, stages_per_rank)
    assert free.step_seconds <= mapping.step_seconds * (1 + 1e-9)


def test_the_mapping_is_taken_where_the_search_finds_worse(monkeypatch):
    """A search that knows one plan of a micro-batch alone, that of FSDP, takes the mapping's plan as its own."""
    every = MicroBatchPlans.at_prices

    def at_prices(plans: MicroBatchPlans, *useful):
        if plans.options.strategy != "auto":
            yield from every(plans, *useful)
            return
        one = plans.under("expert+fsdp").fastest
        yield replace(one, options=plans.options, chosen=plans.renamed(one.chosen))

    mapping, fsdp = (planned("pp=2,dp=2,tp=2", strategy) for strategy in (MAPPING, "expert+fsdp"))
    monkeypatch.setattr(MicroBatchPlans, "at_prices", at_prices)
    free = planned("pp=2,dp=2,tp=2")
    assert mapping.step_seconds < fsdp.step_seconds
    assert free.step_seconds <= mapping.step_seconds * (1 + 1e-9)
    assert free.strategy == "auto" and free.bound <= free.step_seconds


def test_prices_end_where_no_plan_of_use_holds_less():
    """All that is left out takes longer than is of use, or holds almost as much as the last one; a search errs by its
    gap."""
    captured = compiler.trace(*mixtral(), precision="bf16")
    options = PlanOptions(load("h100"), precision="bf16", baselines=False)
    plans = MicroBatchPlans(captured, 8, Mesh.parse("pp=2,dp=2,tp=2"), "pp", options, "mixtral", print)
    every, ended = list(plans.at_prices()), 0
    for times in (1.0, 1.02, 1.2, 2.0, math.inf):
        some = list(plans.at_prices(Useful(times)))
        assert [one.evaluation.choice for one in some] == [one.evaluation.choice for one in every[: len(some)]]
        last, ended = some[-1].evaluation, ended + (len(some) < len(every))
        for one in every[len(some) :]:
            e = one.evaluation
            near = e.bytes_ >= (1 - FEWER - 2 * ROUGH.gap) * last.bytes_
            assert e.seconds > times * last.seconds * (1 - 2 * ROUGH.gap) or near
    assert 0 < ended < 5


def test_meshes_of_the_mapping():
    for mesh, name in (("dp=4,tp=2", MAPPING), ("ep=4,tp=2", MAPPING), ("tp=8", None), ("dp=4,ep=2", None)):
        assert mapping_of_experts(autopar.Mesh.parse(mesh)) == name
