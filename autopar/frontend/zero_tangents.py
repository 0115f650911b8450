"""Tangents that are zero, out of a joint graph.

Torch counts the new value of a parameter or buffer that the forward writes to among the outputs that have a gradient.
In a training step nothing is ever computed from it outside of the forward, so its tangent is zero. A backward is linear
in all tangents together: an op is zero if everything in it that depends on a tangent is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ..ir.graph import output_node

aten = torch.ops.aten


def drop_tangents(graph: fx.Graph, zeros: Sequence[fx.Node], tangents: Sequence[fx.Node]) -> None:
    """Rewrite a joint graph as if the placeholders `zeros`, some of its `tangents`, were zero, and erase them. An
    output that is zero becomes None."""
    if not zeros:
        return
    dependent, zero = set(tangents), set(zeros)
    for node in list(graph.nodes):
        terms = [a for a in dict.fromkeys(node.all_input_nodes) if a in dependent]
        if not terms or node.op == "output":
            continue
        dependent.add(node)
        gone = [a for a in terms if a in zero]
        if len(gone) == len(terms):
            zero.add(node)
        elif gone and not _is_only_the_other_term(node, zero):
            for argument in gone:
                node.replace_input_with(argument, _filled(node, argument))
    output = output_node(graph)
    output.args = (tuple(None if value in zero else value for value in output.args[0]),)
    for node in reversed(list(graph.nodes)):
        if node in zero:
            graph.erase_node(node)


def _is_only_the_other_term(node: fx.Node, zero: set[fx.Node]) -> bool:
    """Return whether the node is a sum of which one term is zero; if so, replace it by the other one."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return False
    (other,) = (a for a in node.args if a not in zero)
    before, after = other.meta["val"], node.meta["val"]
    if (before.shape, before.dtype) != (after.shape, after.dtype):
        return False
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)
    return True


def _filled(before: fx.Node, argument: fx.Node) -> fx.Node:
    value = argument.meta["val"]
    with before.graph.inserting_before(before):
        new = before.graph.call_function(
            aten.full.default, (list(value.shape), 0), {"dtype": value.dtype, "device": value.device}
        )
    new.meta = dict(argument.meta)
    return new
