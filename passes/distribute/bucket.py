"""Buckets: small collectives of parameters and gradients travel together, so that they pay the latency of one.

A reduction whose result only leaves the graph can wait for the next ones, a gather of something that arrives with the
call can be made earlier; neighbours over the same axes are packed, in graph order, up to `bucket_bytes` of global
tensors. Every member becomes columns of one (devices, columns) buffer. The bytes sent stay the same. Packing looks at
global sizes alone, so all ranks pack alike, uneven shards or not. Gathers whose copies are kept share no bucket with
others: the micro-batches of a pipeline make those once (passes/pipeline/compute_once.py). Li et al., "PyTorch
Distributed", VLDB 13(12), 2020, section 3.2.3.

Where collectives run beside compute, what nothing can run beside shares no bucket with what it would keep waiting: the
gathers up to the first product of a phase, and the reductions after the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import fx

from ..._torch import c10d
from ...ir.graph import operand
from .emit import Builder, contiguous
from .heavy_ops import is_product

aten = torch.ops.aten


def bucket(local: fx.GraphModule, bucket_bytes: float, overlaps: bool = False) -> fx.GraphModule:
    """Pack collectives of a local joint graph in place. Run it after the canonical ops are lowered. `overlaps`: whether
    collectives run beside compute."""
    graph = local.graph
    # a tensor that moves over two axes is in two buckets: the first gather, or the first reduction, is packed first
    done: set[fx.Node] = set()
    while starts := [s for s in map(lambda n: _Start.of(n, done), graph.nodes) if s is not None]:
        waiting = {s.node for s in starts}
        alone = _beside_nothing(graph) if overlaps else set()
        for buckets in _grouped([s for s in starts if waiting.isdisjoint(s.way)], bucket_bytes, alone).values():
            for members in buckets:
                done |= {s.node for s in members}
                if len(members) > 1:
                    done.add(_pack(graph, members[0].kind, [s.node for s in members]))
    graph.eliminate_dead_code()
    graph.lint()
    local.recompile()
    return local


PACKED = (
    c10d.all_gather_into_tensor.default, c10d.all_reduce.default, c10d.all_to_all_single.default,
    c10d.reduce_scatter_tensor.default,
)  # fmt: skip


@dataclass(frozen=True)
class _Start:
    """A collective that can be packed. kind "gather": of a leaf, so it can be made earlier; "reduce": it only leads out
    of the graph, so it can wait. `way`: the nodes that its value comes through; one of them may have to be packed
    first."""

    node: fx.Node
    kind: str
    way: list[fx.Node]

    @staticmethod
    def of(node: fx.Node, done: set[fx.Node]) -> _Start | None:
        """Return a collective as a `_Start`; None for any other node, one in `done`, or one that cannot be packed."""
        if node.target not in PACKED or not node.meta.get("collective"):
            return None
        if node in done or not operand(node).meta["val"].dim():
            return None
        way = list(_way_in(operand(node)))
        if node.target is c10d.all_gather_into_tensor.default:
            is_leaf = way[-1].op == "placeholder" and way[-1].meta["role"].kind == "parameter"
            # the way in ends at a bucket if that is where the value comes from
            from_bucket = _is_wait_of_bucket(way[-1], "gather")
            return _Start(node, "gather", way) if is_leaf or from_bucket else None
        is_sum = node.target is c10d.all_reduce.default and node.args[1] == "sum"
        if is_sum or node.target in (c10d.all_to_all_single.default, c10d.reduce_scatter_tensor.default):
            return _Start(node, "reduce", way) if _leads_out(node) else None
        return None


def _beside_nothing(graph: fx.Graph) -> set[fx.Node]:
    """Return the gathers before the first product of each phase, and the reductions after the last one."""
    found: set[fx.Node] = set()
    for phase in ("forward", "backward"):
        nodes = [n for n in graph.nodes if n.op == "call_function" and n.meta.get("phase") == phase]
        products = [i for i, node in enumerate(nodes) if is_product(node)]
        if products:
            gathers, reductions = nodes[: products[0]], nodes[products[-1] + 1 :]
            found |= {n for n in gathers if n.target is c10d.all_gather_into_tensor.default}
            found |= {n for n in reductions if n.target is not c10d.all_gather_into_tensor.default}
    return found


def _grouped(starts: list[_Start], bucket_bytes: float, alone: set[fx.Node]) -> dict[tuple, list[list[_Start]]]:
    """Group collectives into buckets by kind, collective, axes, op, type, phase, whether copies are kept, and whether
    they are `alone`."""
    groups: dict[tuple, list[list[_Start]]] = {}
    filled: dict[tuple, float] = {}
    for start in starts:
        node, value = start.node, operand(start.node).meta["val"]
        meta, size = node.meta["collective"], node.meta["tensor_bytes"]
        key = (start.kind, meta.kind, meta.axes, node.target, value.dtype, meta.phase, _is_kept(node), node in alone)
        if key not in groups or filled[key] + size > bucket_bytes:
            groups.setdefault(key, []).append([])
            filled[key] = 0.0
        groups[key][-1].append(start)
        filled[key] += size
    return groups


def _is_kept(start: fx.Node) -> bool:
    """Return whether the redistribution that a collective is part of ends with a copy that is kept."""
    node = start
    while not node.meta.get("kept"):
        users = list(node.users)
        if len(users) != 1 or "tensor" not in users[0].meta:
            return False
        node = users[0]
    return True


def _way_in(node: fx.Node) -> Iterator[fx.Node]:
    """Iterate over a value and the values it is made from, as long as each is made from one alone; a bucket's wait is
    the end."""
    yield node
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
        yield node
        if _is_wait_of_bucket(node, "gather", "reduce"):
            return


def _is_wait_of_bucket(node: fx.Node, *kinds: str) -> bool:
    return node.target is c10d.wait_tensor.default and operand(node).meta.get("bucket") in kinds


def made_after(anchor: fx.Node, values: Iterable[fx.Node]) -> list[fx.Node]:
    """Return these values and what they are computed from, as far as it stands behind `anchor`, in order."""
    order = {node: i for i, node in enumerate(anchor.graph.nodes)}
    found, left = set(), list(values)
    while left:
        node = left.pop()
        if order[node] > order[anchor] and node not in found:
            found.add(node)
            left += node.all_input_nodes
    return sorted(found, key=order.__getitem__)


def _way_out(node: fx.Node) -> Iterator[fx.Node]:
    while (node := next(iter(node.users))).op != "output":
        yield node


def _leads_out(node: fx.Node) -> bool:
    """Return whether a value reaches the outputs through ops that read nothing else."""
    while len(users := list(node.users)) == 1:
        node = users[0]
        if node.op == "output":
            return True
        if len(node.all_input_nodes) != 1:
            return False
    return False


def _pack(graph: fx.Graph, kind: str, starts: list[fx.Node]) -> fx.Node:
    """Put one collective in the place of several: at the first for gathers, at the last for reductions. Return its
    node."""
    builder = Builder(graph)
    anchor = starts[0] if kind == "gather" else starts[-1]
    if kind == "gather":
        for node in made_after(anchor, [operand(s) for s in starts]):
            anchor.prepend(node)
    waits = [next(iter(start.users)) for start in starts]
    devices = (
        1 if starts[0].target in (c10d.all_reduce.default, c10d.all_gather_into_tensor.default) else _devices(starts[0])
    )
    with graph.inserting_before(anchor):
        builder.meta = {k: anchor.meta[k] for k in ("phase", "module", "source") if k in anchor.meta}
        rows = [builder.call(aten.reshape.default, s.args[0], [devices, -1]) for s in starts]
        widths = [r.meta["val"].shape[1] for r in rows]
        packed = contiguous(builder, builder.call(aten.cat.default, rows, 1))
        target, args = starts[0].target, starts[0].args[1:]
        if target is c10d.all_to_all_single.default:
            args = ([1] * devices, [1] * devices, args[-1])
        started = builder.call(target, packed, *args, name=f"bucket_{starts[0].name}")
        started.meta["bucket"] = kind
        first = starts[0].meta["collective"]
        started.meta["collective"] = replace(
            first,
            wire_bytes=sum(s.meta["collective"].wire_bytes for s in starts),
            tensor=f"{first.tensor} and {len(starts) - 1} more",
        )
        wait = builder.call(c10d.wait_tensor.default, started)
        height = wait.meta["val"].numel() // sum(widths)
        columns = builder.call(aten.reshape.default, wait, [height, sum(widths)])
        edge = 0
        for old, width in zip(waits, widths):
            unpacked = builder.call(aten.slice.Tensor, columns, 1, edge, edge + width)
            # the same, whatever else the graph packs: saved values go by their names
            name = f"{old.meta['tensor']}_of_bucket"
            unpacked = contiguous(
                builder, builder.call(aten.reshape.default, unpacked, list(old.meta["val"].shape), name=name), name
            )
            unpacked.meta = {**old.meta, "val": unpacked.meta["val"]}
            old.replace_all_uses_with(unpacked)
            edge += width
            cursor = anchor.prev
            if kind == "reduce":  # what the result goes through on its way out now comes after the bucket
                for node in _way_out(unpacked):
                    cursor.append(node)
                    cursor = node
    for start, old in zip(starts, waits):
        graph.erase_node(old)
        graph.erase_node(start)
    return started


def _devices(start: fx.Node) -> int:
    if start.target is c10d.all_to_all_single.default:
        return len(cast(list[int], start.args[1]))
    return cast(int, start.args[2])


def rows_of(start: fx.Node) -> list[fx.Node]:
    """Return what is packed for a collective, (devices, columns) each; nothing if it is of no bucket."""
    return list(cast(list[fx.Node], operand(start).args[0])) if start.meta.get("bucket") else []


def read_columns(start: fx.Node, rows: fx.Node, builder: Builder) -> None:
    """Let the tensors of a bucket be read from `rows`, a view (..., columns) that has the rows of all devices in order,
    and not from what a collective gives."""
    (wait,) = start.users
    (columns,) = wait.users
    for piece in list(columns.users):
        (old,) = piece.users
        with wait.graph.inserting_before(piece):
            part = builder.call(aten.slice.Tensor, rows, rows.meta["val"].dim() - 1, *piece.args[2:])
            part = builder.call(aten.reshape.default, part, list(old.meta["val"].shape))
            part = contiguous(builder, part)
        copy = next(iter(old.users), old)
        is_copied = copy.target is aten.clone.default and copy.name.startswith(old.name)  # by `contiguous`
        become(copy if is_copied else old, part)
        for node in (old, piece) if is_copied else (piece,):
            wait.graph.erase_node(node)
    wait.graph.erase_node(columns)


def become(node: fx.Node, other: fx.Node) -> None:
    """Let a node do what another does, which it replaces, under its own name, and with its own fake value, with which
    views of it share storage."""
    node.target, node.args, node.kwargs = other.target, other.args, other.kwargs
    node.graph.erase_node(other)
