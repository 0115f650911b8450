"""Sharding rules of 8-bit floats (autopar/ops/fp8.py): codes and scales are cut together, between blocks of 128.

A dim that has blocks and is not made of whole ones stays whole. What is rounded is linear in nothing, so partial sums
are added up before. Products have the factors of a linear layer; features are cut in multiples of 16, which the GPU's
products need.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from ..ops.fp8 import BLOCK
from ..ops.fp8_linear import ALIGNED
from .reading import Shape, input_shapes, named
from .rule import Dim, Rule

Dims = tuple[Dim, ...]


def _even(**sizes: tuple[int, int]) -> Mapping[str, int]:
    """Return how many equal parts each factor is at most cut into: by factor (size, elements of a part)."""
    return {factor: size // part if size % part == 0 else 1 for factor, (size, part) in sizes.items()}


def rows(node: fx.Node) -> Rule:
    """Return the rule of quantization in blocks of the last dim."""
    (shape,) = input_shapes(node)
    names = (*named(len(shape) - 1), "i")
    return Rule((names,), (names, names), even=_even(i=(shape[-1], BLOCK)))


def columns(node: fx.Node) -> Rule:
    """Return the rule of quantization in blocks of the last but one dim, the tokens t."""
    (shape,) = input_shapes(node)
    names = (*named(len(shape) - 2), "t", "i")
    return Rule((names,), (names, names), even=_even(t=(shape[-2], BLOCK)))


def blocks(node: fx.Node) -> Rule:
    """Return the rule of quantization of a weight in square blocks."""
    ((outputs, inputs),) = input_shapes(node)
    names = ("o", "i")
    return Rule((names,), (names, names), even=_even(o=(outputs, BLOCK), i=(inputs, BLOCK)))


def amax(node: fx.Node) -> Rule:
    """Return the rule of the largest absolute value: the largest of the parts' own."""
    (shape,) = input_shapes(node)
    return Rule((named(len(shape)),), ((),), reduction="max")


def tensor(node: fx.Node) -> Rule:
    """Return the rule of quantization with one scale, which all devices know."""
    names = named(len(input_shapes(node)[0]))
    return Rule((names, ()), (names,))


def linear(node: fx.Node) -> Rule:
    """Return the rule of a product (..., i), (o, i) -> (..., o)."""
    x, x_scale, weight, _ = input_shapes(node)
    return _product(x_scale, (*named(len(x) - 1), "i"), ("o", "i"), (*named(len(x) - 1), "o"), weight, BLOCK)


def linear_dx(node: fx.Node) -> Rule:
    """Return the rule of the input's gradient (..., o), (o, i) -> (..., i)."""
    grad, scale, weight, _ = input_shapes(node)
    return _product(scale, (*named(len(grad) - 1), "o"), ("o", "i"), (*named(len(grad) - 1), "i"), weight, BLOCK)


def linear_dw(node: fx.Node) -> Rule:
    """Return the rule of the weight's gradient (..., t, o), (..., t, i) -> (o, i); tokens are cut between blocks."""
    grad, scale, x, _ = input_shapes(node)
    tokens = (*named(len(x) - 2), "t")
    made = _product(scale, (*tokens, "o"), (*tokens, "i"), ("o", "i"), (grad[-1], x[-1]), ALIGNED)
    return made if not scale else Rule(made.inputs, made.outputs, even={**made.even, **_even(t=(x[-2], BLOCK))})


def _product(scale: Shape, a: Dims, b: Dims, out: Dims, features: Shape, block: int) -> Rule:
    """Return the rule of a product of codes with factors a and b, each with its scales. `features`: sizes of o and i,
    which blocks of so many elements are not cut through."""
    part = block if scale else ALIGNED
    even = _even(o=(features[0], part), i=(features[1], part))
    return Rule((a, a if scale else (), b, b if scale else ()), (out,), even=even)
