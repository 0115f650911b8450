"""Values that the backward reads wait for it on the host: copied there behind the op that makes them, and brought back
a block before they are read.

The copy to the host starts right behind the op and is waited for at the end of the next block, so that the copies of a
block have the time of the next one to hide in, and the device holds the values of two blocks at most. In the backward
the copy back starts with the block before the one that reads it first, and is waited for in front of the reader. Views
of a value that the backward reads are made again from what comes back; a view that it reads instead of what that is of
waits there by itself. (Ren et al., ZeRO-Offload, arXiv 2101.06840, for
what trains; Rhu et al., vDNN, arXiv 1602.08124, for values, a layer ahead.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ..._torch import storage_key
from ...errors import VerifyError
from ...ir.block_order import blocks_in_order, one_ahead, one_behind
from ...ir.graph import describe, tensor_of, values_of
from ...ops import autopar
from ...plans.saved_on_host import SavedOnHost
from .emit import Builder
from .partition import phase_of, view_base


def save_on_host(local: fx.GraphModule, saved: SavedOnHost) -> fx.GraphModule:
    """Rewrite a local joint graph in place. Raises VerifyError for a value that the graph does not have, or that the
    backward does not read."""
    graph, found = local.graph, {}
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.meta["val"], torch.Tensor) and phase_of(node) == "forward":
            producer, output = tensor_of(node)
            found[producer.name, output] = node
    order, moves = _Order(graph), []
    for name, output in saved.values:
        if (name, output) not in found:
            raise VerifyError(f"output {output} of {name} is to wait on the host, and no op of the forward gives it")
        moves.append(_Move.of(found[name, output], order))
    for move in sorted(moves, key=lambda move: order.place[move.readers[0]]):  # what is read first comes back first
        move.make(graph, order)
    graph.lint()
    local.recompile()
    return local


class _Order:
    """The ops of both phases as they were, with where copies of what they make end and of what they read start."""

    def __init__(self, graph: fx.Graph):
        ops = [n for n in graph.nodes if n.op == "call_function"]
        self.forward, self.backward = ([n for n in ops if phase_of(n) == phase] for phase in ("forward", "backward"))
        self.place = {n: i for phase in (self.forward, self.backward) for i, n in enumerate(phase)}
        self.in_graph = {n: i for i, n in enumerate(ops)}
        names = ([n.meta.get("module", "") for n in phase] for phase in (self.forward, self.backward))
        self.behind = one_behind(blocks_in_order(next(names), False))
        self.ahead = one_ahead(blocks_in_order(next(names), True))

    def in_memory_of(self, node: fx.Node) -> list[fx.Node]:
        """Return the views of what an op of the forward makes in memory of its own."""
        memory = storage_key(node.meta["val"])
        return [n for n in self.forward if n is not node and any(storage_key(v) == memory for v in values_of(n))]

    def end(self, node: fx.Node) -> fx.Node:
        """Return the op of the forward behind which a copy of what a node makes is waited for."""
        return self.forward[self.behind[self.place[node]] - 1]

    def start(self, reader: fx.Node) -> fx.Node:
        """Return the op of the backward before which a copy of what a node reads starts."""
        return self.backward[self.ahead[self.place[reader]]]


@dataclass(frozen=True)
class _Move:
    """A value that waits on the host, views of it in order, and the ops of the backward that read one of these."""

    node: fx.Node
    views: list[fx.Node]
    readers: list[fx.Node]

    @classmethod
    def of(cls, node: fx.Node, order: _Order) -> _Move:
        """Return the move of a value. Raises VerifyError for one that cannot be moved."""
        views = [] if view_base(node) is not None else order.in_memory_of(node)
        family = {node, *views}
        readers = [n for n in order.backward if not family.isdisjoint(n.all_input_nodes)]
        if not readers and view_base(node) is not None:
            raise VerifyError(f"{node.name} is to wait on the host and lies in other memory", node=describe(node))
        if not readers:
            raise VerifyError(f"the backward does not read {node.name}, which is to wait for it", node=describe(node))
        return cls(node, views, readers)

    def make(self, graph: fx.Graph, order: _Order) -> None:
        """Add the copies to a graph."""
        value, first = self.node.meta["val"], self.readers[0]
        builder = Builder(graph, value.fake_mode)
        device = torch.device(value.device.type)  # the rank's own, whichever that is
        origin = {key: self.node.meta[key] for key in ("module", "source", "global", "layout") if key in self.node.meta}

        def call(phase: str, op, *args: object) -> fx.Node:
            builder.meta = origin | {"phase": phase}
            return builder.call(op.default, *args, name=f"{self.node.name}_{op.__name__}")

        with graph.inserting_after(self.node):
            sent = call("forward", autopar.to_host, self.node)
        sent.meta = {key: sent.meta[key] for key in ("module", "source", "phase", "val")}
        end, start = order.end(self.node), order.start(first)
        is_late = order.in_graph[end] > order.in_graph[first]  # where phases are not one after the other
        with graph.inserting_after(sent if is_late or end is self.node else end):
            host = call("forward", autopar.on_host, sent, self.node)
        with graph.inserting_before(start if order.in_graph[start] > order.in_graph[end] else first):
            fetched = call("backward", autopar.to_device, host, device)
        fetched.meta = {key: fetched.meta[key] for key in ("module", "source", "phase", "val")}
        with graph.inserting_before(first):
            copies = {self.node: call("backward", autopar.on_device, fetched, host, device)}
            for view in self.views:
                copies[view] = graph.node_copy(view, lambda a: copies.get(a, a))
                copies[view].meta = view.meta | {"phase": "backward"}
        for reader in self.readers:
            for argument in reader.all_input_nodes:
                if argument in copies:
                    reader.replace_input_with(argument, copies[argument])
        for view in reversed(self.views):
            if not copies[view].users:
                graph.erase_node(copies[view])
