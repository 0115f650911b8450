"""Programs that follow a size: numbers on lines, and graphs that differ in nothing else."""

from __future__ import annotations

import random

import pytest
import torch
from torch import fx

from autopar.codegen.follow_size import Differs, Line, followed, line_through

aten = torch.ops.aten
SIZES = (8, 5, 13)


def _program(size: int, factor: float | None = None, constant: torch.Tensor | None = None) -> fx.GraphModule:
    """Return the mean over the last dim of the first rows of a square."""
    graph, root = fx.Graph(), torch.nn.Module()
    x = graph.placeholder("x")
    square = graph.call_function(aten.view.default, (x, [2, size * size]))
    rows = graph.call_function(aten.slice.Tensor, (square, 1, 0, 3 * size - 1))
    total = graph.call_function(aten.sum.dim_IntList, (rows, [1]))
    result = graph.call_function(aten.mul.Tensor, (total, 1.0 / (3 * size - 1) if factor is None else factor))
    if constant is not None:
        root.register_buffer("c", constant)
        result = graph.call_function(aten.add.Tensor, (result, graph.get_attr("c")))
    graph.output((result,))
    return fx.GraphModule(root, graph)


def test_a_program_follows_the_size():
    module, lines = followed({size: _program(size) for size in SIZES})
    assert {line.kind for line in lines} == {"int", "reciprocal"} and {line.power for line in lines} == {1, 2}
    for size in (2, 3, 9, 40):
        x = torch.randn(2, size, size)
        assert all(line.serves(size) for line in lines)
        torch.testing.assert_close(module(x, size), _program(size)(x))


def test_numbers_on_lines_are_found_again():
    seed = random.randrange(10**6)
    print("seed", seed)
    draw = random.Random(seed)
    for _ in range(300):
        slope, start, sizes = draw.randint(1, 9), draw.randint(0, 30), draw.sample(range(1, 60), 4)
        kind = draw.choice(["int", "float", "reciprocal"])
        power = draw.choice([1, 2])
        start = 0 if power == 2 else start
        truth = Line(slope, start, 1, kind, 1, power)
        line = line_through({size: truth.at(size) for size in sizes[:3]})
        assert isinstance(line, Line) and line.serves(sizes[3]) and line.at(sizes[3]) == truth.at(sizes[3])


def test_two_points_are_enough_where_a_curve_has_another_chord():
    seed = random.randrange(10**6)
    print("seed", seed)
    draw = random.Random(seed)
    for _ in range(300):
        a, b, c = draw.sample(range(16, 200), 3)
        slope, start, shift = draw.randint(1, 9), draw.randint(-2, 2), draw.randint(1, 3)
        line = line_through({a: slope * (a + start), b: slope * (b + start)})
        assert line.at(c) == slope * (c + start)
        square = line_through({a: slope * a * a, b: slope * b * b})
        assert square.at(c) == slope * c * c
        for at_a, at_b in zip(*((n * (n - shift), n * (n + 1) // 2, n**3, n * n + shift) for n in (a, b))):
            with pytest.raises(Differs):
                line_through({a: at_a, b: at_b})


def test_what_is_on_no_line_differs():
    for numbers in ((64, 25, 170), (8, 5, 12), (1, 1.0, 1), (0.5, 0.1, 0.7), (True, True, False), (8, 5, float("inf"))):
        with pytest.raises(Differs):
            line_through(dict(zip(SIZES, numbers)))
    assert line_through(dict.fromkeys(SIZES, 7)) == 7
    half = line_through({4: 2, 8: 4, 12: 6})
    assert half.serves(6) and not half.serves(7) and not half.serves(-2)


def test_programs_that_differ_otherwise():
    others = {
        "mul_tensor: ": {size: _program(size, factor=0.1 * size) for size in SIZES},
        "the constant c": {size: _program(size, constant=torch.full((2,), float(size))) for size in SIZES},
        "graphs of": {size: _program(size, constant=torch.ones(2) if size == 5 else None) for size in SIZES},
    }
    for words, programs in others.items():
        with pytest.raises(Differs, match=words):
            followed(programs)
