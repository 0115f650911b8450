"""scaled_dot_product_attention -> `autopar::attention`, with masks and repeated heads said plainly.

Libraries build the causal mask from arange and comparisons, a bool tensor of batch x sequence x sequence. A mask that
depends on no input is computed here once: if it lets everything through it is dropped, if it is the lower triangle it
becomes `causal=True`, else it is kept as a constant without the batch dim. Keys and values repeated for grouped queries
are taken before the repetition: the op knows grouped heads itself.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..._torch import schema_names, storage_key
from ..._torch.regions import written
from ...ir.graph import RANDOM_STATE, operand, values_of
from ...ops import autopar
from .attention_formula import attention_formula
from .random import Draws

aten = torch.ops.aten
LARGEST_MASK_NUMEL = 2**28  # a larger constant mask is not computed at compile time
_REPEATS = (aten.expand.default, aten.reshape.default, aten.view.default, aten.unsqueeze.default, aten.slice.Tensor)


def attention(graph_module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Return the node in the place of a scaled_dot_product_attention; its last node if it has dropout or a learned mask
    (T5's position bias), for which it is written out. Return None for tensors of other than four dims."""
    schema = schema_names(node.target)
    given: dict[str, Any] = dict(zip(schema, node.args)) | dict(node.kwargs)
    p = given.get("dropout_p", 0.0)
    if any(given[name].meta["val"].dim() != 4 for name in ("query", "key", "value")):
        return None
    q, k, v = (_unwrap(given[name]) for name in ("query", "key", "value"))
    mask, causal = given.get("attn_mask"), bool(given.get("is_causal", False))
    if mask is not None:
        mask, causal = _simplify(graph_module, node, mask, causal)
    if p or (mask is not None and _is_learned(graph_module, mask)):
        return attention_formula(Draws(graph_module, node), q, k, v, mask, causal, given.get("scale"), p)
    k, v = (_before_repeat(x, q) for x in (k, v))
    graph = node.graph

    def call(target, *args):
        new = graph.call_function(target, args)
        new.meta = {key: value for key, value in node.meta.items() if key != "val"}
        return new

    return call(operator.getitem, call(autopar.attention.default, q, k, v, mask, causal, given.get("scale")), 0)


def _is_learned(graph_module: fx.GraphModule, mask: fx.Node) -> bool:
    parameters = {name for name, _ in graph_module.named_parameters(remove_duplicate=False)}
    seen, stack = set(), [mask]
    while stack:
        node = stack.pop()
        if node.op == "get_attr" and node.target in parameters:
            return True
        if node not in seen:
            seen.add(node)
            stack += node.all_input_nodes
    return False


def _unwrap(node: fx.Node) -> fx.Node:
    """Look through copies that change nothing but strides."""
    while node.op == "call_function" and node.target in (aten.contiguous.default, aten.clone.default):
        node = operand(node)
    return node


def _before_repeat(kv: fx.Node, q: fx.Node) -> fx.Node:
    """Return the (b, h_kv, t, d) tensor that was repeated to (b, h, t, d) by unsqueeze, expand and reshape; else `kv`
    itself."""
    wanted, node, seen = kv.meta["val"].shape, kv, []
    while node.op == "call_function" and node.target in _REPEATS:
        seen.append(node.target)
        node = operand(node)
        shape = node.meta["val"].shape
        is_source = len(shape) == 4 and shape[0] == wanted[0] and shape[2:] == wanted[2:] and shape[1] < wanted[1]
        if is_source and aten.expand.default in seen and wanted[1] % shape[1] == 0 and _repeats_inner(kv, node):
            return node
    return kv


def _repeats_inner(kv: fx.Node, source: fx.Node) -> bool:
    """Return whether each head is repeated in place (h0 h0 h1 h1), as grouped queries want, checked on the head
    numbers."""
    heads, repeated = source.meta["val"].shape[1], kv.meta["val"].shape[1]
    chain, node = [], kv
    while node is not source:
        chain.append(node)
        node = operand(node)
    if any(n.target is aten.expand.default and n.meta["val"].dim() != 5 for n in chain):
        return False
    expand = next(n for n in chain if n.target is aten.expand.default)
    return tuple(expand.meta["val"].shape[1:3]) == (heads, repeated // heads)


def _simplify(graph_module: fx.GraphModule, node: fx.Node, mask: fx.Node, causal: bool) -> tuple[fx.Node | None, bool]:
    """Return (mask or None, causal) that mean the same as the given mask."""
    known = graph_module.__dict__.setdefault("_autopar_masks", {})
    writes = [(n, storage_key(into.meta["val"])) for n in _before(node) for into in written(n)]
    key = mask, len(writes)  # what is written in between may change it for the next attention
    if key not in known:
        known[key] = _constant_value(graph_module, mask, writes)
    value = known[key]
    if value is None:
        return mask, causal
    keep = value if value.dtype == torch.bool else None
    if keep is None and bool(((value == 0) | (value <= torch.finfo(value.dtype).min / 2)).all()):
        keep = value == 0
    if keep is not None and bool(keep.all()):
        return None, causal
    rows, columns = value.shape[-2:]
    if (
        keep is not None
        and rows == columns
        and bool((keep == torch.ones(rows, columns, dtype=torch.bool).tril()).all())
    ):
        return None, True
    small = value[:1] if value.dim() == 4 and bool((value == value[:1]).all()) else value
    constants = graph_module.__dict__.setdefault("_autopar_mask_constants", {})
    if key not in constants:  # the first attention that reads it comes first
        name = f"constant_mask_{len(constants)}"
        setattr(graph_module, name, small.contiguous())  # not as a buffer: those are the model's
        constants[key] = graph_module.graph.create_node("get_attr", name)
        constants[key].meta["val"] = small
    return constants[key], causal


def _constant_value(
    graph_module: fx.GraphModule, mask: fx.Node, writes: list[tuple[fx.Node, int]]
) -> torch.Tensor | None:
    """Return the mask's value after `writes`, nodes with the memory that each writes to, if it depends on no input of
    the call, on no random number and on no buffer that the call writes to, else None."""
    if mask.meta["val"].numel() > LARGEST_MASK_NUMEL:
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
        values[node] = node.target(*args, **kwargs)
    return values[mask]


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
