"""FP8("auto"): the plan is the fastest of those with FP8 on no layer, on all, and on the kinds of layers that gain."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autopar
from autopar.api import entry as api
from autopar.api.fp8_choice import chosen_in
from autopar.errors import MicroBatchError
from autopar.hardware.profile import load
from autopar.models import registry
from autopar.plans.plan import Plan
from tests.helpers import kept

AUTO = [autopar.FP8("auto")]
H100 = load("h100")
BARE = replace(H100.products["dense"], start_seconds=0.0)
FASTER = replace(H100, name="faster", products={"dense": BARE, "fp8": BARE, "fp8_block": BARE}, launch_seconds=1e-12)
MLP = "mlp:hidden=8192,ffn=8192,layers=2"


def _planned(hardware, adapt=AUTO, model: str = MLP, batch: int = 512, mesh: str = "dp=2") -> Plan:
    model, inputs = registry.build(model, batch=batch, seq=16, device="meta")
    options = dict(hardware=hardware, precision="bf16", strategy="fsdp", baselines=False)
    return kept.plan(model, mesh, inputs, adapt=adapt, **options)


def test_a_device_that_does_not_multiply_in_fp8():
    hardware = load("a100")
    plan = _planned(hardware)
    assert plan.fp8 == "none" and chosen_in(plan.fp8) is None and "FP8, as the planner chose: none" in str(plan)
    assert plan.step_seconds == _planned(hardware, ()).step_seconds


def test_the_fastest_of_all():
    plan = _planned(FASTER)
    tried = [_planned(FASTER, adapt).step_seconds for adapt in ((), [autopar.FP8("block")], [autopar.FP8("tensor")])]
    assert plan.fp8 != "none" and plan.step_seconds <= min(tried) < tried[0]
    assert plan.step_seconds == _planned(FASTER, [chosen_in(plan.fp8)]).step_seconds
    assert Plan.from_json(plan.to_json()) == plan and "fp8" not in _planned(FASTER, ()).to_json()


@pytest.mark.slow
def test_stages_take_blocks_alone():
    """A scale of the whole batch is known to no micro-batch."""
    text = "llama:hidden=256,layers=2,heads=2,kv_heads=2,ffn=256"
    model, inputs = registry.build(text, batch=4, seq=16, device="meta")
    options = dict(hardware=FASTER, precision="bf16", micro_batches=2, baselines=False)
    with pytest.raises(MicroBatchError):
        api.search(model, "pp=2", inputs, adapt=[autopar.FP8("tensor")], **options)
    plan = api.search(model, "pp=2", inputs, adapt=AUTO, **options).plan
    assert plan.fp8.partition(",")[0] in ("none", "block")


@pytest.mark.slow
def test_kinds_of_layers_that_gain():
    """A product with few columns is not worth the quantization in front of it: one head of keys and values stays."""
    model = "llama:hidden=4096,layers=1,heads=32,kv_heads=1,ffn=16384,vocab=128"
    plan = _planned(H100, model=model)
    assert plan.fp8 == "tensor,exclude_modules=k_proj+v_proj"
    within = autopar.FP8("auto", target_modules=r".*_proj", exclude_modules=r".*\.o_proj")
    found = chosen_in(_planned(H100, [within], model).fp8)
    assert found.target_modules == within.target_modules
    assert found.exclude_modules == r".*\.o_proj|(.*\.)?(k_proj|v_proj)"
    tried = [
        _planned(H100, adapt, model).step_seconds for adapt in ((), [autopar.FP8("block")], [autopar.FP8("tensor")])
    ]
    assert plan.step_seconds < min(tried)
