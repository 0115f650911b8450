"""Views, splits, slices and joins over many random shapes: factors inside merged dims, equal pieces, uneven pieces."""

from __future__ import annotations

import math
import random

import pytest
import torch

from autopar.rules.numeric_check import make_node
from autopar.rules.rule import Inner
from autopar.rules.views import regroup

from .rule_check import assert_right

aten = torch.ops.aten
SIZES = (1, 2, 2, 3, 4, 4, 5, 6)


def random_shapes(rng: random.Random) -> tuple[list[int], list[int]]:
    """Two shapes of as many elements: the same list of factors, cut into dims at different places."""
    atoms = [rng.choice(SIZES) for _ in range(rng.randint(1, 4))]

    def cut() -> list[int]:
        marks = sorted(rng.choices(range(len(atoms) + 1), k=rng.randint(0, 4)))
        bounds = [0, *marks, len(atoms)]
        return [math.prod(atoms[a:b]) for a, b in zip(bounds, bounds[1:])]

    return cut(), cut()


def tensor(shape) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)


@pytest.mark.parametrize("seed", range(12))
def test_random_views(seed):
    rng = random.Random(seed)
    pairs = [random_shapes(rng) for _ in range(12)]
    print(f"seed {seed}: {pairs}")
    assert_right((make_node(aten.view.default, tensor(a), b) for a, b in pairs))


@pytest.mark.parametrize(
    "a, b", [((6, 4), (4, 6)), ((2, 6, 4), (2, 4, 6)), ((6, 4, 5), (4, 6, 5)), ((4, 9, 4), (6, 24))]
)
def test_views_without_common_factors(a, b):
    assert_right([make_node(aten.view.default, tensor(a), list(b))], ["x=2", "x=3", "x=2,y=2", "x=3,y=2"])


def test_factors_of_views():
    heads = regroup((2, 5, 12), (2, 5, 3, 4))
    assert heads == (("d0", "d1", ("d2", Inner("d3", 3))), ("d0", "d1", "d2", "d3"), {"d2": 3, "d3": 4})
    fused = regroup((5, 24), (5, 3, 4, 2))
    assert fused[0] == ("d0", ("d1", Inner("d2", 3), Inner("d3", 12)))
    assert regroup((4, 6), (1, 4, 6)) == (("d0", "d1"), (None, "d0", "d1"), {})
    assert regroup((6, 4), (4, 6)) == (("d0", None), ("d0", None), {"d0": 2})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(6))
def test_random_pieces(seed):
    rng = random.Random(seed)
    nodes = []
    for _ in range(8):
        shape = [rng.choice(SIZES) * rng.choice((1, 2, 3)) for _ in range(rng.randint(1, 3))]
        dim = rng.randrange(-len(shape), len(shape))
        size = shape[dim]
        piece = rng.randint(1, size)
        start = rng.randrange(0, size)
        end = min(start + piece, size)
        taken = tensor(shape).narrow(dim, start, end - start)
        nodes += [
            make_node(aten.split.Tensor, tensor(shape), piece, dim),
            make_node(aten.cat.default, list(tensor(shape).split(piece, dim)), dim),
            make_node(aten.slice.Tensor, tensor(shape), dim, start, end),
            make_node(aten.slice_backward.default, taken, shape, dim, start, end, 1),
            make_node(aten.repeat.default, tensor(shape), [rng.choice((1, 2, 3)) for _ in range(len(shape) + 1)]),
            make_node(aten.expand.default, tensor(shape), [rng.choice((2, 4)), *shape]),
        ]
    print(f"seed {seed}: {[tuple(inputs[0].shape) for _, inputs in nodes]}")
    assert_right(nodes)
