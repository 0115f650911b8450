"""Price the tail of a step, which runs once between the forwards of all micro-batches and their backwards, whole on
every device of the last stage (passes/pipeline/tail.py)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from ...cost.compute import FREE, ComputeCost
from ...ir.graph import bytes_of, is_op, tensor_arguments, values_of
from ...ir.layout import Layout
from ...ir.mesh import Mesh
from ...passes.pipeline.tail import Tail
from ...rules import Strategy


@dataclass(frozen=True)
class TailCost:
    """The seconds of a tail, for which every backward waits, and the most bytes that it holds at once on a device: what
    it reads of all micro-batches, and what it makes."""

    seconds: float = 0.0
    bytes_: float = 0.0


NO_TAIL = TailCost()


def tail_cost(tail: Tail, cost: ComputeCost, mesh: Mesh) -> TailCost:
    """Return what a tail costs. `mesh`: of a stage."""
    graph = tail.graph_module.graph
    seconds = sum(_seconds(node, cost, mesh) for node in graph.nodes if is_op(node))
    given = sum(sum(map(bytes_of, values_of(node))) for node in graph.nodes if node.op == "placeholder")
    return TailCost(seconds, float(given + _most_made(graph)))


def _seconds(node: fx.Node, cost: ComputeCost, mesh: Mesh) -> float:
    arguments, made = [a.meta["val"] for a in tensor_arguments(node)], values_of(node)
    inputs, outputs = (tuple(Layout.replicated(v.dim()) for v in values) for values in (arguments, made))
    return cost.seconds(node, Strategy(inputs, outputs, (), 1), mesh, sum(map(bytes_of, [*arguments, *made])))


def _most_made(graph: fx.Graph) -> int:
    """Return the most bytes at once of what ops make, each held until the last reader of it or of a view has run."""
    owner: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        is_view = node.target in FREE and bool(node.all_input_nodes)
        owner[node] = owner[node.all_input_nodes[0]] if is_view else node
    last = {owner[a]: node for node in graph.nodes for a in node.all_input_nodes}
    held = most = 0
    for node in graph.nodes:
        held += _made_bytes(node) if owner[node] is node else 0
        most = max(most, held)
        held -= sum(_made_bytes(made) for made in {owner[a] for a in node.all_input_nodes} if last[made] is node)
    return most


def _made_bytes(node: fx.Node) -> int:
    return sum(map(bytes_of, values_of(node))) if is_op(node) else 0
