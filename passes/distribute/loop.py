"""Looped collectives: a gather of activations goes round beside the products that read it, and a reduce-scatter beside
those whose results it adds up, a block of rows at a time (asynchronous tensor parallelism).

Of an all-gather along rows each device sends the block that it holds to its neighbour, multiplies it meanwhile, and
goes on with the one that arrives: P - 1 messages and P products of a block for each of all products that read the
gathered tensor, which share one loop. A product writes its rows into one output, in place. What else reads the gathered
tensor, as the gradient of the weight does, gets its blocks joined.

A reduce-scatter goes round as sums: the block that ends at a device starts at its next neighbour, and each device adds
its own products to what arrives, which are computed while that travels. Products whose results were added up before
(gradients of an input that several layers read) are added up block by block.

The bytes are those of the collective; blocks are padded to the longest, as there. A sum is in the order of the ring,
which begins behind its owner. Wang et al., "Overlap Communication with Dependent Computation via Decomposition",
ASPLOS 2023; PyTorch's asynchronous tensor parallelism cuts in the same way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from ...errors import VerifyError
from ...ir.graph import describe, operand
from ...ir.layout import Layout, local_shape
from ...ir.mesh import Mesh
from ...ops import ROW_PRODUCTS, autopar
from ...plans.sharding import Loop
from . import bucket
from .emit import Builder, Emitter, contiguous
from .neighbours import Neighbours

aten = torch.ops.aten


def loop(local: fx.GraphModule, loops: Iterable[Loop]) -> fx.GraphModule:
    """Put loops in the place of collectives of a local joint graph, in place; of those whose products it has. Run it
    before canonical ops are lowered. Raise VerifyError for a loop that the graph has no place for."""
    nodes = {node.name: node for node in local.graph.nodes}
    starts = {
        (c.kind, c.tensor, c.phase, _result(node).meta["layout"]): node
        for node in local.graph.nodes
        if (c := node.meta.get("collective")) and "tensor" in node.meta
    }
    for one in loops:
        products = [nodes[name] for name in one.products if name in nodes]
        if not products:  # they are in another stage, or graph, of the step
            continue
        start = starts.get((one.kind, one.tensor, one.phase, one.layout))
        if start is None or len(products) < len(one.products):
            raise VerifyError(f"no {one.kind} of {one.tensor} is beside {', '.join(one.products)}")
        around = _Loop(local, start, products)
        (around.gather if one.kind == "all_gather" else around.reduce)()
    local.graph.eliminate_dead_code()
    local.graph.lint()
    local.recompile()
    return local


def _result(start: fx.Node) -> fx.Node:
    """Return the value that a redistribution ends with, given its collective."""
    return _way_on(start)[-1]


def _way_on(start: fx.Node) -> list[fx.Node]:
    """Return the nodes of a redistribution from its collective to its result."""
    way = [start]
    while "layout" not in way[-1].meta:
        way.append(next(iter(way[-1].users)))
    return way


@dataclass(frozen=True)
class _Loop:
    """One collective, which starts at `start`, and the products beside it."""

    local: fx.GraphModule
    start: fx.Node
    products: Sequence[fx.Node]

    @cached_property
    def way(self) -> list[fx.Node]:
        """Return the nodes of the redistribution from its collective on."""
        return _way_on(self.start)

    @property
    def result(self) -> fx.Node:
        """Return what the redistribution ends with."""
        return self.way[-1]

    @cached_property
    def source(self) -> fx.Node:
        """Return what the redistribution begins with."""
        node = operand(self.start)
        while "layout" not in node.meta:
            node = operand(node)
        return node

    @cached_property
    def builder(self) -> Builder:
        """Return what appends to the graph."""
        return Builder(self.local.graph)

    @cached_property
    def ring(self) -> Neighbours:
        """Return the devices of the group."""
        meta, mesh, rank = self.start.meta["collective"], self._mesh, self.local.meta["rank"]
        group = mesh.group(meta.axes, rank)
        return Neighbours(self.builder, meta.axes, len(group), group.index(rank), f"{meta.kind}_loop", meta.tensor)

    @property
    def _mesh(self) -> Mesh:
        return self.local.meta["mesh"]

    @cached_property
    def emitter(self) -> Emitter:
        """Return what pads and cuts."""
        return Emitter(self.builder, self._mesh, {})

    @cached_property
    def dim(self) -> int:
        """Return the dim that is cut over the devices."""
        layouts: list[Layout] = [node.meta["layout"] for node in (self.source, self.result)]
        before, after = layouts if self.start.meta["collective"].kind == "all_gather" else layouts[::-1]
        (axis,) = self.ring.axes
        dim = before.dim_of(axis)
        if dim is None or after.dim_of(axis) is not None or before.parts[dim] != 1 or dim + 1 == len(before.dims):
            raise VerifyError(f"{self.start.name} does not cut rows", node=describe(self.result))
        return dim

    @cached_property
    def ends(self) -> list[tuple[int, int]]:
        """Return where each device's block of rows begins and ends."""
        cut = min((self.source, self.result), key=lambda node: node.meta["val"].shape[self.dim]).meta
        (axis,), whole = self.ring.axes, cut["global"].shape
        here = self._mesh.coordinate(self.local.meta["rank"])
        sizes = [
            local_shape(whole, cut["layout"], self._mesh, here | {axis: place})[self.dim]
            for place in range(self.ring.size)
        ]
        return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))

    def gather(self) -> None:
        """Put a loop in the place of an all-gather and of the products that read what it gives."""
        graph, ring, held = self.start.graph, self.ring, self.source
        self._check(all(operand(p) is self.result and p.target in ROW_PRODUCTS for p in self.products))
        weights = bucket.made_after(self.start, [operand(p, 1) for p in self.products])
        self._check(self.result not in weights)
        for node in weights:
            self.start.prepend(node)
        blocks: dict[int, fx.Node] = {}
        with graph.inserting_before(self.start):
            results = [_Rows(self, p, self.dim) for p in self.products]
            self._belong_to(self.start)
            message = self._message(held)
            for step in range(ring.size):
                block = (ring.place - step) % ring.size
                self._belong_to(self.start)
                started = self._send(message) if step + 1 < ring.size else None
                for rows in results:
                    rows.write(held, *self.ends[block])
                blocks[block] = held
                if started is not None:
                    self._belong_to(self.start)
                    message = self.ring.arrived(started)  # which goes on as it is
                    held = self._block_in(message, (block - 1) % ring.size)
            outputs = [rows.written() for rows in results]
            for product, output in zip(self.products, outputs):
                bucket.become(product, output)
                product.meta.pop("sharding", None)
            if self.result.users:
                self._belong_to(self.start)
                joined = self.builder.call(aten.cat.default, [blocks[i] for i in range(ring.size)], self.dim)
                bucket.become(self.result, joined)
        self._remove()

    def reduce(self) -> None:
        """Put a loop in the place of a reduce-scatter and of the products whose results, or their sum, it adds up."""
        graph, ring = self.start.graph, self.ring
        self._check(set(self._summands(self.source)) == set(self.products))
        with graph.inserting_before(self.start):
            total = self._product_of(*self.ends[ring.place - 1])
            for step in range(1, ring.size):
                block = (ring.place - 1 - step) % ring.size
                self._belong_to(self.start)
                started = self._send(self._message(total))
                own = self._product_of(*self.ends[block])
                self._belong_to(self.start)
                arrived = self._block_in(self.ring.arrived(started), block)
                total = self.builder.call(aten.add_.Tensor, own, arrived)
            bucket.become(self.result, total)
        self._remove()

    def _product_of(self, begin: int, end: int) -> fx.Node:
        """Return some rows of the sum of all products."""
        total = self._rows_of(self.products[0], begin, end)
        for product in self.products[1:]:
            total = self._rows_of(product, begin, end, total)
        shape = list(self.result.meta["val"].shape)
        shape[self.dim] = end - begin
        return self.reshaped(total, shape)

    def _rows_of(self, product: fx.Node, begin: int, end: int, total: fx.Node | None = None) -> fx.Node:
        """Return some rows of a product, added to `total` if there is one."""
        self._belong_to(product)
        rows = _Rows(self, product, self.dim)
        return rows.added(total, self.builder.call(aten.slice.Tensor, operand(product), self.dim, begin, end))

    def _summands(self, node: fx.Node) -> list[fx.Node]:
        """Return the products that a value is the sum of, which nothing else reads."""
        self._check(len(node.users) == 1)
        if node.target is aten.add.Tensor:
            return [one for argument in (operand(node), operand(node, 1)) for one in self._summands(argument)]
        self._check(node.target in ROW_PRODUCTS)
        return [node]

    def _check(self, is_right: bool) -> None:
        if not is_right:
            names = ", ".join(p.name for p in self.products)
            raise VerifyError(f"{self.start.name} cannot go round beside {names}", node=describe(self.result))

    def _belong_to(self, node: fx.Node) -> None:
        """Let what is appended belong to a node's module and phase."""
        self.builder.meta = {key: node.meta[key] for key in ("phase", "module", "source") if key in node.meta}

    @property
    def _longest(self) -> int:
        return max(end - begin for begin, end in self.ends)

    def _message(self, block: fx.Node) -> fx.Node:
        """Return a block as a row, padded to the longest."""
        padded = self.emitter.pad(contiguous(self.builder, block), {self.dim: self._longest})
        return self.reshaped(padded, [1, padded.meta["val"].numel()])

    def _send(self, message: fx.Node) -> fx.Node:
        """Start to send a message to the next device, and to take one from the one before."""
        place, size = self.ring.place, self.ring.size
        return self.ring.start(message, (place + 1) % size, [(place - 1) % size], f"{self.start.name}_loop")

    def _block_in(self, message: fx.Node, block: int) -> fx.Node:
        """Return a block that came."""
        shape, (begin, end) = list(self.result.meta["val"].shape), self.ends[block]
        shape[self.dim] = self._longest
        return self.emitter.cut(self.reshaped(message, shape), {self.dim: end - begin})

    def reshaped(self, x: fx.Node, shape: list[int], target=aten.reshape.default) -> fx.Node:
        """Return a value in another shape."""
        return x if list(x.meta["val"].shape) == shape else self.builder.call(target, x, shape)

    def _remove(self) -> None:
        """Remove what nothing reads of the collective that a loop is in the place of."""
        for node in reversed(self.way):
            if not node.users:
                self.start.graph.erase_node(node)


class _Rows:
    """One product, by blocks of the rows of its first argument along `dim`: a product of matrices, or of a stack of
    them where other dims come before."""

    def __init__(self, around: _Loop, product: fx.Node, dim: int):
        self.call, self.product, self.dim = around.builder.call, product, dim
        self.around, self.parts = around, list[fx.Node]()
        around._belong_to(product)
        shape, weight = product.meta["val"].shape, operand(product, 1)
        self.stack, self.columns = math.prod(shape[:dim]), shape[-1]
        if product.target is autopar.linear.default:
            weight = self.call(aten.t.default, weight)
        if self.stack > 1:
            weight = self.call(aten.expand.default, weight, [self.stack, *weight.meta["val"].shape])
        self.weight = weight

    @cached_property
    def whole(self) -> fx.Node:
        """Return the memory of the result, made of what is gathered: what is made of weights alone may be made once for
        several micro-batches."""
        value = self.product.meta["val"]
        return self.call(aten.new_empty.default, self.around.source, list(value.shape), dtype=value.dtype)

    def write(self, block: fx.Node, begin: int, end: int) -> None:
        """Multiply a block into its rows of the result."""
        self.around._belong_to(self.product)
        rows = self.call(aten.slice.Tensor, self.whole, self.dim, begin, end)
        rows = self.around.reshaped(rows, self._matrices(rows), aten.view.default)
        self.parts.append(self._add_to(rows, block, beta=0))

    def added(self, total: fx.Node | None, block: fx.Node) -> fx.Node:
        """Return the product of a block, added to `total`, in its memory, if there is one."""
        if total is not None:
            return self._add_to(total, block)
        block = self.around.reshaped(block, self._matrices(block))
        return self.call(aten.bmm.default if self.stack > 1 else aten.mm.default, block, self.weight)

    def written(self) -> fx.Node:
        """Return the result, with all its rows."""
        self.around._belong_to(self.product)
        return self.call(autopar.written.default, self.whole, self.parts)

    def _add_to(self, rows: fx.Node, block: fx.Node, **constants) -> fx.Node:
        block = self.around.reshaped(block, self._matrices(block))
        add = aten.baddbmm_.default if self.stack > 1 else aten.addmm_.default
        return self.call(add, rows, block, self.weight, **constants)

    def _matrices(self, x: fx.Node) -> list[int]:
        """Return the shape of some rows as a matrix, or a stack of them."""
        shape = x.meta["val"].shape
        rows = math.prod(shape[self.dim : -1])
        return [self.stack, rows, shape[-1]] if self.stack > 1 else [rows, shape[-1]]
