"""Products of 8-bit floats as the GPU takes them: the CPU's own by tensor; in blocks a stand-in that looks at operands
and scales as cuBLAS wants them, and says what it was given."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from autopar._torch.scaled_products import SCALES, has_scaled_product
from autopar.ops import autopar, fp8_linear

if not hasattr(functional, "ScalingType"):
    pytest.skip("torch has no products in blocks", allow_module_level=True)
KINDS = functional.ScalingType


def blockwise(a, b, *, scale_a, scale_recipe_a, scale_b, scale_recipe_b, output_dtype):
    """Multiply a (m, k) in rows by b (k, n) in columns; scales lie along m, and along n or k, in memory."""
    (m, k), n = a.shape, b.shape[1]
    assert a.is_contiguous() and b.t().is_contiguous() and a.dtype == b.dtype == torch.float8_e4m3fn
    assert scale_recipe_a == KINDS.BlockWise1x128 and scale_a.shape == (m, k // 128) and scale_a.stride(0) == 1
    assert scale_b.stride(0) == 1
    if scale_recipe_b == KINDS.BlockWise128x128:
        assert scale_b.shape == (-(-k // 128 // SCALES) * SCALES, n // 128)
        wide_b = scale_b[: k // 128].repeat_interleave(128, 0).repeat_interleave(128, 1)
    else:
        assert scale_recipe_b == KINDS.BlockWise1x128 and scale_b.shape == (n, k // 128)
        wide_b = scale_b.t().repeat_interleave(128, 0)
    wide_a = scale_a.repeat_interleave(128, 1)
    return ((a.float() * wide_a) @ (b.float() * wide_b)).to(output_dtype)


@pytest.mark.parametrize("tokens", [(5,), (2, 130)])
@pytest.mark.parametrize("recipe", ["block", "tensor"])
def test_the_same_numbers(recipe, tokens, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((*tokens, 384), (256, 384), (*tokens, 256))
    )

    def step() -> list[torch.Tensor]:
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = autopar.linear_in_fp8(*leaves, recipe)
        y.backward(grad)
        return [y.detach(), leaves[0].grad, leaves[1].grad]

    expected = step()
    asked = []
    monkeypatch.setattr(fp8_linear, "_has_kernel", lambda *given: asked.append(given) or True)
    monkeypatch.setattr(functional, "scaled_mm", blockwise)
    found = step()
    assert len(asked) == 3
    for mine, other in zip(found, expected):
        assert (mine - other).float().norm() <= 4e-3 * other.float().norm()


def test_a_cpu_has_none():
    assert not has_scaled_product(torch.device("cpu"), False, torch.bfloat16)
