"""Random numbers by counter: the generator, what is drawn, and that every layout draws the same."""

from __future__ import annotations

import math
from random import Random, randrange

import pytest
import torch

from autopar.ir.layout import Layout, dim_ranges, local_part
from autopar.ops import counter_rng
from autopar.ops.counter_rng import contiguous_strides, key_of, squares64
from autopar.rules import Strategy, local_call
from autopar.rules.numeric_check import make_node

from ..helpers.random_layouts import random_layout, random_mesh, random_shape

autopar = torch.ops.autopar
CPU = torch.device("cpu")


def words_of(counter: int, key: int) -> int:
    """Widynski's function on Python's integers, line by line."""
    mask, rotated = 2**64 - 1, lambda v: (v >> 32 | v << 32) & (2**64 - 1)
    y = x = counter * key & mask
    z = y + key & mask
    x = rotated(x * x + y & mask)
    x = rotated(x * x + z & mask)
    x = rotated(x * x + y & mask)
    t = x = x * x + z & mask
    x = rotated(x)
    return t ^ ((x * x + y & mask) >> 32)


def test_squares_is_widynskis():
    key, counters = key_of(1, 2, 3), [0, 1, 2, 7, 2**31, 2**32 + 5, 10**13, 2**62]
    found = [w % 2**64 for w in squares64(torch.tensor(counters), key).tolist()]
    assert found == [words_of(c, key % 2**64) for c in counters]


def test_keys_are_odd_and_differ():
    keys = [
        key_of(seed, offset, stream) for seed in (-1, 0, 1, 2**63 - 1) for offset in range(8) for stream in range(8)
    ]
    assert len(set(keys)) == len(keys) and all(k % 2 and -(2**63) <= k < 2**63 for k in keys)
    ones = [bin(k % 2**64).count("1") for k in keys]
    assert 14 <= min(ones) and max(ones) <= 50  # a key is a fair number of ones and zeros


def dropped(shape, p=0.3, seed=1, offset=0, stream=0, dtype=torch.float32):
    x = torch.ones(shape, dtype=dtype)
    return autopar.dropout(x, torch.tensor([seed, offset]), p, stream, 0, contiguous_strides(shape))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_keep_rate_and_scale(p):
    y = dropped((400, 500), p)
    keep = (y != 0).double().mean().item()
    assert abs(keep - (1 - p)) <= 5 * math.sqrt(p * (1 - p) / y.numel()) + 2**-16
    if p < 1:
        assert y.max().item() == pytest.approx(1 / (1 - p), rel=1e-3)
        for dim in (0, 1):  # no row or column stands out
            assert ((y != 0).double().mean(dim) - keep).abs().max() < 0.15


def test_streams_offsets_and_seeds_are_independent():
    draws = [dropped((300, 301), 0.5, *at) for at in ((1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0), (1, 0, 2), (1, 2, 0))]
    flat = torch.stack([d.reshape(-1) for d in draws])
    neighbours = torch.stack([flat[0, :-1], flat[0, 1:]])
    for sample in (flat, neighbours):
        apart = torch.corrcoef(sample) - torch.eye(len(sample))
        assert apart.abs().max() < 5 / math.sqrt(flat.shape[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_uniform_and_normal(dtype):
    state, size = torch.tensor([3, 4]), [250, 200]
    u, n = (
        op(state, size, 0, 0, contiguous_strides(size), dtype=dtype, device=CPU)
        for op in (autopar.uniform, autopar.normal)
    )
    assert u.dtype == n.dtype == dtype and 0 <= u.min() and u.max() < 1
    counts = torch.histc(u.double(), 16, 0, 1)
    assert ((counts - u.numel() / 16) ** 2 / (u.numel() / 16)).sum() < 45  # chi-square of 15 degrees: p < 1e-4
    moments = [(n.double() ** k).mean().item() for k in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.12)


def test_blocks_do_not_show(monkeypatch):
    whole = dropped((9, 7, 8))
    monkeypatch.setitem(counter_rng.BLOCK_NUMEL, "cpu", 5)
    assert torch.equal(dropped((9, 7, 8)), whole)


def test_the_backward_draws_the_same_mask():
    x, state = torch.randn(6, 7, requires_grad=True), torch.tensor([1, 2])
    y = autopar.dropout(x, state, 0.5, 3, 0, [7, 1])
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, y.detach() / x.detach()) and 0 < (grad == 0).sum() < grad.numel()


OPS = [
    lambda shape, state: make_node(
        autopar.dropout.default, torch.randn(shape), state, 0.4, 1, 0, contiguous_strides(shape)
    ),
    lambda shape, state: make_node(
        autopar.uniform.default, state, list(shape), 1, 0, contiguous_strides(shape), dtype=torch.float32, device=CPU
    ),
]


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_every_layout_draws_its_part_of_the_whole(axes):
    """Random meshes, shapes of uneven sizes and layouts, with several axes on a dim in any order."""
    seed = randrange(10**6)
    print("seed", seed)
    random = Random(seed)
    for i in range(40):
        mesh = random_mesh(random, axes)
        shape = random_shape(random, mesh, random.randint(1, 4), even=False)
        layout = Layout(random_layout(random, shape, mesh).dims) if i % 2 else random_layout(random, shape, mesh)
        if max(layout.parts, default=1) > 1:
            continue  # never offered: see test_parts_are_not_offered
        state = torch.tensor([random.randrange(2**40), i])
        node, inputs = OPS[i % 2](shape, state)
        layouts = [layout, Layout.replicated(1)] if i % 2 == 0 else [Layout.replicated(1)]
        strategy = Strategy(tuple(layouts), (layout,), (), 1)
        for rank in range(mesh.devices):
            here = mesh.coordinate(rank)
            values = iter([local_part(x, l, mesh, here) for x, l in zip(inputs, layouts)])
            args = tuple(next(values) if hasattr(a, "op") else a for a in node.args)
            args, kwargs = local_call(node, strategy, mesh, here, args, node.kwargs)
            mine = node.target(*args, **kwargs)
            assert torch.equal(mine, local_part(node.meta["val"], layout, mesh, here)), (
                shape,
                layout.text(),
                mesh,
                rank,
            )


def test_parts_are_not_offered():
    """A block of each part is not one range of indices, which the op takes."""
    from autopar.rules import factor_parts, rule_of

    node, _ = OPS[0]((12, 12), torch.tensor([0, 0]))
    everywhere = {(n, 0): [frozenset({2, 3})] * 2 for n in (node, *node.all_input_nodes)}
    assert factor_parts(node, rule_of(node), everywhere) == {}
    assert len(dim_ranges(12, ("x",), 3, random_mesh(Random(0), 1), {"x": 0})) == 3
