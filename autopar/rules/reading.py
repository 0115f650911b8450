"""Read a node for a rule: arguments by name, global shapes, and whether a value is known to be zero."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from .._torch import schema_of
from ..ir.graph import is_tensor, tensor_arguments, values_of
from .rule import Dim

Shape = tuple[int, ...]


def bound(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an op by their schema names, defaults included."""
    parameters = schema_of(node.target).arguments
    given = dict(zip((p.name for p in parameters), node.args)) | dict(node.kwargs)
    return {p.name: given.get(p.name, p.default_value) for p in parameters if p.name in given or p.has_default_value()}


def shape_of(argument: fx.Node) -> Shape:
    """Return the global shape of a tensor argument."""
    return tuple(argument.meta["val"].shape)


def input_shapes(node: fx.Node) -> list[Shape]:
    """Return the global shapes of the tensor arguments, in the order of a rule's inputs."""
    return [shape_of(argument) for argument in tensor_arguments(node)]


def output_shapes(node: fx.Node) -> list[Shape]:
    """Return the global shapes of the outputs, in the order of a rule's outputs (outputs that are None have no place
    there)."""
    return [tuple(value.shape) for value in values_of(node)]


def output_indices(node: fx.Node) -> list[int]:
    """Return which item of the node's value each output of its rule is: [1, 2] if the first of three is None."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [0]
    return [i for i, v in enumerate(value) if isinstance(v, torch.Tensor)] if isinstance(value, (tuple, list)) else []


def named(count: int) -> tuple[str, ...]:
    """Return factor names d0, d1, ... of a tensor whose dims are named by position."""
    return tuple(f"d{i}" for i in range(count))


def aligned(shape: Shape, target: Shape, names: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Return the factors of a tensor that broadcasts to `target`, whose dims are `names`: dims that stretch have
    none."""
    shift = len(target) - len(shape)
    return tuple(names[shift + i] if size == target[shift + i] else None for i, size in enumerate(shape))


def dims_of(value: int | list[int] | None, ndim: int) -> set[int]:
    """Return dims as non-negative numbers; None or an empty list means all of them."""
    if value is None or value == []:
        return set(range(ndim))
    return {d % max(ndim, 1) for d in ([value] if isinstance(value, int) else value)}


_ZEROS = {"zeros", "zeros_like", "new_zeros"}
_FILLED = {"full": "fill_value", "full_like": "fill_value", "new_full": "fill_value", "scalar_tensor": "s"}
_CARRIERS = {"expand", "view", "reshape", "_to_copy", "clone", "alias", "detach", "unsqueeze", "lift_fresh_copy"}


def is_zero(node: fx.Node) -> bool:
    """Return whether the graph alone says that a tensor is all zeros."""
    while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        name = node.target._schema.name.removeprefix("aten::")
        if name in _CARRIERS:
            node = cast(fx.Node, node.args[0])
            continue
        return name in _ZEROS or (name in _FILLED and bound(node)[_FILLED[name]] == 0)
    return False


def tensors_by_name(node: fx.Node) -> list[str]:
    """Return the names of the tensor arguments in the order of a rule's inputs (for ops without lists of tensors)."""
    return [name for name, value in bound(node).items() if is_tensor(value)]
