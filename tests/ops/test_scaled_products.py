"""Products of 8-bit floats as the GPU takes them: the CPU's own by tensor; in blocks a stand-in that looks at operands
and scales as cuBLAS wants them, and says what it was given."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn import functional

from autopar._torch import scaled_products
from autopar._torch.scaled_products import SCALES, has_scaled_product
from autopar.ops import autopar, fp8_linear

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


@pytest.mark.parametrize("capability, error, said", [
    ((8, 0), None, "compute capability 9.0 has them"),
    ((9, 0), RuntimeError("cuBLAS is too old\nat line 3"), r"\(cuBLAS is too old\)"),
    ((9, 0), torch.OutOfMemoryError("full"), None),
    ((9, 0), None, None),
])  # fmt: skip
def test_a_gpu_without_them_is_told_of_once(capability, error, said, monkeypatch, recwarn):
    def product(*args):
        if error is not None:
            raise error

    zeros, ones = torch.zeros, torch.ones
    monkeypatch.setattr(scaled_products, "scaled_product", product)
    monkeypatch.setattr(torch, "zeros", lambda *size, device, **options: zeros(*size, **options))
    monkeypatch.setattr(torch, "ones", lambda size, device: ones(size))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "card")
    has_scaled_product.cache_clear()
    asked = torch.device("cuda"), True, torch.bfloat16
    if isinstance(error, torch.OutOfMemoryError):
        with pytest.raises(torch.OutOfMemoryError):
            has_scaled_product(*asked)
        return
    assert [has_scaled_product(*asked) for _ in range(2)] == [said is None] * 2
    assert len(recwarn) == (said is not None)
    if said is not None:
        assert re.search(said, str(recwarn[0].message))
    has_scaled_product.cache_clear()


def test_a_cpu_has_none():
    assert not has_scaled_product(torch.device("cpu"), False, torch.bfloat16)
