"""What a call remembers of the tensors that its backward needs: their versions, and for a second forward the tensors themselves.

A program in which the loss alone has a tangent is the cheapest one, and serves every loop that calls `loss.backward()`. A gradient
that arrives for another output needs a program with tangents for all outputs: it runs the forward again, from the tensors of the
call, the random state that the first forward drew, and the state that it read. All of it is there already; only the state that the
forward itself overwrites is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ..errors import InputError
from ..graph import PARTNERS, Role, output_node


@dataclass(frozen=True)
class Versions:
    """Tensors with the number of writes that each had seen. A DTensor counts those to itself, its local values do not."""

    of: Sequence[tuple[Role, torch.Tensor, int]]

    @staticmethod
    def now(roles: Sequence[Role], tensors: Sequence[torch.Tensor], at: Sequence[int]) -> Versions:
        """Of those at these positions."""
        return Versions([(roles[i], tensors[i], tensors[i]._version) for i in at])

    def check(self) -> None:
        """Raises InputError if one was written to since."""
        for role, tensor, version in self.of:
            if tensor._version != version:
                raise InputError(
                    f"the {role.kind} {role.name}, which this backward needs, has been modified by an inplace operation since the "
                    "forward",
                    fix="call backward() before optimizer.step() and other writes, or call the model again",
                )


@dataclass(frozen=True)
class Kept:
    """The values of a forward's placeholders, by role."""

    values: dict[tuple[str, str], torch.Tensor]
    versions: Versions

    def take(self, roles: Sequence[Role]) -> list[torch.Tensor]:
        """The values of another program's placeholders. Raises InputError if one has changed since the forward."""
        self.versions.check()
        return [self.values[role.kind, role.name] for role in roles]


def written_by(graph: fx.Graph) -> set[tuple[str, str]]:
    """Kind and name of the leaves of a joint graph to which its forward gives a new value."""
    roles = [r for r in output_node(graph).meta["roles"] if r is not None and "mutation" in r.kind]
    return {(kind, role.name) for role in roles for kind in PARTNERS[role.kind]}


def read_by_outputs(graph: fx.Graph) -> set[tuple[str, str]]:
    """Kind and name of the leaves of a joint graph on which outputs of the model depend."""
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
    """Kind and name of the leaves of a joint graph that ops of the backward read, or that are saved for it."""
    leaves = [n for n in graph.nodes if n.op == "placeholder" and not n.meta["role"].is_tangent]
    late = [n for n in leaves if n.name in saved or any(u.meta.get("phase") == "backward" and u.op != "output" for u in n.users)]
    return {(n.meta["role"].kind, n.meta["role"].name) for n in late}
