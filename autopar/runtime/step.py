"""One rank's forward and backward graphs as one differentiable function of the parameters.

The graphs contain all collectives. `_Bridge` hangs them into autograd, so that `loss.backward()`, hooks, optimizers and gradient
clipping work as for any module.
"""

from __future__ import annotations

import operator

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from .. import _torch
from ..capture import Captured
from ..codegen import bind_groups, boxed, group_names
from ..errors import InputError
from ..graph import output_node
from ..layout import local_shape
from ..lower import RankProgram
from ..plan import Plan
from . import process_groups, watch
from .dtensors import redistributed, spec_of
from .parameters import table_of


class Step:
    """Runs the graphs on the parameters and buffers of `module`. What a step needs of them is looked up once, here."""

    def __init__(self, program: RankProgram, captured: Captured, plan: Plan, module: nn.Module, device_mesh):
        self.mesh, self.device_mesh, self.returns = plan.mesh, device_mesh, captured.returns
        self.coordinate = plan.mesh.coordinate(program.rank)
        self.device = torch.device(device_mesh.device_type)
        self._load(program)
        leaves = [n.meta["role"] for n in captured.graph.nodes if n.op == "placeholder"]
        self.kinds = [role.kind for role in leaves if role.kind != "tangent"]
        self.random = module.random
        self.names = [role.name for role in leaves if role.kind == "parameter"]
        self.parameter_tables = [table_of(module, name, "_parameters") for name in self.names]
        self.known = [table[leaf] for table, leaf in self.parameter_tables]
        self.frozen = [i for i, p in enumerate(self.known) if not p.requires_grad]
        self.specs = [p._spec for p in self.known]
        self.buffer_tables = [table_of(module, r.name, "_buffers") for r in leaves if r.kind == "buffer"]
        self._read_outputs(captured, plan, module)

    def _load(self, program: RankProgram) -> None:
        modules = [m for m in (program.parts.forward, program.parts.backward) if m is not None]
        names = set().union(*(group_names(m) for m in modules))
        bound = process_groups.bind(names, self.mesh, self.device_mesh, program.rank)
        for module in modules:
            boxed(bind_groups(module, bound)).to(self.device)
        self.forward_graph = watch.guarded(program.parts.forward, "forward")
        self.backward_graph = program.parts.backward and watch.guarded(program.parts.backward, "backward")

    def _read_outputs(self, captured: Captured, plan: Plan, module: nn.Module) -> None:
        output = output_node(captured.graph)
        roles, values = output.meta["roles"], [n.meta["val"] for n in output.args[0]]
        order = [i for i, r in enumerate(roles) if r.kind in ("output", "mutation")]  # as the forward graph returns them
        self.forward_count = len(order)
        self.outputs = [at for at, i in enumerate(order) if roles[i].kind == "output"]
        self.mutated = [
            (at, table_of(module, roles[i].name, "_buffers")) for at, i in enumerate(order) if roles[i].kind == "mutation"
        ]
        self.output_values = [values[order[at]] for at in self.outputs]
        layouts = [plan.sharding.outputs[order[at]] for at in self.outputs]
        self.output_specs = [
            spec_of(layout, v.shape, v.dtype, self.mesh, self.device_mesh) if v.dim() else None
            for v, layout in zip(self.output_values, layouts)
        ]
        gradients = [r for r in roles if r.kind not in ("output", "mutation")]
        found = {r.name: at for at, r in enumerate(gradients) if r.kind == "gradient"}
        self.gradient_at = [found.get(name) for name in self.names]
        self.to_copy: list[bool] | None = None  # a gradient each; known after the first backward
        tangents = [n for n in captured.graph.nodes if n.op == "placeholder" and n.meta["role"].kind == "tangent"]
        self.tangents = [(int(n.meta["role"].name), plan.sharding.leaves[n.name]) for n in tangents]

    def __call__(self, inputs: list[torch.Tensor]):
        """The model's output for this rank's part of the batch."""
        parameters = [table[leaf] for table, leaf in self.parameter_tables]
        self._check(parameters)
        if torch.is_grad_enabled() and self.backward_graph is not None:
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
        results = self.forward_graph([next(values[kind]) for kind in self.kinds])
        for at, (table, leaf) in self.mutated:
            table[leaf].copy_(results[at])
        # a number is given as an object of its own: the graph may return one tensor as two outputs
        outputs = [
            results[at].detach() if spec is None else _torch.as_dtensor(results[at], spec)
            for at, spec in zip(self.outputs, self.output_specs)
        ]
        return outputs, list(results[self.forward_count :])

    def backward(self, saved: list, tangents) -> list[torch.Tensor | None]:
        """Gradients of the parameters from those of the outputs (None: zero). Empties `saved`, so that each value is freed after
        its last use."""
        saved += [self._local_tangent(tangents[at], at, layout) for at, layout in self.tangents]
        if self.to_copy is None:  # what is still alive shares no memory by chance
            results = self.backward_graph(list(saved))
            self.to_copy = _shared_memory(results, saved)
        else:
            results = self.backward_graph(saved)
        return [
            None if at is None else _torch.as_dtensor(results[at].clone() if self.to_copy[at] else results[at], spec)
            for at, spec in zip(self.gradient_at, self.specs)
        ]

    def _local_tangent(self, tangent: torch.Tensor | None, at: int, layout) -> torch.Tensor:
        if tangent is None:
            value = self.output_values[at]
            shape = local_shape(value.shape, layout, self.mesh, self.coordinate)
            return torch.zeros(shape, dtype=value.dtype, device=self.device)
        if isinstance(tangent, DTensor):
            tangent = redistributed(tangent, layout, self.mesh, self.device_mesh)
        return tangent.contiguous()


class _Bridge(torch.autograd.Function):
    """A Step in autograd. Outputs that have a tangent have a gradient: the loss alone if there is one."""

    @staticmethod
    def forward(ctx, step: Step, inputs: list[torch.Tensor], *parameters):
        outputs, saved = step.forward(inputs, parameters)
        ctx.step = step
        ctx.others = [None if isinstance(s, torch.Tensor) else (s,) for s in saved]
        ctx.save_for_backward(*[s for s in saved if isinstance(s, torch.Tensor)])
        differentiable = {at for at, _ in step.tangents}
        ctx.mark_non_differentiable(*[o for at, o in enumerate(outputs) if at not in differentiable])
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *tangents):
        tensors = iter(ctx.saved_tensors)
        saved = [next(tensors) if other is None else other[0] for other in ctx.others]
        del tensors
        _torch.release_saved(ctx)
        return None, None, *ctx.step.backward(saved, tangents)


def _shared_memory(results, inputs: list) -> list[bool]:
    """For each gradient whether it overlaps itself, an earlier one or what the backward was given: optimizers and accumulation
    write into gradients, so each needs memory of its own."""
    taken = [_span(t) for t in inputs if isinstance(t, torch.Tensor)]
    shared = []
    for result in results:
        if not isinstance(result, torch.Tensor):
            shared.append(False)
            continue
        start, end = _span(result)
        overlaps_itself = end - start < result.numel() * result.element_size()
        shared.append(overlaps_itself or any(start < e and s < end for s, e in taken))
        taken.append((start, end))
    return shared


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last address of a tensor's elements."""
    length = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1 if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + length * tensor.element_size()
