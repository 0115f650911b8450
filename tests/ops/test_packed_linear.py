"""Products of few rows with codes of a weight: what the kernel gives, and where it is taken."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar import Mesh, compiler
from autopar.adapt import order
from autopar.frontend.device import move
from autopar.frontend.fake_parameters import forms_of
from autopar.hardware.profile import load
from autopar.models import build
from autopar.ops import autopar as ops
from autopar.ops import packed_linear
from autopar.ops.nf4 import dequantize, quantize
from autopar.planner.spmd.plan import make_plan
from autopar.planner.spmd.plan_options import PlanOptions
from tests.helpers.fake_cuda import CUDA
from tests.helpers.triton_alone import NEEDS_TRITON, run_alone

PARTS = ("packed", "absmax", "scale", "offset")
SIZES = [(1, 64, 128, 64), (3, 100, 192, 32), (16, 48, 512, 64), (7, 33, 64, 16)]  # rows, outputs, inputs, block


def case(rows, outputs, inputs, block, quant_type, doubly, dtype, device="cpu"):
    """x, the tensors of a weight, and the product of x and the dequantized weight."""
    generator = torch.Generator().manual_seed(rows)
    weight, x = (torch.randn(n, inputs, generator=generator).to(device) for n in (outputs, rows))
    parts = quantize(weight, quant_type, block, doubly)
    tensors, x = [parts.get(part) for part in PARTS], x.to(dtype)
    return x, tensors, x.double() @ dequantize(*tensors, quant_type, dtype).double().t()


def check(product, device="cpu", types=(torch.float32, torch.float16)) -> None:
    for quant_type in ("nf4", "fp4"):
        for doubly in (True, False):
            for size in SIZES:
                for dtype in types:
                    x, tensors, wanted = case(*size, quant_type, doubly, dtype, device)
                    found = product(x, *tensors, quant_type)
                    error = (found.double() - wanted).abs().max() / wanted.abs().max()
                    assert found.dtype == dtype and error < (1e-6 if dtype == torch.float32 else 8e-3), (size, dtype)


def test_elsewhere_the_weight_is_dequantized():
    check(ops.packed_linear)
    x, tensors, wanted = case(*SIZES[0], "nf4", True, torch.float32)
    assert ops.packed_linear(x.view(1, 1, -1), *tensors, "nf4").shape == (1, 1, wanted.shape[1])


def by_kernel(x, packed, absmax, scale, offset, quant_type):
    from autopar.ops.packed_linear_kernel import product

    return product(x, packed, absmax, scale, offset, packed_linear.book_of(quant_type, x.device))


@NEEDS_TRITON
def test_the_kernel_in_tritons_interpreter():
    """It runs on the processor, but for bf16, whose products the interpreter gets wrong."""
    program = "from tests.ops.test_packed_linear import by_kernel, check; check(by_kernel)"
    run_alone(program, TRITON_INTERPRET="1")


def compiles(dtype: str, capability: int) -> None:
    """Compile to machine code, with tensor cores in half precision; no GPU is needed for that."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from autopar.ops import packed_linear_kernel as kernel

    sizes = {"DOUBLY": True, "ROWS": kernel.ROWS, "OUTPUTS": kernel.OUTPUTS, "PAIRS": kernel.PAIRS}
    tensors = {"x": f"*{dtype}", "out": f"*{dtype}", "packed": "*u8", "absmax": "*i8"}
    tensors |= dict.fromkeys(("scale", "offset", "book"), "*fp32") | dict.fromkeys(sizes, "constexpr")
    signature = {name: tensors.get(name, "i32") for name in kernel._kernel.arg_names}
    made = triton.compile(
        ASTSource(kernel._kernel, signature, constexprs=sizes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": kernel.WARPS},
    )
    assert made.asm["cubin"] and ("mma" in made.asm["ptx"]) == (dtype != "fp32"), (dtype, capability)


@NEEDS_TRITON
def test_the_kernel_compiles_for_gpus():
    cases = [(dtype, capability) for dtype in ("bf16", "fp16", "fp32") for capability in (80, 90)]
    run_alone(f"from tests.ops.test_packed_linear import compiles; [compiles(*case) for case in {cases}]")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_on_a_gpu():
    check(ops.packed_linear, "cuda", (torch.bfloat16, torch.float16))


@pytest.mark.parametrize(("seq", "is_taken"), [(4, True), (16, False)])
def test_few_rows_on_a_gpu_are_multiplied_with_codes(seq, is_taken):
    """The weights of other layers, and the gradients of all, are as they were."""
    model, inputs = build(
        "llama:hidden=64,layers=1,heads=4,kv_heads=2,ffn=128,vocab=60", batch=2, seq=seq, device="cpu"
    )
    adapt = order.checked([autopar.QLoRA(r=4)])
    attachment = order.attach(model, adapt, "cpu")
    attachment.fill()
    captured = compiler.trace(model, inputs, None, forms_of(model), "bf16", adapt)
    options = PlanOptions(load("h100"), strategy="auto", precision="bf16", baselines=False)
    plan = make_plan(captured, Mesh.parse("dp=1"), options, "llama")
    counts = []
    for moves in (False, True):
        if moves:
            move(captured, CUDA)
        parts = compiler.lower(captured, plan, 0, check=True).parts
        for graph in (parts.forward.graph, parts.backward.graph):
            counts.append(
                [
                    len(graph.find_nodes(op="call_function", target=op))
                    for op in (ops.packed_linear.default, ops.dequantize.default)
                ]
            )
    on_cpu, backward, on_gpu, backward_on_gpu = counts
    assert on_cpu == [0, 7] and backward == backward_on_gpu and backward[1] > 0
    assert on_gpu == ([7, 0] if is_taken else [0, 7])
