"""A backward of a stage, whole or a part of it, that adds up the gradients of parameters over the micro-batches.

The first micro-batch's gradients become the sums. For those that follow each gradient is added where the graph has
computed it: a second set of all of a stage's gradients is never there.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx

from .._torch import graph_module
from ..ir.graph import output_node
from ..processes.process_groups import ProcessGroups
from .loaded import LoadedGraph

aten = torch.ops.aten


class StageBackward:
    """`repeats`: whether it runs for several micro-batches."""

    def __init__(self, module: fx.GraphModule, groups: ProcessGroups, device: torch.device, phase: str, repeats: bool):
        self.roles = list(output_node(module.graph).meta["roles"])
        self.names = tuple(role.name for role in self.roles if _is_gradient(role))
        following = adding(module) if repeats and self.names else None
        self.first = LoadedGraph(module, groups, device, phase)
        self.following = LoadedGraph(following, groups, device, phase) if following else None

    def compile(self, options: Mapping[str, object]) -> None:
        """Run the graphs through torch.compile, with these options of it."""
        for graph in (self.first, self.following):
            if graph is not None:
                graph.compile(options)

    def run(self, values: list, sums: dict[str, Tensor]) -> list[Tensor]:
        """Run the graph and return what it gives besides gradients of parameters, which are added to `sums`. Empties
        `values`."""
        if self.following is not None and all(name in sums for name in self.names):
            values += [sums[name] for name in self.names]
            results = self.following.run(values)
            sums |= {role.name: value for role, value in zip(self.roles, results) if _is_gradient(role)}
        else:
            results = self.first.run(values)
            self._begin(results, sums)
        return [value for role, value in zip(self.roles, results) if not _is_gradient(role)]

    def _begin(self, results, sums: dict[str, Tensor]) -> None:
        """Make the first gradients the sums, each in memory of its own, since sums are added to in place."""
        taken = set()
        for role, value in zip(self.roles, results):
            if _is_gradient(role):
                memory = value.untyped_storage()
                is_own = memory.nbytes() == value.numel() * value.element_size() and memory.data_ptr() not in taken
                sums[role.name] = value if is_own else value.clone()
                taken.add(memory.data_ptr())


def adding(backward: fx.GraphModule) -> fx.GraphModule:
    """Return the same graph, which takes a sum for each gradient of a parameter behind its other arguments, and returns
    it with the gradient added, in place."""
    graph, roles = fx.Graph(), output_node(backward.graph).meta["roles"]
    results = list(graph.graph_copy(backward.graph, {}))
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for at, role in enumerate(roles):
        if _is_gradient(role):
            gradient = results[at]
            with graph.inserting_after(last):
                last = graph.placeholder(f"running_sum_{at}")
            with graph.inserting_after(gradient if gradient.op != "placeholder" else last):
                results[at] = graph.call_function(aten.add_.Tensor, (last, gradient))
            last.meta = {"val": gradient.meta["val"]}
            results[at].meta = dict(last.meta)
    graph.output(tuple(results)).meta["roles"] = list(roles)
    graph.lint()
    return graph_module(backward, graph, type(backward).__name__)


def _is_gradient(role) -> bool:
    return role is not None and role.kind != "returned"
