"""One rank's forward and backward graphs as one differentiable function of the parameters.

The graphs contain all collectives. `_Bridge` hangs them into autograd, so that `loss.backward()`, hooks, optimizers and gradient
clipping work as for any module.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .. import _torch
from ..capture import Captured
from ..errors import InputError
from ..graph import output_node
from ..lower import RankProgram
from ..plan import Plan
from .accumulation import Accumulation
from .backward import Backward, refuse_second_derivatives
from .dtensors import spec_of
from .loaded import LoadedGraph
from .parameters import table_of
from .process_groups import ProcessGroups


class Step:
    """Runs the graphs on the parameters and buffers of `module`. What a step needs of them is looked up once, here."""

    def __init__(self, program: RankProgram, captured: Captured, plan: Plan, module: nn.Module, device_mesh,
                 groups: ProcessGroups, accumulation: Accumulation):  # fmt: skip
        self.returns, self.saved = captured.returns, program.parts.saved
        leaves = [n.meta["role"] for n in captured.graph.nodes if n.op == "placeholder"]
        self.kinds = [role.kind for role in leaves if role.kind != "tangent"]
        self.random = module.random
        self.names = [role.name for role in leaves if role.kind == "parameter"]
        self.parameter_tables = [table_of(module, name, "_parameters") for name in self.names]
        self.known = [table[leaf] for table, leaf in self.parameter_tables]
        self.frozen = [i for i, p in enumerate(self.known) if not p.requires_grad]
        self.specs = [p._spec for p in self.known]
        self.buffer_tables = [table_of(module, r.name, "_buffers") for r in leaves if r.kind == "buffer"]
        self._read_outputs(captured, plan, module, device_mesh)
        parts = program.parts
        self.forward_graph = LoadedGraph(parts.forward, groups, torch.device(device_mesh.device_type), "forward")
        self.backward = None
        if parts.backward is not None:
            self.backward = Backward(
                parts.backward, captured, plan, self.names, self.specs, device_mesh, groups, accumulation
            )

    def _read_outputs(self, captured: Captured, plan: Plan, module: nn.Module, device_mesh) -> None:
        output = output_node(captured.graph)
        roles, values = output.meta["roles"], [n.meta["val"] for n in output.args[0]]
        order = [i for i, r in enumerate(roles) if r.kind in ("output", "mutation")]  # as the forward graph returns them
        self.forward_count = len(order)
        self.outputs = [at for at, i in enumerate(order) if roles[i].kind == "output"]
        self.mutated = [
            (at, table_of(module, roles[i].name, "_buffers")) for at, i in enumerate(order) if roles[i].kind == "mutation"
        ]
        outputs = [(values[order[at]], plan.sharding.outputs[order[at]]) for at in self.outputs]
        self.output_specs = [
            spec_of(layout, v.shape, v.dtype, plan.mesh, device_mesh) if v.dim() else None for v, layout in outputs
        ]

    def compile(self, options: Mapping[str, object]) -> None:
        """Both graphs through torch.compile, with these options of it."""
        self.forward_graph.compile(options)
        if self.backward is not None:
            self.backward.compile(options)

    def __call__(self, inputs: list[torch.Tensor]):
        """The model's output for this rank's part of the batch."""
        if "random" in self.kinds and _torch.is_in_backward():
            raise InputError(
                "the model draws random numbers and is called inside of a backward, where it would not draw those of the forward",
                fix="leave out torch.utils.checkpoint around the model: compile with a memory limit, and autopar recomputes blocks",
            )
        parameters = [table[leaf] for table, leaf in self.parameter_tables]
        self._check(parameters)
        if torch.is_grad_enabled() and self.backward is not None:
            outputs = _Bridge.apply(self, inputs, *parameters)
        else:
            outputs, _ = self.forward(inputs, parameters)
        return self.returns.rebuild(outputs)

    def _check(self, parameters: list[nn.Parameter]) -> None:
        if not all(map(operator.is_, parameters, self.known)):
            for name, parameter, spec in zip(self.names, parameters, self.specs):
                if not isinstance(parameter, DTensor) or parameter._spec != spec:
                    raise InputError(
                        f"{name} was replaced by a tensor of another layout, shape or dtype",
                        fix="write into the parameter (with torch.no_grad(): parameter.copy_(value)) and leave it in place",
                    )
            self.known = parameters
        for i in self.frozen:
            if parameters[i].requires_grad:
                raise InputError(
                    f"{self.names[i]} was frozen when the model was compiled and requires a gradient now",
                    fix="set requires_grad before autopar.compile",
                )

    def forward(self, inputs: list[torch.Tensor], parameters) -> tuple[list[torch.Tensor], list]:
        """(outputs of the model, values saved for the backward); buffers take their new values."""
        values = {
            "input": iter(inputs),
            "parameter": map(_torch.local_of, parameters),
            "buffer": (table[leaf] for table, leaf in self.buffer_tables),
            "random": (self.random.next() for _ in self.kinds),  # asked once, by a graph that draws
        }
        results = self.forward_graph.run([next(values[kind]) for kind in self.kinds])
        for at, (table, leaf) in self.mutated:
            table[leaf].copy_(results[at])
        # a number is given as an object of its own: the graph may return one tensor as two outputs
        outputs = [
            results[at].detach() if spec is None else _torch.as_dtensor(results[at], spec)
            for at, spec in zip(self.outputs, self.output_specs)
        ]
        return outputs, list(results[self.forward_count :])


class _Bridge(torch.autograd.Function):
    """A Step in autograd. Outputs that have a tangent have a gradient: the loss alone if there is one."""

    @staticmethod
    def forward(ctx, step: Step, inputs: list[torch.Tensor], *parameters):
        outputs, saved = step.forward(inputs, parameters)
        ctx.step = step
        ctx.others = [None if isinstance(s, torch.Tensor) else (s,) for s in saved]
        ctx.save_for_backward(*[s for s in saved if isinstance(s, torch.Tensor)])
        differentiable = {at for at, *_ in step.backward.tangents}
        ctx.mark_non_differentiable(*[o for at, o in enumerate(outputs) if at not in differentiable])
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *tangents):
        refuse_second_derivatives()
        tensors = iter(ctx.saved_tensors)
        saved = [next(tensors) if other is None else other[0] for other in ctx.others]
        del tensors
        _torch.release_saved(ctx)
        nodes = [node for node, _ in ctx.next_functions]
        return None, None, *ctx.step.backward(saved, tangents, ctx.step.known, nodes)
