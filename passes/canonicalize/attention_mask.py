"""Find what the mask of an attention says: whether it is causal, and what is left of it.

Libraries build masks from arange and comparisons, bool tensors of batch x sequence x sequence, and join the padding of
a batch to them. A mask is taken apart at its conjunctions. What depends on no input is computed here: where it lets
everything through it is dropped, where it is the lower triangle the attention is causal. What is left stays as small as
it was before it was broadcast, (b, 1, 1, s) for padding. Samples that are all alike are computed as one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx

from ..._torch import storage_key
from ..._torch.regions import written
from ...ir.graph import RANDOM_STATE, call, operand, values_of

aten = torch.ops.aten
LARGEST_MASK_NUMEL = 2**28  # of a sample; a larger constant mask is not computed at compile time
_AND = (aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default)
_SAME = (aten.expand.default, aten.to.dtype_layout, aten.to.dtype, aten.to.device, aten._to_copy.default)

Write = tuple[fx.Node, int]  # a node with the memory that it writes to


def simplify(graph_module: fx.GraphModule, node: fx.Node, mask: fx.Node, causal: bool) -> tuple[fx.Node | None, bool]:
    """Return (mask or None, causal) that mean the same as the given mask of an attention."""
    writes = [(n, storage_key(into.meta["val"])) for n in _before(node) for into in written(n)]
    known = graph_module.__dict__.setdefault("_autopar_masks", {})
    key = mask, len(writes)  # what is written in between may change it for the next attention
    if key not in known:  # the first attention that reads it comes first
        known[key] = _simplified(graph_module, node, mask, writes)
    left, is_triangle = known[key]
    return left, causal or is_triangle


def _simplified(
    graph_module: fx.GraphModule, node: fx.Node, mask: fx.Node, writes: list[Write]
) -> tuple[fx.Node | None, bool]:
    value = _constant_value(graph_module, mask, writes)
    if value is not None:
        kind = _kind(value)
        return (None, kind == "triangle") if kind else (_constant(graph_module, value), False)
    factors = _factors(mask, {key for _, key in writes})
    values = [_constant_value(graph_module, factor, writes) for factor in factors]
    kinds = {_kind(v) for v in _joined([v for v in values if v is not None])}
    left = [factor for factor, v in zip(factors, values) if v is None]
    if None in kinds or not left:
        return mask, False
    together = left[0]
    for factor in left[1:]:
        joined = call(node, aten.__and__.Tensor, together, factor)
        joined.meta["val"] = together.meta["val"] & factor.meta["val"]
        together = joined
    return together, "triangle" in kinds


def _factors(mask: fx.Node, written_memory: set[int]) -> list[fx.Node]:
    """Return bool tensors whose conjunction, broadcast, is the mask; itself if it is none."""
    value = mask.meta["val"]
    if mask.op != "call_function" or value.dtype != torch.bool or storage_key(value) in written_memory:
        return [mask]
    if mask.target in _AND:
        pair = [a for a in mask.args if isinstance(a, fx.Node) and a.meta["val"].dtype == torch.bool]
        return [f for a in pair for f in _factors(a, written_memory)] if len(pair) == 2 else [mask]
    if mask.target in _SAME and operand(mask).meta["val"].dtype == torch.bool:
        return _factors(operand(mask), written_memory)
    return [mask]


def _joined(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the conjunction of bool tensors, none of none."""
    while len(values) > 1:
        values = [_one_sample(values[0]) & _one_sample(values[1]), *values[2:]]
    return values


def _kind(value: torch.Tensor) -> str | None:
    """Return "open" for a mask that lets everything through, "triangle" for that of a causal attention."""
    keep = _one_sample(value)
    if keep.dtype != torch.bool:
        if not bool(((keep == 0) | (keep <= torch.finfo(keep.dtype).min / 2)).all()):
            return None
        keep = keep == 0
    if bool(keep.all()):
        return "open"
    if keep.dim() < 2 or keep.shape[-2] != keep.shape[-1]:
        return None
    return "triangle" if bool((keep == torch.ones(keep.shape[-2:], dtype=torch.bool).tril()).all()) else None


def _one_sample(value: torch.Tensor) -> torch.Tensor:
    """Return the first of samples that are all alike, else all."""
    if value.dim() < 1 or value.shape[0] <= 1:
        return value
    return value[:1] if value.stride(0) == 0 or bool((value == value[:1]).all()) else value


def _constant(graph_module: fx.GraphModule, value: torch.Tensor) -> fx.Node:
    """Return a node of a mask's value, without its samples if they are alike."""
    value = _one_sample(value) if value.dim() == 4 else value
    count = graph_module.__dict__.setdefault("_autopar_mask_constants", [])
    name = f"constant_mask_{len(count)}"
    count.append(name)
    setattr(graph_module, name, value.contiguous())  # not as a buffer: those are the model's
    node = graph_module.graph.create_node("get_attr", name)
    node.meta["val"] = value
    return node


def _constant_value(graph_module: fx.GraphModule, mask: fx.Node, writes: list[Write]) -> torch.Tensor | None:
    """Return the mask's value after `writes` if it depends on no input of the call, on no random number and on no
    buffer that the call writes to, else None."""
    shape = mask.meta["val"].shape
    if math.prod(shape[1:] if len(shape) == 4 else shape) > LARGEST_MASK_NUMEL:
        return None
    needed, stack = set(), [mask]
    memory: set[int] = set()
    while stack:
        node = stack.pop()
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
    values: dict[fx.Node, Any] = {}
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
    return values[mask]


def _evaluated(node: fx.Node, args: tuple, kwargs: dict, samples_apart: bool):
    """Return what an op gives; of samples that are all alike one is computed, and expanded, if the op is pointwise on
    tensors of four dims and nothing is written to them later."""
    op = cast(Callable, node.target)
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in _AND
    shape = tuple(node.meta["val"].shape) if isinstance(node.meta.get("val"), torch.Tensor) else ()
    if samples_apart or not is_pointwise or len(shape) != 4 or shape[0] == 1:
        return op(*args, **kwargs)
    small = {id(t): _one_sample(t) if t.dim() == 4 else t for t in tensors}
    value = op(*(small.get(id(a), a) for a in args), **kwargs)
    return value.expand(shape)


def _before(node: fx.Node) -> list[fx.Node]:
    nodes = list(node.graph.nodes)
    return nodes[: nodes.index(node)]


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
