"""Find what the mask of an attention says: whether it is causal, its window, the documents that it keeps apart, and
what is left.

Libraries build masks from arange and comparisons, bool tensors of batch x sequence x sequence, and join the padding of
a batch to them. A mask is taken apart at its conjunctions. What depends on no input is computed here
(constant_values.py): where it lets everything through it is dropped, where it is the lower triangle the attention is
causal, and where it is a band about the diagonal the attention has a window (bands.py). A factor that keeps documents
apart becomes their integers (documents.py). What is left stays as small as it was before it was broadcast, (b, 1, 1, s)
for padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import fx

from ..._torch import storage_key
from ..._torch.regions import written
from ...ir.graph import call, operand, tensor_arguments, values_of
from .bands import OPEN, TRIANGLE, Band, band_of, band_of_difference, band_of_order, joined
from .constant_values import AND, Write, constant_value, one_sample
from .documents import documents_of

aten = torch.ops.aten
_SAME = (aten.expand.default, aten.to.dtype_layout, aten.to.dtype, aten.to.device, aten._to_copy.default)
ONES = (aten.ones.default, aten.ones_like.default, aten.new_ones.default)  # of bool, all of them open
ORDERS = {  # of two sides: which is to be the lower one, and whether they must differ
    "aten.le.Tensor": (0, False), "aten.ge.Tensor": (1, False),
    "aten.lt.Tensor": (0, True), "aten.gt.Tensor": (1, True),
}  # fmt: skip

LIMITS: dict[str, Callable[[int], tuple[int | None, int | None]]] = {  # the least and the most, of a limit
    "aten.le.Scalar": lambda limit: (None, limit), "aten.ge.Scalar": lambda limit: (limit, None),
    "aten.lt.Scalar": lambda limit: (None, limit - 1), "aten.gt.Scalar": lambda limit: (limit + 1, None),
}  # fmt: skip


@dataclass(frozen=True)
class Mask:
    """Holds what a mask says: a tensor that is `left` of it, whether it is `causal`, integers (b, s) or (s,) of which
    those of a query and a key are equal, and the `window` that it keeps."""

    left: fx.Node | None
    causal: bool
    documents: fx.Node | None = None
    window: int = 0

    @property
    def band(self) -> Band:
        """Return how far a key may be from its query."""
        return Band.of(self.causal, self.window)


def simplify(graph_module: fx.GraphModule, node: fx.Node, mask: fx.Node, causal: bool) -> Mask:
    """Return what the given mask of an attention says."""
    writes = _reaching(mask, [(n, storage_key(into.meta["val"])) for n in _before(node) for into in written(n)])
    known = graph_module.__dict__.setdefault("_autopar_masks", {})
    key = mask, len(writes)  # what is written in between may change it for the next attention
    if key not in known:  # the first attention that reads it comes first
        known[key] = _simplified(graph_module, node, mask, writes)
    found = known[key]
    return replace(found, causal=causal or found.causal)


def _reaching(mask: fx.Node, writes: list[Write]) -> list[Write]:
    """Return the writes that may change a mask: into the memory of what it is made of, and of what that is written
    from."""
    seen, stack, memory = {mask}, [mask], set[int]()
    while stack and writes:
        node = stack.pop()
        memory.update(storage_key(value) for value in values_of(node))
        new = {*node.all_input_nodes, *(n for n, key in writes if key in memory)} - seen
        seen |= new
        stack += new
    return [(n, key) for n, key in writes if key in memory]


def _simplified(graph_module: fx.GraphModule, node: fx.Node, mask: fx.Node, writes: list[Write]) -> Mask:
    value = constant_value(graph_module, mask, writes)
    if value is not None:
        band = band_of(value)
        if band is None or not band.is_said:
            return Mask(constant_mask(graph_module, value), False)
        return Mask(None, band.causal, None, band.window)
    factors = _factors(mask, {key for _, key in writes})
    plain = {factor for factor in factors if not _is_written_to(factor, writes)}
    factors = [factor for factor in factors if factor not in plain or factor.target not in ONES]
    packed = documents_of(graph_module, [f for f in factors if f in plain], writes)
    factors = [factor for factor in factors if packed is None or factor is not packed.factor]
    given = {f: packed.places for f in factors if packed and f in plain and packed.is_relative(f)}
    orders = {f: _band_of_order(graph_module, f, writes, given.get(f, {})) for f in factors if f in plain}
    ids = packed.ids if packed and not packed.is_one else None
    for accepted in (None, (OPEN, TRIANGLE)):  # all bands, or those that are said by themselves
        bands = {f: band for f, band in orders.items() if band and (accepted is None or band in accepted)}
        values, left = [], []
        for factor in (f for f in factors if f not in bands):
            found = constant_value(graph_module, factor, writes, given.get(factor, {}))
            values += [] if found is None else [found]
            left += [factor] if found is None else []
        values = _joined(values)
        known = [band for value in values if (band := band_of(value)) is not None]
        band = joined([*bands.values(), *known])
        if band.is_said and len(known) == len(values):
            return Mask(together(node, left), band.causal, ids, band.window)
    if packed is None:
        return Mask(mask, False)
    constants = [constant_mask(graph_module, value) for value in values]
    return Mask(together(node, [*left, *constants]), joined(bands.values()).causal, ids)


def _is_written_to(factor: fx.Node, writes: list[Write]) -> bool:
    """Return whether something is written to a tensor, or to what it was made of."""
    memory, seen, stack = {key for _, key in writes}, {factor}, [factor] if writes else []
    while stack:
        node = stack.pop()
        if any(storage_key(value) in memory for value in values_of(node)):
            return True
        new = [n for n in node.all_input_nodes if n not in seen]
        seen.update(new)
        stack += new
    return False


def together(node: fx.Node, factors: list[fx.Node]) -> fx.Node | None:
    """Return the conjunction of bool tensors, None of none."""
    if not factors:
        return None
    joint = factors[0]
    for factor in factors[1:]:
        joined = call(node, aten.__and__.Tensor, joint, factor)
        joined.meta["val"] = joint.meta["val"] & factor.meta["val"]
        joint = joined
    return joint


def _factors(mask: fx.Node, written_memory: set[int]) -> list[fx.Node]:
    """Return bool tensors whose conjunction, broadcast, is the mask; itself if it is none."""
    value = mask.meta["val"]
    if mask.op != "call_function" or value.dtype != torch.bool or storage_key(value) in written_memory:
        return [mask]
    if mask.target in AND:
        pair = [a for a in mask.args if isinstance(a, fx.Node) and a.meta["val"].dtype == torch.bool]
        return [f for a in pair for f in _factors(a, written_memory)] if len(pair) == 2 else [mask]
    if mask.target in _SAME and operand(mask).meta["val"].dtype == torch.bool:
        return _factors(operand(mask), written_memory)
    if mask.target is aten.tril.default:
        return [*_factors(operand(mask), written_memory), _lower(mask)]
    if mask.target is aten.unsqueeze.default:
        inner = _factors(operand(mask), written_memory)
        return [_unsqueezed(factor, mask) for factor in inner] if len(inner) > 1 else [mask]
    return [mask]


def _lower(node: fx.Node) -> fx.Node:
    """Return what `tril` keeps, as a comparison of the places of keys and queries."""
    value, diagonal = node.meta["val"], node.args[1] if len(node.args) > 1 else 0
    rows, columns = value.shape[-2:]
    queries = call(node, aten.arange.start, diagonal, rows + diagonal, device=value.device)
    queries.meta["val"] = value.new_empty(rows, dtype=torch.int64)
    queries = _unsqueezed_at(node, queries, -1)
    keys = call(node, aten.arange.default, columns, device=value.device)
    keys.meta["val"] = value.new_empty(columns, dtype=torch.int64)
    made = call(node, aten.le.Tensor, keys, queries)
    made.meta["val"] = value.new_empty(rows, columns)
    return made


def _unsqueezed(factor: fx.Node, node: fx.Node) -> fx.Node:
    """Return a factor of what `node` unsqueezes, with the new dim where it is in the whole."""
    from_end = _new_dim(node)
    return factor if -from_end > factor.meta["val"].dim() + 1 else _unsqueezed_at(node, factor, from_end)


def _new_dim(node: fx.Node) -> int:
    """Return the dim that `unsqueeze` makes, counted from the end."""
    dim = cast(int, node.args[1])
    return dim - node.meta["val"].dim() if dim >= 0 else dim


def _unsqueezed_at(node: fx.Node, x: fx.Node, dim: int) -> fx.Node:
    made = call(node, aten.unsqueeze.default, x, dim)
    made.meta["val"] = x.meta["val"].unsqueeze(dim)
    return made


def _joined(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the conjunction of bool tensors, none of none."""
    while len(values) > 1:
        values = [one_sample(values[0]) & one_sample(values[1]), *values[2:]]
    return values


def _band_of_order(
    graph_module: fx.GraphModule, factor: fx.Node, writes: list[Write], given: Mapping[fx.Node, torch.Tensor]
) -> Band | None:
    """Return the band of a factor that says which of a key's place and a query's is larger, or how much, whatever the
    length: from the places alone."""
    while factor.target in _SAME or factor.target is aten.unsqueeze.default and _new_dim(factor) < -2:
        factor = operand(factor)
    order = ORDERS.get(str(factor.target))
    if str(factor.target) in LIMITS:
        return _band_of_limit(graph_module, factor, writes, given)
    sides = tensor_arguments(factor) if order else []
    values = [v for side in sides if (v := constant_value(graph_module, side, writes, given)) is not None and v.numel()]
    if order is None or len(values) != 2:
        return None
    at, is_strict = order
    low, high = (one_sample(values[i]) if values[i].dim() == 4 else values[i] for i in (at, 1 - at))
    return band_of_order(low, high, is_strict)


def _band_of_limit(
    graph_module: fx.GraphModule, factor: fx.Node, writes: list[Write], given: Mapping[fx.Node, torch.Tensor]
) -> Band | None:
    """Return the band of a factor that compares how far a key's place is from a query's with a number."""
    difference, limit = operand(factor), factor.args[1]
    is_absolute = difference.target is aten.abs.default
    difference = operand(difference) if is_absolute else difference
    sides = tensor_arguments(difference) if difference.target is aten.sub.Tensor and not difference.kwargs else []
    values = [v for side in sides if (v := constant_value(graph_module, side, writes, given)) is not None and v.numel()]
    if len(values) != 2 or not isinstance(limit, int):
        return None
    a, b = (one_sample(value) if value.dim() == 4 else value for value in values)
    least, most = LIMITS[str(factor.target)](limit)
    if is_absolute:
        least = -most if least is None and most is not None else None
        return None if least is None else band_of_difference(a, b, least, most)
    return band_of_difference(a, b, least, most)


def constant_mask(graph_module: fx.GraphModule, value: torch.Tensor) -> fx.Node:
    """Return a node of a mask's value, without its samples if they are alike."""
    value = one_sample(value) if value.dim() == 4 else value
    count = graph_module.__dict__.setdefault("_autopar_mask_constants", [])
    name = f"constant_mask_{len(count)}"
    count.append(name)
    setattr(graph_module, name, value.contiguous())  # not as a buffer: those are the model's
    node = graph_module.graph.create_node("get_attr", name)
    node.meta["val"] = value
    return node


def _before(node: fx.Node) -> list[fx.Node]:
    nodes = list(node.graph.nodes)
    return nodes[: nodes.index(node)]
