"""Compute what depends on no input of a call at compile time, such as masks made of arange and comparisons.

Samples that are all alike are computed as one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import fx

from ..._torch import storage_key
from ...ir.graph import RANDOM_STATE, values_of

LARGEST_NUMEL = 2**28  # of a sample; a larger constant is not computed at compile time
ALONG = {torch.ops.aten.cumsum.default: 1, torch.ops.aten.diff.default: 2}  # ops along a dim: which argument says it
BY_STRIDE = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.as_strided.default)
AND = (torch.ops.aten.__and__.Tensor, torch.ops.aten.bitwise_and.Tensor, torch.ops.aten.logical_and.default)

Write = tuple[fx.Node, int]  # a node with the memory that it writes to


def constant_value(
    graph_module: fx.GraphModule, wanted: fx.Node, writes: list[Write], given: Mapping[fx.Node, torch.Tensor] = {}
) -> torch.Tensor | None:
    """Return the value of a node after `writes`, if it depends on no input of the call, on no random number and on no
    buffer that the call writes to, else None. `given`: values of nodes that it may depend on as well."""
    shape = wanted.meta["val"].shape
    if math.prod(shape[1:] if len(shape) == 4 else shape) > LARGEST_NUMEL:
        return None
    needed, stack = set(), [wanted]
    memory: set[int] = set()
    while stack:
        node = stack.pop()
        if node in given:
            continue
        if node.op == "placeholder" or (node.op == "get_attr" and not _is_real_buffer(graph_module, node)):
            return None
        if _is_drawn(node):
            return None
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
            memory.update(storage_key(v) for v in values_of(node))
            stack += [n for n, key in writes if n not in needed and key in memory]
    buffers = {storage_key(n.meta["val"]) for n in needed if n.op == "get_attr"}
    if any(key in buffers for _, key in writes):
        return None
    is_written = bool({n for n, _ in writes} & needed)
    values: dict[fx.Node, Any] = {**given}
    for node in graph_module.graph.nodes:
        if node not in needed:
            continue
        if node.op == "get_attr":
            values[node] = graph_module.get_buffer(node.target)
            continue
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: values[n])
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        values[node] = _evaluated(node, args, kwargs, samples_apart=is_written)
    return values[wanted]


def _evaluated(node: fx.Node, args: tuple, kwargs: dict, samples_apart: bool):
    """Return what an op gives; of samples that are all alike one is computed, and expanded, if nothing is written to
    them later."""
    op = cast(Callable, node.target)
    if op in BY_STRIDE:  # which samples that are one in memory would not be as they were traced
        return op(args[0].contiguous(), *args[1:], **kwargs)
    shape = tuple(node.meta["val"].shape) if isinstance(node.meta.get("val"), torch.Tensor) else ()
    if samples_apart or not shape or shape[0] == 1:
        return op(*args, **kwargs)
    small = _one_of_each(node, args, len(shape))
    return op(*args, **kwargs) if small is None else op(*small, **kwargs).expand(shape)


def _one_of_each(node: fx.Node, args: tuple, dims: int) -> tuple | None:
    """Return the arguments that give one of the samples if these are all alike, for an op that is pointwise, runs along
    the last dim or reads the same places of each sample; else None."""
    if node.target is torch.ops.aten.index.Tensor:
        table, places = args
        is_of_each = places[0] is None and all(place is not None for place in places[1:])
        return (one_sample(table), places) if is_of_each else None
    along = node.target in ALONG and dims > 1 and args[ALONG[node.target] :][:1] in ((), (-1,), (dims - 1,))
    if not along and torch.Tag.pointwise not in getattr(node.target, "tags", ()) and node.target not in AND:
        return None
    return tuple(one_sample(a) if isinstance(a, torch.Tensor) and a.dim() == dims else a for a in args)


def one_sample(value: torch.Tensor) -> torch.Tensor:
    """Return the first of samples that are all alike, else all."""
    if value.dim() < 1 or value.shape[0] <= 1:
        return value
    return value[:1] if value.stride(0) == 0 or bool((value == value[:1]).all()) else value


def _is_drawn(node: fx.Node) -> bool:
    """Return whether a node is a random number, or the state that it is drawn from."""
    if node.op == "get_attr":
        return node.target == RANDOM_STATE
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _is_real_buffer(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    try:
        buffer = graph_module.get_buffer(str(node.target))
    except AttributeError:
        return False
    return type(buffer) is torch.Tensor and buffer.device.type == "cpu"
