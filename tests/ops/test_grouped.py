"""Products of rows with the matrix of their group equal products one by one, by torch's kernel and without it."""

from random import Random

import pytest
import torch

from autopar.ops import autopar, grouped

ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def one_by_one(x, weight, group, offset):
    """Return the products of each row with its own copy of a matrix, of zeros where there is none, in fp64."""
    x, weight = x.double(), weight.double()
    place = group - offset
    place = torch.where((place >= 0) & (place < len(weight)), place, len(weight))
    return torch.einsum("rk,rkn->rn", x, torch.cat([weight, torch.zeros_like(weight[:1])])[place])


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("seed", range(12))
def test_products(seed, dtype):
    """Rows of any number and order, groups without rows, ranges of groups, sizes that the kernel does not take."""
    print(f"seed {seed}")
    random = Random(seed)
    torch.manual_seed(seed)
    unit = random.choice([8, 8, 1])
    rows, k, n, groups = random.choice([0, 1, 7, 40]), unit * random.choice([1, 3]), unit * random.choice([2, 5]), 5
    offset = random.choice([0, 2])
    x, weight = torch.randn(rows, k, dtype=dtype, requires_grad=True), torch.randn(groups, k, n, dtype=dtype)
    weight = weight.transpose(1, 2).contiguous().transpose(1, 2) if random.random() < 0.5 else weight
    weight.requires_grad_()
    group = torch.randint(0, random.choice([1, groups + 3]), (rows,)) if rows else torch.zeros(0, dtype=torch.int64)
    found, wanted = autopar.grouped_mm(x, weight, group, offset), one_by_one(x, weight, group, offset)
    cotangent = torch.randn(rows, n, dtype=dtype)
    pairs = zip(
        [found, *torch.autograd.grad(found, [x, weight], cotangent)],
        [wanted, *torch.autograd.grad(wanted, [x, weight], cotangent.double())],
    )
    for left, right in pairs:
        assert left.dtype == dtype
        torch.testing.assert_close(left.double(), right.double(), rtol=ROUNDING[dtype], atol=20 * ROUNDING[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_the_kernel_takes_are_not_looped_over(monkeypatch, dtype):
    monkeypatch.setattr(grouped, "_ranges", None)
    x, weight = torch.randn(6, 16, dtype=dtype), torch.randn(3, 16, 8, dtype=dtype)
    group = torch.tensor([2, 0, 2, 5, 0, 2])
    y = autopar.grouped_mm(x, weight, group)
    torch.testing.assert_close(y.double(), one_by_one(x, weight, group, 0), rtol=2e-2, atol=2e-2)
    assert not y[3].any()
    assert not autopar.grouped_mm_dw(x, y, group, 3)[1].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_products_on_a_gpu_without_waiting_for_it():
    torch.manual_seed(0)
    x, weight = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((40, 64), (5, 64, 32)))
    group = torch.randint(0, 9, (40,), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = autopar.grouped_mm(x, weight, group)
        dw = autopar.grouped_mm_dw(x, y, group + 4 * (group == 1), 5)  # group 1 has no rows
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(
        y.double(), one_by_one(x.cpu(), weight.cpu(), group.cpu(), 0).cuda(), rtol=2e-2, atol=0.2
    )
    assert not dw[1].any()
