"""Wrong numbers without an error that others had where sequences or experts are cut: a step here is one device's.

Every docstring begins with the threads and says what went wrong there. Others are in tests/faithful/threads.py.
"""

from __future__ import annotations

import pytest
import torch
import transformers as hf

from autopar import compiler
from autopar.frontend.fake_parameters import forms_of
from autopar.ir.mesh import Mesh
from autopar.planner.problem.allowed import allowed_strategies
from autopar.planner.solver import solver
from autopar.planner.spmd.plan import make_plan
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.simulate import step
from autopar.simulate.compare import verify_plan
from autopar.simulate.oracle import global_values, one_device_step, relative_error

from ..families import FAMILIES
from ..helpers import mixture
from ..helpers.sequences import Decoder, Mixed, batch
from ..planner.planning import toy
from . import test_documents as documents
from .test_experts import Mixture, check
from .test_sequence import OPEN, SIZES, WithLoss, assert_same

EXACT = 1e-10
SCHEMES = ("all_gather_kv", "ring", "ulysses")


def llama(**sizes) -> torch.nn.Module:
    torch.manual_seed(0)
    config = hf.LlamaConfig(**SIZES, **OPEN, num_key_value_heads=2, use_cache=False, **sizes)
    return WithLoss(hf.LlamaForCausalLM(config)).double()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", SCHEMES)
def test_a_document_sees_another(strategy):
    """trl#6843: documents that were packed into a row attended to one another. Each has here the loss that it has by
    itself, on other documents than those that were planned with."""
    lengths, pin = (5, 7, 4), {"input_ids": "cp:Z(1)"} if strategy != "ulysses" else {}
    model = llama()
    documents.assert_same(
        model, documents.flattened(6, 6, 4), [documents.flattened(*lengths)], "cp=2", strategy=strategy, pin=pin
    )
    row, start, losses = documents.flattened(*lengths), 0, []
    for length in lengths:  # the oracle itself: eager, a document at a time
        ids = row["input_ids"][:, start : start + length]
        losses.append(model(ids.masked_fill(torch.arange(length) == 0, -100), input_ids=ids) * (length - 1))
        start += length
    torch.testing.assert_close(model(**row), sum(losses) / (sum(lengths) - len(lengths)), rtol=1e-10, atol=1e-10)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", ["cp=2", "cp=4"])
@pytest.mark.parametrize("strategy", SCHEMES)
def test_losses_times_or_over_the_devices(strategy, mesh):
    """transformers#46775, VeOmni#338: loss and gradients were multiplied, or divided, by the devices that cut the
    sequence. Here on samples with other numbers of labels too."""
    assert_same(Decoder("padded", 4, 4), batch(12, "right"), mesh, strategy)


def test_keys_of_another_forward():
    """diffusers#14265: the backward of a ring read keys and values that a later one had overwritten. Here several
    attentions have several micro-batches in flight."""
    assert_same(Mixed("full", 4, 2), batch(12, samples=4), "cp=3", "ring", micro_batches=2)
    options = {"micro_batches": 4, "schedule": "1f1b"}
    assert_same(llama(), batch(12, samples=4) | {"attention_mask": torch.ones(4, 12)}, "pp=2,cp=2", "ring", **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_gradients_of_queries_keys_and_values(kv_heads, zigzag):
    """Megatron-LM#1464, TransformerEngine#1557: dQ, dK and dV of cut attention were off."""
    pin = {"input_ids": "cp:Z(1)"} if zigzag else {}
    for strategy in ("ring", "all_gather_kv"):
        assert_same(Decoder("causal", 4, kv_heads), batch(16), "cp=4", strategy, pin=pin)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", SCHEMES)
@pytest.mark.parametrize("mesh, length", [("cp=2", 13), ("cp=4", 15), ("cp=4", 7)])
def test_odd_lengths(mesh, length, strategy):
    """TransformerEngine#1929, #1930, Megatron-LM#1669: tokens were lost of lengths that the devices do not divide."""
    assert_same(Decoder("causal", 4, 4), batch(length), mesh, strategy)


@pytest.mark.parametrize("strategy", SCHEMES)
def test_windows(strategy):
    """prime-rl#2828: the ring ignored the sliding window."""
    torch.manual_seed(0)
    sizes = SIZES | OPEN | {"num_attention_heads": 4, "num_key_value_heads": 4, "sliding_window": 3}
    model = WithLoss(hf.MistralForCausalLM(hf.MistralConfig(**sizes))).double()
    assert_same(model, batch(16), "cp=4", strategy)
    whole = WithLoss(hf.MistralForCausalLM(hf.MistralConfig(**sizes | {"sliding_window": 16}))).double()
    whole.load_state_dict(model.state_dict())
    assert (model(**batch(16)) - whole(**batch(16))).abs() > 1e-6  # or the window would say nothing


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", SCHEMES)
@pytest.mark.parametrize("shift", ["pad", "cut"])
def test_labels_at_borders(shift, strategy):
    """DeepSpeed#8457: labels were shifted after the split, so that the last token of each device had a wrong one."""
    assert_same(Decoder("causal", 4, 4, shift=shift), batch(12), "cp=4", strategy)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "qwen3_moe"])
@pytest.mark.parametrize("mesh, strategy", [("ep=2", "expert"), ("ep=4", "expert"), ("dp=2,ep=2", "expert+fsdp")])
def test_gradients_of_experts_times_the_devices(name, mesh, strategy):
    """pytorch#160285, #167178: gradients of experts were as many times too large as devices had them. Families compute
    their routers in fp32."""
    torch.manual_seed(0)
    model, given = FAMILIES[name](8, 6)
    plan, captured = step.plan_and_capture(model, mesh, given, hardware="cpu-gloo", baselines=False, strategy=strategy)
    report = verify_plan(captured, plan, model, given)
    assert max(report.errors.values()) <= 1e-5, report.errors
    assert any("experts" in key and "ep" in layout for key, layout in plan.layouts.items())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{"micro_batches": 4}, {"micro_batches": 4, "recompute": "full"}])
@pytest.mark.parametrize("mesh", ["ep=2", "dp=2,ep=2"])
def test_gradients_times_powers_of_two(mesh, options):
    """Megatron-LM#6660: gradients of experts were 2^N times too large. Here in several micro-batches that add up, with
    all computed again too."""
    check(Mixture(4), mesh, "expert", 16, **options)


@pytest.fixture
def cut_features(monkeypatch):
    """The first products of experts are cut by their outputs over `tp`, the second ones by what they sum up."""
    factors = {"grouped_mm": "n", "grouped_mm_1": "k"}

    def allowed(problem, restriction, pins=None):
        masks, axis = allowed_strategies(problem, restriction, pins), problem.mesh.names.index("tp")
        for cls, options in problem.classes.items():
            if factor := factors.get(problem.vertices[cls].name):
                masks[cls] &= [strategy.choice[axis] == factor for strategy in options.strategies]
        return masks

    monkeypatch.setattr(solver, "allowed_strategies", allowed)


def assert_same_gradients(captured, plan, model, given):
    values = global_values(captured, model, given)
    wanted, found = one_device_step(captured, values), step.simulate_step(captured, plan, values)
    assert wanted.gradients and found.gradients.keys() == wanted.gradients.keys()
    for name, gradient in wanted.gradients.items():
        assert relative_error(found.gradients[name], gradient) <= EXACT, name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh, strategy", [("tp=2", "auto"), ("tp=4", "auto"), ("ep=2,tp=2", "expert+megatron_sp")])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_adapters_of_experts_over_tensor_axes(mesh, strategy, kind, cut_features):
    """Megatron-Bridge#5634: adapters of experts whose features are cut had wrong outputs and gradients."""
    model, given = mixture.Mixture(kind, 1.0), {"x": torch.randn(6, 5, 16, dtype=torch.float64)}
    adapters = mixture.with_adapters(model)
    captured = compiler.trace(model, given, None, forms_of(model), "fp32", adapters)
    plan = make_plan(captured, Mesh.parse(mesh), PlanOptions(toy(), strategy=strategy, baselines=False))
    assert ("tp", "sum") in plan.sharding.nodes["grouped_mm_1"].outputs[0].partial
    assert_same_gradients(captured, plan, model, given)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize(
    "mesh, strategy, layout",
    [("dp=2", "fsdp", "dp:S(0)"), ("dp=3", "fsdp", "dp:S(0)"), ("dp=2,ep=2", "expert+fsdp", "dp:S(0)")],
)
def test_adapters_of_experts_that_are_cut(mesh, strategy, layout, kind):
    """peft#3080: the matrices of adapters, which hold those of all experts, were read as if whole where each device
    has a part of them alone."""
    model, given = mixture.Mixture(kind), {"x": torch.randn(6, 5, 16, dtype=torch.float64)}
    adapters = mixture.with_adapters(model)
    captured = compiler.trace(model, given, None, forms_of(model), "fp32", adapters)
    options = PlanOptions(toy(), strategy=strategy, baselines=False, pin={"*lora_*": layout})
    plan = make_plan(captured, Mesh.parse(mesh), options)
    assert sum(layout in found for name, found in plan.layouts.items() if "lora_" in name) >= 4
    assert_same_gradients(captured, plan, model, given)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh, strategy", [("tp=2", "auto"), ("tp=4", "auto"), ("ep=2,tp=2", "expert+megatron_sp")])
@pytest.mark.parametrize("bias", ["tp:R", "tp:S(1)"])
def test_biases_of_experts_times_the_devices(mesh, strategy, bias, cut_features):
    """torchtitan#4245: experts whose inner features are cut added their whole bias on each device before the sum; and
    #4054: gradients below them were one device's. Many tokens go to one expert here."""
    model, given = mixture.Mixture("gpt_oss", 1.0), {"x": torch.randn(6, 5, 16, dtype=torch.float64)}
    captured = compiler.trace(model, given, None, forms_of(model), "fp32")
    pin = {"*down_proj_bias": bias} if strategy == "auto" else {}
    plan = make_plan(captured, Mesh.parse(mesh), PlanOptions(toy(), strategy=strategy, baselines=False, pin=pin))
    assert ("tp", "sum") in plan.sharding.nodes["grouped_mm_1"].outputs[0].partial
    assert_same_gradients(captured, plan, model, given)
