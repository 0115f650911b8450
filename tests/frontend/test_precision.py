"""precision="bf16" and "fp16": fp32 masters, narrow compute, fp32 reduction; and models that are fp64 or bf16
themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar import compiler
from autopar.api import entry as api
from autopar.codegen.verify_graph import collectives
from autopar.errors import StrategyError
from autopar.frontend.precision import computing_in, narrowed, precision_name
from autopar.ir.graph import output_node
from autopar.simulate.compare import verify_model
from autopar.simulate.oracle import global_values, one_device_step
from autopar.simulate.step import plan_and_capture, simulate_step

from ..runtime import tiny

LLAMA = "llama:hidden=32,layers=1,heads=4,kv_heads=2,ffn=48,vocab=96"
BATCH = tiny.Regressor.batch()
MODELS = {"gpt2": lambda: tiny.gpt2(n_layer=1), "llama": lambda: tiny.own(LLAMA)}


def errors(mine: dict, whole: dict) -> float:
    floor = 1e-2 * max(t.norm().item() for t in whole.values())
    return max((mine[n].double() - t.double()).norm().item() / max(t.norm().item(), floor) for n, t in whole.items())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name, mesh, strategy", [
    ("gpt2", "tp=2", "megatron_sp"), ("gpt2", "dp=3", "fsdp"), ("llama", "dp=2,tp=2", "megatron"),
    ("llama", "dp=2", "auto"),
])  # fmt: skip
def test_step_against_the_policy_and_against_fp32(name, mesh, strategy):
    model, inputs = MODELS[name]()
    plan, captured = plan_and_capture(
        model, mesh, inputs, strategy=strategy, precision="bf16", hardware="cpu-gloo", baselines=False
    )
    values = global_values(captured, model, inputs)
    step = simulate_step(captured, plan, values)
    outputs, gradients, _ = one_device_step(captured, values)
    assert {t.dtype for t in (step.loss, *step.gradients.values(), *gradients.values())} == {torch.float32}
    assert step.loss.item() == pytest.approx(outputs[0].item(), rel=2e-3) and errors(step.gradients, gradients) < 2e-2
    loss = model(**inputs).loss
    loss.backward()
    exact = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert step.loss.item() == pytest.approx(loss.item(), rel=1e-2) and errors(step.gradients, exact) < 6e-2


def moved(plan, captured, rank: int = 0):
    """(phase, kind, dtype) of the collectives of parameters and of gradients."""
    from autopar.compiler import lower

    local = lower(captured, plan, rank).local
    found = [n for n in local.graph.nodes if n.meta.get("collective")]
    kinds = [(n.meta["collective"].phase, n.meta["collective"].kind) for n in found]
    assert len(collectives(local)) == len(kinds)
    return {(*kind, c[3]) for kind, c in zip(kinds, collectives(local))}


def test_gathers_are_narrow_and_reductions_wide():
    model, inputs = MODELS["gpt2"]()
    plan, captured = plan_and_capture(
        model, "dp=2", inputs, strategy="fsdp", precision="bf16", hardware="cpu-gloo", baselines=False
    )
    found = moved(plan, captured)
    gathers = {dtype for _, kind, dtype in found if kind == "all_gather"}
    sums = {dtype for phase, kind, dtype in found if kind in ("reduce_scatter", "all_to_all") and phase == "backward"}
    assert gathers == {"bfloat16"} and sums == {"float32"}, found
    masters = [
        n.meta["val"].dtype
        for n in captured.graph.nodes
        if n.op == "placeholder" and n.meta["role"].kind == "parameter"
    ]
    gradients = [n.meta["val"].dtype for n, r in zip(output_node(captured.graph).args[0],
                                                     output_node(captured.graph).meta["roles"])
                 if r.kind == "gradient"]  # fmt: skip
    assert set(masters) == set(gradients) == {torch.float32}


class Twice(nn.Module):
    """A weight that is used twice, one of them transposed, a frozen one, a batch norm, and buffers of both kinds."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.frozen = (
            nn.Parameter(torch.randn(8, 8) / 3),
            nn.Parameter(torch.randn(8), requires_grad=False),
        )
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("kept", torch.tensor([1.0 + 2**-20] * 8), persistent=False)
        self.register_buffer("cast", torch.tensor([1.0 + 2**-20] * 8))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x, target):
        self.seen = {n: getattr(self, n).dtype for n in ("weight", "kept", "cast")} | {
            "x": x.dtype,
            "norm": self.norm.weight.dtype,
        }
        y = torch.relu(x @ self.weight) @ self.weight.t() * self.cast + self.frozen
        return nn.functional.mse_loss(self.norm(y), target)


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2"])
def test_what_is_cast(mesh):
    model, inputs = Twice(), (torch.randn(8, 8), torch.randn(8, 8))
    report = verify_model(model, inputs, mesh, precision="bf16")
    assert report.match, str(report)
    narrow, wide = torch.bfloat16, torch.float32
    assert model.seen == {"weight": narrow, "kept": wide, "cast": narrow, "x": narrow, "norm": wide}
    assert {p.dtype for p in model.parameters()} == {wide} and type(model._parameters) is dict


def test_gradients_of_a_shared_weight_are_added_wide():
    captured = compiler.trace(Twice(), (torch.randn(8, 8), torch.randn(8, 8)), precision="bf16")
    output = output_node(captured.graph)
    (gradient,) = [
        n for n, r in zip(output.args[0], output.meta["roles"]) if r.kind == "gradient" and r.name == "weight"
    ]
    assert gradient.target is torch.ops.aten.add.Tensor
    assert {a.meta["val"].dtype for a in gradient.all_input_nodes} == {torch.float32}


def test_buffers_that_a_forward_writes_keep_their_values():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(2))

        def forward(self, x):
            self.total.add_(x)
            return x * self.total

    model = Counting()
    with computing_in(model, torch.bfloat16):
        model(torch.ones(2, dtype=torch.bfloat16))
    assert model.total.tolist() == [1.0, 1.0] and model.total.dtype == torch.float32


def test_narrowed_leaves_what_is_not_wider():
    half, whole = torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.int64)
    assert (
        narrowed(half, torch.bfloat16) is half
        and narrowed(whole, torch.bfloat16) is whole
        and narrowed("x", None) == "x"
    )
    assert narrowed(torch.ones(2, dtype=torch.float64), torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("precision, name", [
    (torch.float32, "fp32"), ("float32", "fp32"), (torch.bfloat16, "bf16"), ("bfloat16", "bf16"), ("BF16", "bf16"),
    (torch.float16, "fp16"), (torch.half, "fp16"), ("fp16", "fp16"), ("half", "fp16"),
])  # fmt: skip
def test_names(precision, name):
    plan = api.plan(nn.Linear(2, 2), "dp=2", (torch.ones(2, 2),), precision=precision, baselines=False)
    assert plan.precision == precision_name(precision) == name


@pytest.mark.parametrize("precision", ["fp8", torch.float64, torch.int8, 16, None])
def test_unknown_names(precision):
    with pytest.raises(StrategyError, match=r"no precision (.|\n)*use one of bf16, fp16, fp32, float32, .*bfloat16"):
        api.plan(nn.Linear(2, 2), "dp=2", (torch.ones(2, 2),), precision=precision)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name, mesh, strategy", [("gpt2", "tp=2", "megatron_sp"), ("llama", "dp=2", "fsdp")])
def test_fp16_is_verified_against_the_model(name, mesh, strategy):
    model, inputs = MODELS[name]()
    report = verify_model(model, inputs, mesh, precision=torch.float16, strategy=strategy)
    assert report.match and report.wide.match and report.precision == "fp16", str(report)
    assert max(report.gradient_errors.values()) < 1e-2 and "fp16" in str(report.plan)


@pytest.mark.parametrize("function, options", [
    (autopar.explain, dict(pattern="*weight")), (autopar.estimate, {}), (autopar.verify, {}),
])  # fmt: skip
def test_functions_take_types(function, options):
    call = dict(mesh="dp=2", example_inputs=dict(zip(("x", "target"), BATCH)), **options)
    results = [str(function(tiny.Regressor(loss=True), precision=p, **call)) for p in (torch.bfloat16, "bf16", "fp32")]
    assert results[0] == results[1] != results[2]


def test_masters_follow_fp32_for_twenty_steps():
    """AdamW on the wide gradients: the loss curve is that of fp32 training, and no update is lost to rounding."""
    curves, weights = {}, {}
    for precision in ("bf16", "fp32"):
        model, inputs = MODELS["llama"]()
        captured = compiler.trace(model, inputs, precision=precision)
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
        for _ in range(20):
            outputs, gradients, _ = one_device_step(captured, global_values(captured, model, inputs))
            for name, parameter in model.named_parameters():
                parameter.grad = gradients[name].clone()
            optimizer.step()
            losses.append(outputs[0].item())
        curves[precision], weights[precision] = losses, dict(model.named_parameters())
    assert curves["bf16"][-1] < curves["bf16"][0] - 0.5
    assert max(abs(a - b) for a, b in zip(curves["bf16"], curves["fp32"])) < 0.05
    assert errors(weights["bf16"], weights["fp32"]) < 0.1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.bfloat16, 3e-2)])
def test_models_run_in_their_own_types(dtype, tolerance):
    """precision="fp32" casts nothing."""
    model, inputs = MODELS["llama"]()
    plan, captured = plan_and_capture(
        model.to(dtype), "tp=2", inputs, strategy="megatron_sp", hardware="cpu-gloo", baselines=False
    )
    step = simulate_step(captured, plan, global_values(captured, model, inputs))
    loss = model(**inputs).loss
    loss.backward()
    exact = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert {g.dtype for g in step.gradients.values()} == {dtype} and step.loss.dtype == loss.dtype
    assert step.loss.item() == pytest.approx(loss.item(), rel=tolerance) and errors(step.gradients, exact) <= tolerance
    bytes_ = 4 * dtype.itemsize * sum(p.numel() for p in model.parameters())
    assert sum(plan.memory.get(k, 0) for k in ("parameters", "gradients", "optimizer")) < bytes_
