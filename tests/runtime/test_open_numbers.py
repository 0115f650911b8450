"""Python floats that change from call to call: one capture for all their values where the forward computes with them,
one for each where it reads them; the bits are eager torch's."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import gloo

from . import tiny
from .parity import assert_close, assert_same_gradients, device_mesh, full, pair

EDGES = [0.0, -0.0, 1.0, -2.5, 1e-40, 3e38, math.inf, math.nan]


class Computing(nn.Module):
    """Computes with two numbers in every way that needs no value of theirs. Nothing here sums, whatever is sharded."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter(torch.randn(6, generator=draw).to(dtype))
        self.single = nn.Parameter(torch.tensor(0.7, dtype=dtype))

    def forward(self, x, ids, a=1.0, *, b=0.5):
        y = x * self.weight / a + b * x - (1 - a)
        y = y.mul(2 * b - a / 3) + torch.rsub(y, a) - a * 3 * self.single
        y = torch.where(y > b, y, a).masked_fill(x > 2.0, b) + (ids + 1) * b + self.single * -a
        z = y.clone()
        z *= a
        z.add_(b).sub_(+a)
        return {"y": y, "z": z, "single": self.single * b / a, "compared": (x <= a)}


def _same_bits(mine: torch.Tensor, whole: torch.Tensor, what: str) -> None:
    mine, whole = full(mine).detach(), whole.detach()
    assert mine.dtype == whole.dtype and mine.shape == whole.shape, what
    assert torch.equal(mine.isnan(), whole.isnan()) and torch.equal(mine.nan_to_num(1.5), whole.nan_to_num(1.5)), what


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_bits(alone, dtype):
    seed = random.randrange(10**6)
    print("seed", seed)
    draw, numbers = torch.Generator().manual_seed(seed), random.Random(seed)
    ids = torch.randint(9, (4, 6), generator=draw)
    example = ((torch.randn(4, 6, generator=draw).to(dtype), ids, 3.0), {"b": 3.0})
    parallel, reference = pair(Computing(dtype), alone, example)
    values = EDGES + [numbers.uniform(-3, 3) for _ in range(4)] + [numbers.gauss(0, 1) * 10.0 ** numbers.randint(-9, 9)]
    for a in values:
        b = numbers.uniform(-2, 2)
        x = torch.randn(4, 6, generator=draw).to(dtype)
        found, expected = parallel(x, ids, a, b=b), reference(x, ids, a, b=b)
        for name, value in expected.items():
            _same_bits(found[name], value, f"{name} with a={a}, b={b}")
        for m, outputs in ((parallel, found), (reference, expected)):
            m.zero_grad()
            torch.autograd.backward([outputs[n] for n in ("y", "z")], [outputs[n].detach() for n in ("y", "z")])
        # what a gradient sums is in eager's order on one device
        _same_bits(parallel.weight.grad, reference.weight.grad, f"gradient with a={a}, b={b}")
    assert list(parallel.captures)[1:] == [
        f"args[0] (4, 6){_named(dtype)}, args[1] (4, 6), args[2]=any float, b=any float; train"
    ]


def _bits_of_parts(rank: int, mesh: str, strategy: str) -> None:
    """Outputs are eager's; gradients, which sum over ranks, those of a module for which the numbers are constants."""
    draw, mesh = torch.Generator().manual_seed(5), device_mesh(mesh)
    ids, numbers = torch.randint(9, (4, 6), generator=draw), random.Random(7)
    x = torch.randn(4, 6, generator=draw).to(torch.bfloat16)
    parallel, reference = pair(Computing(x.dtype), mesh, ((x, ids, 3.0), {"b": 3.0}), strategy=strategy)
    for _ in range(4):
        a, b = numbers.uniform(-2, 2), numbers.uniform(-2, 2)
        constant, _ = pair(Computing(x.dtype), mesh, ((x, ids, a), {"b": b}), strategy=strategy)
        parallel.zero_grad()
        found, expected, same = (m(x, ids, a, b=b) for m in (parallel, reference, constant))
        for name, value in expected.items():
            _same_bits(found[name], value, f"{name} with a={a}, b={b}")
        for outputs in (found, same):
            torch.autograd.backward([outputs[n] for n in ("y", "z")], [expected[n].detach() for n in ("y", "z")])
        for mine, other in zip(parallel.parameters(), constant.parameters()):
            _same_bits(mine.grad, other.grad.full_tensor(), f"gradient with a={a}, b={b}")
        assert len(constant.captures) == 1
    assert len(parallel.captures) == 2


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("mesh, strategy", [("dp=2", "ddp"), ("tp=2", "megatron"), ("dp=2", "fsdp")])
def test_bits_of_parts(mesh, strategy):
    gloo.run(2, _bits_of_parts, mesh, strategy)


def _named(dtype: torch.dtype) -> str:
    return "" if dtype == torch.float32 else f" {str(dtype).removeprefix('torch.')}"


READS = {
    "compared": lambda x, a: x * a if a > 0.55 else x - a,
    "truth": lambda x, a: x * a if a else x,
    "least": lambda x, a: x * max(a, 0.5),
    "whole": lambda x, a: x * int(10 * a),
    "rounded": lambda x, a: x * round(a, 1),
    "root": lambda x, a: x * math.sqrt(a),
    "floor": lambda x, a: x + math.floor(a * 10),
    "power": lambda x, a: x.abs() ** a,
    "of a number": lambda x, a: x * a**2,
    "divisor": lambda x, a: x * (1 / a),
    "dropout": lambda x, a: F.dropout(x, a, training=False) * a,
    "alpha": lambda x, a: torch.add(x, x, alpha=a),
    "lerp": lambda x, a: torch.lerp(x, -x, a),
    "clamp": lambda x, a: x.clamp(min=a),
    "tensor": lambda x, a: x * torch.tensor(a),
    "full": lambda x, a: x * x.new_full((6,), a),
    "text": lambda x, a: x * len(f"{a}"),
    "key": lambda x, a: x * {0.5: 2}.get(a, 3),
    "close": lambda x, a: x * math.isclose(a, 0.6),
    "scale": lambda x, a: F.scaled_dot_product_attention(x[None], x[None], x[None], scale=a)[0],
    "slope": lambda x, a: F.leaky_relu(x, a),
    "item": lambda x, a: torch.cat([x[:1] * a, x[1:].clone().fill_(a)]),
    "function": lambda x, a: _Scaled.apply(x, a),
    "method": lambda x, a: x * a.as_integer_ratio()[0],
}


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a):
        ctx.a = a
        return x * a

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.a, None


class Reading(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.linspace(-1, 1, 6))

    def forward(self, x, a=0.5):
        return self.function(x * self.weight, a)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", list(READS))
def test_values_that_are_read(alone, what):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    parallel, reference = pair(Reading(READS[what]), alone, ((x,), {"a": 0.5}))
    for a in (0.5, 0.6, 0.61, 0.9):
        for m in (parallel, reference):
            m.zero_grad()
        found, expected = parallel(x, a=a), reference(x, a=a)
        _same_bits(found, expected, f"a={a}")
        for outputs in (found, expected):
            outputs.square().sum().backward()
        assert_same_gradients(parallel, reference)
    assert len(parallel.captures) == 4


class Leaving(nn.Module):
    """Leaves its number in an attribute, and returns it."""

    def __init__(self):
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.ones(6)), 0.0

    def forward(self, x, a=0.5, b=1.0):
        self.last = a
        return x * self.weight * a * b, a


def test_numbers_that_are_left_and_returned(alone):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    parallel, reference = pair(Leaving(), alone, ((x,), {"a": 0.5, "b": 1.0}))
    for a, b in ((0.5, 1.0), (0.6, 2.0), (0.6, 3.0), (0.6, 4.0), (0.7, 5.0), (0.7, 6.0)):
        (mine, one), (whole, other) = parallel(x, a, b=b), reference(x, a, b=b)
        assert torch.equal(mine, whole) and type(one) is float and one == other
        assert type(parallel.last) is float and parallel.last == reference.last
    calls = [f"args[0] (4, 6), args[1]={a}, b={b}; train" for a, b in ((0.6, "any float"), (0.7, "any float"))]
    assert len(parallel.captures) == 4 and list(parallel.captures)[-2:] == calls


class Tempered(tiny.Regressor):
    def forward(self, x, target=None, temperature=1.0, weight=0.5):
        y = super().forward(x) / temperature
        return {"loss": (y - target).square().mean() * weight + (1 - weight) * y.abs().mean(), "y": y}


def _training(rank: int, mesh: str, options: dict) -> None:
    x, y = tiny.Regressor.batch()
    example = dict(x=x, target=y, temperature=1.0, weight=0.5)
    parallel, reference = pair(Tempered(), device_mesh(mesh), example, **options)
    for step in range(5):
        numbers = dict(temperature=1 + step / 7, weight=0.5 - step / 11)
        x = torch.randn(x.shape, generator=torch.Generator().manual_seed(step))
        found, expected = parallel(x=x, target=y, **numbers), reference(x=x, target=y, **numbers)
        assert_close(found["loss"], expected["loss"])
        for outputs in (found, expected):
            outputs["loss"].backward()
        for name, parameter in parallel.named_parameters():
            assert_close(parameter.grad, dict(reference.named_parameters())[name].grad, name)
    assert len(parallel.captures) == 2


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh, options", [
    ("dp=2", {}), ("tp=2", dict(strategy="megatron")), ("dp=2", dict(strategy="fsdp")), ("dp=2", dict(micro_batches=2)),
    ("pp=2", dict(micro_batches=2)),
])  # fmt: skip
def test_on_two_processes(mesh, options):
    gloo.run(2, _training, mesh, options)
