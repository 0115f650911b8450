"""8-bit floats: torchao's bits, the formula of codes and scales, and products of what the codes stand for."""

from __future__ import annotations

import pytest
import torch

from autopar.ops import autopar
from autopar.ops.fp8 import FORMATS, LEAST, blocks_in, by_tensor, dequantized

DTYPES = (torch.float32, torch.bfloat16)


def normal(*shape: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    """Values of many sizes, as gradients have, so that blocks differ."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))
    return x.to(dtype)


def quantized(x: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    return by_tensor(x, autopar.fp8_amax(x), format)


def _same(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(mine.contiguous(), theirs.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_are_those_of_torchao(dtype):
    utils = pytest.importorskip("torchao.float8.float8_utils")
    for format, float8 in FORMATS.items():
        for x in (normal(24, 48, dtype=dtype), torch.zeros(16, 16, dtype=dtype), normal(2, 16, 16, dtype=dtype) * 1e4):
            scale = utils.tensor_to_scale(x, float8)
            codes, step = quantized(x, format)
            assert _same(codes, utils.to_fp8_saturated(x.float() * scale, float8)) and torch.equal(step, 1.0 / scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_those_of_torchao(dtype):
    pytest.importorskip("triton")
    kernels = pytest.importorskip("torchao.prototype.blockwise_fp8_training.kernels")
    x = normal(256, 384, dtype=dtype)
    for op, theirs in (
        (autopar.fp8_rows, kernels.torch_blockwise_scale_act_quant_lhs),
        (autopar.fp8_columns, kernels.torch_blockwise_scale_act_quant_rhs),
        (autopar.fp8_blocks, kernels.torch_blockwise_scale_weight_quant),
    ):
        codes, step = op(x)
        expected, expected_step = theirs(x, 128)
        assert _same(codes, expected) and torch.equal(step, expected_step), op
    x[:128] = 0
    assert torch.equal(autopar.fp8_rows(x)[1], kernels.torch_blockwise_scale_act_quant_lhs(x)[1])


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float64))
@pytest.mark.parametrize("shape", [(130, 272), (2, 5, 16), (1, 256, 128)])
def test_the_formula(shape, dtype):
    """Each number in each of its blocks: scale = 448 / max(|x|, 1e-12) as float32, code = x * scale as float8."""
    x = normal(*shape, dtype=dtype)
    sizes = {autopar.fp8_rows: (1, 128), autopar.fp8_columns: (128, 1)}
    sizes |= {autopar.fp8_blocks: (128, 128)} if len(shape) == 2 else {}
    for op, (down, across) in sizes.items():
        codes, step = op(x)
        *stack, rows, columns = shape
        assert codes.shape == shape and step.shape == (*stack, blocks_in(rows, down), blocks_in(columns, across))
        for i in range(step.shape[-2]):
            for j in range(step.shape[-1]):
                block = (..., slice(i * down, (i + 1) * down), slice(j * across, (j + 1) * across))
                scale = (448.0 / x[block].abs().amax((-2, -1), keepdim=True).double().clamp_min(LEAST)).float()
                expected = (x[block].to(torch.promote_types(dtype, torch.float32)) * scale).clamp(-448, 448)
                assert torch.equal(step[..., i : i + 1, j : j + 1], 1 / scale)
                assert _same(codes[block], expected.to(torch.float8_e4m3fn))


def test_values_that_are_no_numbers_stay_none():
    x = normal(4, 256)
    x[1, 5], x[2, 200] = float("nan"), float("inf")
    for codes, step in (autopar.fp8_rows(x), quantized(x, "e4m3"), quantized(x, "e5m2")):
        back = dequantized(codes, step, "e4m3" if step.dim() else "e5m2", torch.float32)
        assert not back[1, 5].isfinite() and not back[2, 200].isfinite()


def _near(mine: torch.Tensor, exact: torch.Tensor) -> bool:
    """Within the rounding of the result's type, and of sums."""
    error = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 8e-3}[mine.dtype]
    return bool((mine.to(exact.dtype) - exact.reshape(mine.shape)).norm() <= error * exact.norm())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
@pytest.mark.parametrize("shape", [(7, 16), (2, 200, 144), (128,), (3, 2, 4, 32)])
@pytest.mark.parametrize("recipe", ["block", "tensor"])
def test_products_of_what_the_codes_stand_for(recipe, shape, dtype):
    x, weight = normal(*shape, dtype=dtype), normal(48, shape[-1], dtype=dtype, seed=1)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = autopar.linear_in_fp8(*leaves, recipe)
    grad = normal(*y.shape, dtype=dtype, seed=2)
    y.backward(grad)
    wide = torch.promote_types(dtype, torch.float32)
    x, grad = (t if t.dim() > 1 else t.unsqueeze(0) for t in (x, grad))

    def back(t: torch.Tensor, block_op, format: str = "e4m3") -> torch.Tensor:
        codes, step = block_op(t) if recipe == "block" else quantized(t, format)
        return dequantized(codes, step, "e4m3" if recipe == "block" else format, wide)

    def rows(t: torch.Tensor) -> torch.Tensor:
        return t.reshape(-1, t.shape[-1])

    w = back(weight, autopar.fp8_blocks)
    assert y.dtype == dtype and _near(y.detach(), back(x, autopar.fp8_rows) @ w.t())
    assert _near(leaves[0].grad, back(grad, autopar.fp8_rows, "e5m2") @ w)
    columns = back(grad, autopar.fp8_columns, "e5m2"), back(x, autopar.fp8_columns)
    assert _near(leaves[1].grad, rows(columns[0]).t() @ rows(columns[1]))


def test_gradients_that_nobody_wants_are_not_computed():
    for recipe in ("block", "tensor"):
        x, weight = normal(4, 128), normal(128, 128)
        for a, b in ((x.clone().requires_grad_(), weight), (x, weight.clone().requires_grad_())):
            autopar.linear_in_fp8(a, b, recipe).sum().backward()
            assert [t.grad is not None for t in (a, b)] == [t.requires_grad for t in (a, b)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_by_tensor_is_torchaos(dtype):
    """Float8Linear, which dequantizes and multiplies on the CPU as well."""
    float8 = pytest.importorskip("torchao.float8")
    layer = torch.nn.Linear(48, 32, bias=False, dtype=dtype)
    config = float8.Float8LinearConfig(emulate=True)
    theirs = float8.convert_to_float8_training(torch.nn.Sequential(layer), config=config)
    x = normal(2, 24, 48, dtype=dtype)
    sides = []
    for compute in (theirs, lambda x: autopar.linear_in_fp8(x, layer.weight, "tensor")):
        leaf = x.clone().requires_grad_()
        y = compute(leaf)
        weight = next(theirs.parameters()) if compute is theirs else layer.weight
        weight.grad = None
        y.backward(normal(*y.shape, dtype=dtype, seed=3))
        sides.append((y.detach(), leaf.grad, weight.grad))
    for mine, other in zip(*reversed(sides)):
        assert _near(mine, other)
