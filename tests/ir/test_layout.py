import math
from random import Random

import pytest
import torch

from autopar.errors import StrategyError
from autopar.ir.layout import (
    ZIGZAG,
    Layout,
    in_blocks,
    in_zigzag,
    is_even,
    is_legal,
    largest_local_numel,
    local_offset,
    local_part,
    local_shape,
    straightened,
)
from autopar.ir.mesh import Mesh

from ..helpers.random_layouts import random_layout, random_mesh, random_shape

SEEDS = range(6)


def cases(seed: int, count: int = 40):
    """(mesh, shape, layout) triples: 1 to 3 axes, 1 to 3 dims, even and uneven sizes, parts, partial values."""
    print("seed", seed)
    random = Random(seed)
    for i in range(count):
        mesh = random_mesh(random, 1 + i % 3)
        shape = random_shape(random, mesh, random.randint(1, 3), even=False)
        if i % 8 == 0:
            shape = random_shape(random, mesh, 2, even=True)
        yield mesh, shape, random_layout(random, shape, mesh, partial=("sum", "max"), zigzag=True)


def coordinates(mesh: Mesh):
    return [mesh.coordinate(rank) for rank in range(mesh.devices)]


@pytest.mark.parametrize("seed", SEEDS)
def test_text_round_trip(seed):
    for _, shape, layout in cases(seed):
        assert Layout.parse(layout.text(), len(shape)) == layout


@pytest.mark.parametrize(
    "text, ndim, layout",
    [
        ("R", 2, Layout.replicated(2)),
        ("tp:S(-1)", 2, Layout(((), ("tp",)))),
        ("tp:S(0) dp:S(0)", 1, Layout((("tp", "dp"),))),
        ("dp:S(0), tp:R", 1, Layout((("dp",),))),
        ("dp:P tp:P(max)", 0, Layout((), (("dp", "sum"), ("tp", "max")))),
        ("tp:S(0/3)", 2, Layout((("tp",), ()), parts=(3, 1))),
        ("cp:Z(1) up:Z(1)", 2, Layout(((), ("cp", "up")), parts=(1, ZIGZAG))),
    ],
)
def test_accepted_text(text, ndim, layout):
    assert Layout.parse(text, ndim) == layout


@pytest.mark.parametrize(
    "text",
    [
        "tp:S",
        "tp:S(2)",
        "tp:S(-3)",
        "tp:P(min)",
        "tp:S(0) tp:S(1)",
        "tp:S(0) tp:P",
        "a:S(0/2) b:S(0)",
        "a:S(1/0)",
        "a:Z(0) b:S(0)",
    ],
)
def test_refused_text(text):
    with pytest.raises(StrategyError):
        Layout.parse(text, 2)


def test_equal_placements_are_equal_values():
    assert Layout(((),), (("b", "sum"), ("a", "sum"))) == Layout(((),), (("a", "sum"), ("b", "sum")))
    assert Layout(((), ("a",)), parts=(3, 1)) == Layout(((), ("a",)))
    assert Layout((("a", "b"),)) != Layout((("b", "a"),))
    with pytest.raises(StrategyError, match="2 dims has 1"):
        Layout(((), ("a",)), parts=(3,))


def test_questions_about_an_axis():
    layout = Layout(((), ("tp", "dp")), (("pp", "max"),))
    assert (layout.dim_of("dp"), layout.dim_of("pp")) == (1, None)
    assert (layout.reduction_of("pp"), layout.reduction_of("dp")) == ("max", None)
    assert layout.sharding_axes == ("tp", "dp")
    assert not layout.is_replicated and Layout.replicated(3).is_replicated
    assert math.prod(map(Mesh.parse("pp=2,dp=3,tp=4").size, layout.sharding_axes)) == 12


@pytest.mark.parametrize("seed", SEEDS)
def test_local_parts_cover_the_tensor_exactly(seed):
    """Every element lies on as many devices as there are copies of a shard, and every shard has the shape announced."""
    for mesh, shape, layout in cases(seed):
        tensor = torch.arange(math.prod(shape)).reshape(shape)
        copies = torch.zeros(math.prod(shape), dtype=torch.int64)
        for coordinate in coordinates(mesh):
            part = local_part(tensor, layout, mesh, coordinate)
            assert part.shape == local_shape(shape, layout, mesh, coordinate)
            assert part.is_contiguous() and part.data_ptr() != tensor.data_ptr()
            copies[part.flatten()] += 1
        assert (copies == mesh.devices // math.prod(map(mesh.size, layout.sharding_axes))).all(), (mesh, shape, layout)


@pytest.mark.parametrize("seed", SEEDS)
def test_local_parts_are_nested_torch_chunks(seed):
    for mesh, shape, layout in cases(seed):
        tensor = torch.arange(math.prod(shape)).reshape(shape)
        for coordinate in coordinates(mesh):
            expected = tensor
            for d, axes in enumerate(layout.dims):
                pieces = list(expected.chunk(abs(layout.parts[d]), d))
                for axis in axes:
                    at = [coordinate[axis]] * len(pieces)
                    if layout.parts[d] == ZIGZAG:
                        at[1] = mesh.size(axis) - 1 - at[0]
                    pieces = [piece.chunk(mesh.size(axis), d)[i] for piece, i in zip(pieces, at)]
                expected = torch.cat(pieces, d)
                if axes and layout.parts[d] == 1:
                    first = expected.movedim(d, 0).flatten()[0].item()
                    offset = local_offset(shape, layout, mesh, coordinate, d)
                    assert offset == first // math.prod(shape[d + 1 :]) % shape[d]
            assert torch.equal(local_part(tensor, layout, mesh, coordinate), expected)


@pytest.mark.parametrize("mesh", ["a=2", "a=3", "a=4", "a=2,b=3"])
def test_parts_in_zigzag_become_the_whole(mesh):
    mesh = Mesh.parse(mesh)
    layout, whole = Layout(((), mesh.names, ()), parts=(1, ZIGZAG, 1)), torch.randn(2, 24, 3)
    held = torch.cat([local_part(whole, layout, mesh, coordinate) for coordinate in coordinates(mesh)], 1)
    assert torch.equal(straightened(held, layout, mesh), whole) and not torch.equal(held, whole)
    assert in_blocks(layout) == Layout(((), mesh.names, ())) and in_zigzag(layout) and not in_zigzag(in_blocks(layout))


@pytest.mark.parametrize("seed", SEEDS)
def test_legal_even_and_largest_agree_with_all_local_shapes(seed):
    print("seed", seed)
    random = Random(seed)
    for i in range(60):
        mesh = random_mesh(random, 1 + i % 3)
        shape = tuple(random.randint(1, 12) for _ in range(random.randint(1, 2)))
        axes = random.sample(mesh.names, random.randint(0, len(mesh.names)))
        cut = random.randint(0, len(axes))
        layout = Layout((tuple(axes[:cut]), tuple(axes[cut:]))) if len(shape) == 2 else Layout((tuple(axes),))
        local_shapes = [local_shape(shape, layout, mesh, c) for c in coordinates(mesh)]
        assert is_legal(shape, layout, mesh) == all(map(all, local_shapes)), (mesh, shape, layout)
        assert is_even(shape, layout, mesh) == (len(set(local_shapes)) == 1), (mesh, shape, layout)
        assert largest_local_numel(shape, layout, mesh) == max(map(math.prod, local_shapes))


@pytest.mark.parametrize(
    "size, text, legal",
    [
        (6, "a:S(0/3)", True),  # three parts of two, each cut in two
        (9, "a:S(0/3)", False),  # a part of three does not cut evenly in two
        (12, "a:S(0/3) b:S(0/3)", False),  # several axes inside parts
        (8, "b:Z(0)", True),
        (16, "a:Z(0) b:Z(0)", True),  # in zigzag several axes may cut
        (12, "b:Z(0)", False),  # 12 has no eight equal blocks
        (5, "a:S(0)", True),
        (5, "b:S(0)", False),  # blocks of ceil(5 / 4) = 2 leave the fourth device none
        (7, "b:S(0)", True),
        (1, "a:S(0)", False),
    ],
)
def test_legal_by_hand(size, text, legal):
    assert is_legal((size,), Layout.parse(text, 1), Mesh.parse("a=2,b=4")) is legal


def test_parts_are_sharded_each_for_itself():
    fused = torch.tensor([0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23])  # query, key, value
    layout, mesh = Layout.parse("tp:S(0/3)", 1), Mesh.parse("tp=2")
    assert local_part(fused, layout, mesh, {"tp": 1}).tolist() == [2, 3, 12, 13, 22, 23]
