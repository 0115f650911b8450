"""Programs that follow sizes: numbers on lines, and graphs that differ in nothing else."""

from __future__ import annotations

import random

import pytest
import torch
from torch import fx

from autopar.codegen.follow_size import Differs, Factor, Line, followed, is_telling, line_through

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
    module, lines = followed({(size,): _program(size) for size in SIZES})
    assert {line.kind for line in lines} == {"int", "reciprocal"} and {
        factor.power for line in lines for factor in line.factors
    } == {1, 2}
    for size in (2, 3, 9, 40):
        x = torch.randn(2, size, size)
        assert all(line.serves((size,)) for line in lines)
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
        truth = Line((Factor(0, 1 if power == 2 else slope, start, power),), slope if power == 2 else 1, 1, kind, 1)
        line, at = line_through({(size,): truth.at((size,)) for size in sizes[:3]}), (sizes[3],)
        assert isinstance(line, Line) and line.serves(at) and line.at(at) == truth.at(at)


def test_two_points_tell_products_of_sizes():
    seed = random.randrange(10**6)
    print("seed", seed)
    draw, told = random.Random(seed), 0
    for _ in range(400):
        a, b, at = ([draw.randint(2, 40) for _ in range(2)] for _ in range(3))
        a, b, at = (tuple(point) for point in (a, b, at))
        if not is_telling(a, b):
            continue
        told += 1
        for powers in ((1, 0), (0, 1), (1, 1), (2, 1), (1, 2), (0, 2)):
            slope = draw.randint(1, 9)
            number = lambda p: slope * p[0] ** powers[0] * p[1] ** powers[1]  # noqa: E731, B023
            assert line_through({a: number(a), b: number(b)}).at(at) == number(at)
    assert told > 100


def test_a_line_among_other_sizes_crosses_zero_at_a_whole_size():
    a, b = (8, 81), (12, 41)
    for number in (lambda p: p[0] * (p[1] - 1), lambda p: (p[1] + 1) // 2, lambda p: 3 * p[0] * (p[1] + 1) // 2):
        assert line_through({a: number(a), b: number(b)}).at((5, 61)) == number((5, 61))
    with pytest.raises(Differs):
        line_through({a: 3 * a[1] - 1, b: 3 * b[1] - 1})
    assert not is_telling((8, 80), (16, 40)) and not is_telling((4, 9), (4, 5)) and not is_telling((4, 9), (6, 6))


def test_two_points_are_enough_where_a_curve_has_another_chord():
    seed = random.randrange(10**6)
    print("seed", seed)
    draw = random.Random(seed)
    for _ in range(300):
        a, b, c = draw.sample(range(16, 200), 3)
        slope, start, shift = draw.randint(1, 9), draw.randint(-2, 2), draw.randint(1, 3)
        line = line_through({(a,): slope * (a + start), (b,): slope * (b + start)})
        assert line.at((c,)) == slope * (c + start)
        square = line_through({(a,): slope * a * a, (b,): slope * b * b})
        assert square.at((c,)) == slope * c * c
        for at_a, at_b in zip(*((n * (n - shift), n * (n + 1) // 2, n**3, n * n + shift) for n in (a, b))):
            with pytest.raises(Differs):
                line_through({(a,): at_a, (b,): at_b})


def test_what_is_on_no_line_differs():
    for numbers in ((64, 25, 170), (8, 5, 12), (1, 1.0, 1), (0.5, 0.1, 0.7), (True, True, False), (8, 5, float("inf"))):
        with pytest.raises(Differs):
            line_through(dict(zip([(size,) for size in SIZES], numbers)))
    assert line_through(dict.fromkeys([(size,) for size in SIZES], 7)) == 7
    half = line_through({(4,): 2, (8,): 4, (12,): 6})
    assert half.serves((6,)) and not half.serves((7,)) and not half.serves((-2,))


def test_programs_that_differ_otherwise():
    others = {
        "mul_tensor: ": {(size,): _program(size, factor=0.1 * size) for size in SIZES},
        "the constant c": {(size,): _program(size, constant=torch.full((2,), float(size))) for size in SIZES},
        "graphs of": {(size,): _program(size, constant=torch.ones(2) if size == 5 else None) for size in SIZES},
    }
    for words, programs in others.items():
        with pytest.raises(Differs, match=words):
            followed(programs)
