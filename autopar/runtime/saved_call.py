"""Remember of a call's tensors what its backward needs: how often they were written to, and for a second
forward the tensors themselves. A DTensor counts the writes to itself, its local values, which the graphs take, do not.

A program in which the loss alone has a tangent is the cheapest one, and serves every loop that calls `loss.backward()`.
A gradient that arrives for another output needs a program with tangents for all outputs: it runs the forward again,
from the tensors of the call, the random state that the first forward drew, and the state that it read. All of it is
there already; only the state that the forward itself overwrites is copied.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import fx

from ..errors import InputError
from ..ir.graph import PARTNERS, Role, output_node

MICRO_BATCHES = "output of all micro-batches"
FIXES = {
    "backward": "call backward() before optimizer.step() and other writes, or call the model again",
    "output": 'read it before optimizer.step() and other writes, or pass tile="none" to keep it from the forward on',
    MICRO_BATCHES: "read it before optimizer.step() and other writes, or leave the plan more memory to keep it in",
}


class SavedCall:
    """A record of one forward: how often its tensors had been written to, and the `values` of its placeholders if a
    second one may need them, else None. `owners`: for each placeholder the tensor that counts the writes, a DTensor if
    the value is its local part; `watched`: positions of those that matter."""

    def __init__(
        self,
        roles: Sequence[Role],
        owners: Sequence[torch.Tensor],
        watched: Sequence[int],
        values: list[torch.Tensor] | None,
    ):
        self.roles, self.watched, self.values = roles, watched, values
        self.owners = [owners[i] for i in watched]
        self.versions = [tensor._version for tensor in self.owners]

    def check(self, needed: Collection[int], reader: str = "backward") -> None:
        """Raise InputError if a tensor at one of the positions `needed` was written to since. `reader`: what needs it,
        a backward or an output that is made when it is read."""
        now = [tensor._version for tensor in self.owners]
        if now == self.versions:
            return
        for i, old, new in zip(self.watched, self.versions, now):
            if old != new and i in needed:
                raise InputError(
                    f"the {self.roles[i].kind} {self.roles[i].name}, which this {reader} needs, has been modified by "
                    "an inplace operation since the forward",
                    fix=FIXES[reader],
                )

    def values_for(self, roles: Sequence[Role]) -> list[torch.Tensor]:
        """Return the values of the placeholders of another program of the same call, which has these roles."""
        named = {(role.kind, role.name): value for role, value in zip(self.roles, self.values)}
        return [named[role.kind, role.name] for role in roles]


def written_by(graph: fx.Graph) -> set[tuple[str, str]]:
    """Return kind and name of the leaves of a joint graph to which its forward gives a new value."""
    roles = [r for r in output_node(graph).meta["roles"] if r is not None and "mutation" in r.kind]
    return {(kind, role.name) for role in roles for kind in PARTNERS[role.kind]}


def read_by_outputs(graph: fx.Graph) -> set[tuple[str, str]]:
    """Return kind and name of the leaves of a joint graph on which outputs of the model depend."""
    output = output_node(graph)
    pairs = zip(output.args[0], output.meta["roles"])
    reached, stack = set(), [n for n, r in pairs if isinstance(n, fx.Node) and r is not None and r.kind == "output"]
    while stack:
        node = stack.pop()
        if node not in reached:
            reached.add(node)
            stack.extend(node.all_input_nodes)
    return {(n.meta["role"].kind, n.meta["role"].name) for n in reached if n.op == "placeholder"}


def read_by_backward(graph: fx.Graph, saved: Sequence[str]) -> set[tuple[str, str]]:
    """Return kind and name of the leaves of a joint graph that ops of the backward read, or that are saved for it."""
    leaves = [n for n in graph.nodes if n.op == "placeholder" and not n.meta["role"].is_tangent]
    late = [
        n
        for n in leaves
        if n.name in saved or any(u.meta.get("phase") == "backward" and u.op != "output" for u in n.users)
    ]
    return {(n.meta["role"].kind, n.meta["role"].name) for n in late}
