"""Key-value heads are replicated where more devices share an attention's heads than there are, or a number that does
not divide them: a step equals one device's to 1e-10."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

import autopar
from autopar.rules.layers import QUERY_HEADS
from autopar.simulate.compare import verify_model

from ..helpers.sequences import Decoder, batch
from .test_sequence import OPEN, SIZES, WithLoss


def llama(heads: int, kv_heads: int) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = SIZES | {"num_attention_heads": heads, "hidden_size": 8 * heads, "intermediate_size": 12 * heads}
    return WithLoss(hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_key_value_heads=kv_heads, **OPEN))).double()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("heads, kv_heads, mesh, strategy", [
    (8, 2, "tp=4", "megatron"), (8, 2, "tp=8", "megatron_sp"), (8, 4, "tp=8", "megatron"), (8, 2, "dp=2,tp=4", None),
    (12, 4, "tp=3", "megatron"), (12, 4, "tp=6", "megatron"), (12, 3, "tp=2", "megatron_sp"), (6, 3, "tp=4", None),
    (8, 1, "tp=4", "megatron"), (8, 8, "tp=8", "megatron"), (8, 2, "dp=2,tp=4", "megatron+fsdp"),
    (8, 2, "cp=2,tp=4", "ring+megatron_sp"), (8, 2, "cp=2,tp=4", "all_gather_kv+megatron"),
    (8, 2, "cp=2,tp=4", "ulysses+megatron"), (8, 2, "cp=8", "ulysses"), (8, 4, "pp=2,tp=8", "megatron"),
])  # fmt: skip
def test_more_devices_than_heads_of_keys(heads, kv_heads, mesh, strategy):
    options = {"micro_batches": 2} if "pp" in mesh else {}
    report = verify_model(llama(heads, kv_heads), batch(12, "left", 4), mesh, strategy=strategy, **options)
    assert report.match and max(report.errors.values()) <= 1e-10, report


@pytest.mark.slow
def test_heads_of_queries_are_cut_and_weights_stay_cut():
    plan = autopar.plan(llama(8, 2), "tp=4", batch(12, ""), strategy="megatron", baselines=False)
    assert {n.choice for name, n in plan.sharding.nodes.items() if name.startswith("attention")} == {(QUERY_HEADS,)}
    projections = {
        f"{x}_proj": str(layout) for name, layout in plan.layouts.items() for x in "qkv" if f"{x}_proj" in name
    }
    assert projections == dict.fromkeys(("q_proj", "k_proj", "v_proj"), "tp:S(0)")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", ["kv=2,tp=2", "tp=2,kv=2"])
def test_groups_over_one_axis_and_their_queries_over_another(mesh):
    report = verify_model(Decoder("causal", 8, 2), batch(12, ""), mesh, strategy=None)
    assert report.match and max(report.errors.values()) <= 1e-10, report
