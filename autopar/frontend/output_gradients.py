"""Find the outputs of a call that require a gradient, once passes have attached to the exported forward what trains."""

from __future__ import annotations

import torch
from torch import fx

from .. import _torch
from ..ir.graph import output_node

aten = torch.ops.aten


def differentiable_outputs(graph_module: fx.GraphModule, inputs: list[torch.Tensor], loss: int | None) -> list[bool]:
    """Return which outputs of an exported forward require a gradient, found by running it on its fake inputs as eager
    torch would. With a `loss` the graph detaches the other outputs (see flat_call.FlatCall); what counts is what they
    are before."""
    outputs = [
        node.args[0] if loss not in (None, at) and node.target is aten.detach.default else node
        for at, node in enumerate(output_node(graph_module.graph).args[0])
    ]
    with torch.enable_grad():
        run = _Run(graph_module, inputs[0].fake_mode, outputs)
        run.run(*inputs)
    return [run.found[node] for node in outputs]


class _Run(fx.Interpreter):
    """Leaves alone the real tensors that the forward would write to."""

    def __init__(self, graph_module: fx.GraphModule, mode, wanted: list[fx.Node]):
        super().__init__(graph_module)
        self.mode, self.wanted = mode, wanted
        self.stand_ins: dict[int, torch.Tensor] = {}
        self.found: dict[fx.Node, bool] = {}

    def get_attr(self, target, args, kwargs):
        value = super().get_attr(target, args, kwargs)
        if not isinstance(value, torch.Tensor) or _torch.is_fake(value):
            return value
        if id(value) not in self.stand_ins:
            self.stand_ins[id(value)] = self.mode.from_tensor(value)
        return self.stand_ins[id(value)]

    def run_node(self, node):
        value = super().run_node(node)
        if node in self.wanted:
            self.found[node] = isinstance(value, torch.Tensor) and value.requires_grad
        return value
