"""Rule builders for families of ops: the table names an op and one of these says what it means.

A builder takes what the table knows and returns a function from a node to its Rule. `linear` lists sets of argument
positions that may be Partial together: [0] for a linear op, [0], [1] for a product, [0, 1] for a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import fx

from ..ir.graph import tensor_arguments
from .reading import Shape, aligned, bound, dims_of, input_shapes, named, output_shapes
from .rule import Dim, Rule, rule

Builder = Callable[[fx.Node], Rule | None]
Always = Callable[[fx.Node], Rule]  # a builder that has a rule for every node
Linear = tuple[Sequence[int], ...]


def sets(linear: Linear) -> tuple[frozenset[int], ...]:
    """Turn lists of argument positions into the `linear` of a Rule."""
    return tuple(map(frozenset, linear))


def each(node: fx.Node, dims: Callable[[Shape], tuple[Dim, ...]], linear: Linear = ()) -> Rule:
    """Return the rule of an op whose arguments and outputs have the factors that `dims` gives for their shapes."""
    return Rule(tuple(map(dims, input_shapes(node))), tuple(map(dims, output_shapes(node))), sets(linear))


def einsum(text: str, *linear: Sequence[int], reduction: str = "sum", contiguous: str = "") -> Always:
    """Build rules from factors written as in an einsum; "..." stands for any number of leading factors b0, b1, ... that
    tensors share. Arguments that the node lacks (an optional bias) drop from the end of the left side."""
    left, right = text.split("->")

    def build(node: fx.Node) -> Rule:
        shapes = input_shapes(node)
        tensors = left.split(",")[: len(shapes)]
        batch = 0
        for tensor, shape in zip(tensors, shapes):
            if "..." in tensor:
                batch = len(shape) - len(tensor.split()) + 1
        spelled = f"{','.join(tensors)}->{right}".replace("...", " ".join(f"b{i}" for i in range(batch)))
        return replace(rule(spelled, linear, reduction), contiguous=frozenset(contiguous.split()))

    return build


def pointwise(*linear: Sequence[int]) -> Always:
    """Build rules of ops of which every output element depends on the elements at its own place; arguments
    broadcast."""

    def build(node: fx.Node) -> Rule:
        outputs = output_shapes(node)
        names = named(len(outputs[0]))
        inputs = tuple(aligned(shape, outputs[0], names) for shape in input_shapes(node))
        return Rule(inputs, (names,) * len(outputs), sets(linear))

    return build


def cast(node: fx.Node) -> Rule:
    """Return the rule of a change of type: it is linear unless it rounds, so partial sums are added up in the wider
    type."""
    source, target = tensor_arguments(node)[0].meta["val"].dtype, node.meta["val"].dtype
    widens = torch.promote_types(source, target) == target
    return pointwise(*([[0]] if widens else []))(node)


def filled(number: str, position: int) -> Always:
    """Build rules of ops where some elements become a number, the argument of this name: linear in the tensor at
    `position` if that number is zero."""

    def build(node: fx.Node) -> Rule:
        return pointwise(*([[position]] if bound(node)[number] == 0 else []))(node)

    return build


def along(*dims: str | int, linear: Linear = ()) -> Always:
    """Build rules of ops whose tensors all have the same dims and whose elements are mixed along some: numbers, or
    names of arguments that list them (None or an empty list: all dims)."""

    def build(node: fx.Node) -> Rule:
        arguments, ndim = bound(node), len(output_shapes(node)[0])
        mixed = set().union(*(dims_of(arguments[d] if isinstance(d, str) else d, ndim) for d in dims))
        names = tuple(None if i in mixed else name for i, name in enumerate(named(ndim)))
        return each(node, lambda shape: names, linear)

    return build


def reduce(kind: str | None, *linear: Sequence[int], empty_is_all: bool = True) -> Always:
    """Build rules of ops that reduce the dims of the argument `dim` (all dims if there is none). kind "sum" or "max":
    parts of a sharded dim combine that way; None: reduced dims cannot be sharded. For some ops an empty list means no
    dim instead of all."""

    def build(node: fx.Node) -> Rule:
        arguments, (shape, *_) = bound(node), input_shapes(node)
        dim = arguments.get("dim")
        reduced = set() if dim == [] and not empty_is_all else dims_of(dim, len(shape))
        names = named(len(shape))
        keep = arguments.get("keepdim", False)
        source = tuple(n if kind or i not in reduced else None for i, n in enumerate(names))
        result = tuple(None if i in reduced else n for i, n in enumerate(names) if keep or i not in reduced)
        return Rule((source,), (result,) * len(output_shapes(node)), sets(linear), kind or "sum")

    return build


def histogram(node: fx.Node) -> Rule:
    """Return the rule of a histogram: counts of parts add up if its range is given; else that follows from the smallest
    and the largest element."""
    arguments, (shape,) = bound(node), input_shapes(node)
    given = arguments["min"] < arguments["max"]
    return Rule((named(len(shape)) if given else (None,) * len(shape),), ((None,),))


def loss(*linear: Sequence[int]) -> Always:
    """Build rules of elementwise losses and their backwards. Reduction none (0) or sum (2) may be sharded; a mean (1)
    divides by a local size and is not."""

    def build(node: fx.Node) -> Rule:
        full = max(input_shapes(node), key=len)
        names = (None,) * len(full) if bound(node)["reduction"] == 1 else named(len(full))
        return each(node, lambda shape: aligned(shape, full, names), linear)

    return build


def blocked(node: fx.Node) -> Rule:
    """Return the rule of a known op with nothing to shard."""
    return each(node, lambda shape: (None,) * len(shape))


def keeps_last(count: int, *linear: Sequence[int]) -> Always:
    """Build rules of ops that act within the last `count` dims (pooling, resizing, padding of images) and alike on all
    others."""

    def build(node: fx.Node) -> Rule:
        return each(node, lambda shape: named(len(shape) - count) + (None,) * count, linear)

    return build


def affine(node: fx.Node) -> Rule:
    """Return the rule of bias + a @ b (addmm, baddbmm, addmv): the bias broadcasts and would be added once a device if
    k were sharded."""
    product = {1: rule("m _, _ -> m"), 2: rule("m _, _ n -> m n"), 3: rule("b m _, b _ n -> b m n")}
    (bias, *_), (shape,) = input_shapes(node), output_shapes(node)
    made = product[len(shape)]
    names = aligned(bias, shape, made.outputs[0])
    return Rule((names, *made.inputs), made.outputs, sets(([0, 1], [0, 2])))


def linear_layer(node: fx.Node) -> Rule:
    """Return the rule of aten.linear; with a bias the contracted dim stays whole, as in `affine`."""
    if len(input_shapes(node)) == 2:
        return einsum("... i, o i -> ... o", [0], [1])(node)
    return einsum("... _, o _, o -> ... o", [0, 2], [1, 2])(node)


def created(node: fx.Node) -> Rule:
    """Return the rule of a tensor made from nothing (or from another's dtype only): each device makes its own part."""
    names = named(len(output_shapes(node)[0]))
    inputs = tuple(names if s == output_shapes(node)[0] else (None,) * len(s) for s in input_shapes(node))
    return Rule(inputs, (names,))


def drawn(node: fx.Node) -> Rule:
    """Return the rule of random numbers by counter. A device draws one range of each dim: the op takes where it starts
    and its steps. Dropout is linear: parts of a sum at one place all meet the same mask."""
    names, inputs = named(len(output_shapes(node)[0])), input_shapes(node)
    tensors = (*(names for _ in inputs[:-1]), (None,))
    return Rule(tensors, (names,), sets(([0],) if len(inputs) > 1 else ()), contiguous=frozenset(names))


def counted(node: fx.Node) -> Rule:
    """Return the rule of arange(start, end, step): a device starts at its own offset. Not for float steps, whose ends
    may round."""
    arguments = bound(node)
    whole = all(isinstance(arguments.get(name, 1), int) for name in ("start", "end", "step"))
    return Rule((), (("d0",) if whole else (None,),), contiguous=frozenset({"d0"}))
