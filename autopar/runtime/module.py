"""The compiled model: an nn.Module with the source's parameter names, as DTensors, that runs one rank's graphs.

The graphs already contain forward, backward and all collectives; `_Bridge` hangs them into autograd as one function, so that
`loss.backward()`, optimizers, hooks and gradient clipping work as for any module.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..capture import Captured
from ..codegen import bind_groups, group_names
from ..errors import AutoparError, InputError, MovedParameterError
from ..graph import output_node
from ..layout import Layout, local_part, local_shape
from ..lower import RankProgram, lower
from ..mesh import Mesh
from ..plan import Plan
from . import agree, process_groups
from .dtensors import as_dtensor, placements_of


class MovedParameter(nn.Parameter):
    """What is left of a source parameter: any use says where its values went."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", str(function))
        if name in ("__repr__", "__hash__", "__get__") and getattr(function, "__self__", None) is not torch.Tensor.grad:
            return super().__torch_function__(function, types, args, kwargs or {})
        raise MovedParameterError(
            "this parameter was taken over by autopar.compile and is empty",
            fix="use the module that compile returned, and build the optimizer from its parameters()",
        )


class _Container(nn.Module):
    """A node of the module tree that only holds names."""


class ParallelModule(nn.Module):
    """See the module's docstring. Made by `autopar.compile`; `plan` is what was decided."""

    def __init__(self, source: nn.Module, captured: Captured, plan: Plan, mesh: Mesh, device_mesh, inputs: str):
        super().__init__()
        object.__setattr__(self, "_source", source)
        self.plan, self.mesh, self._device_mesh, self._inputs_mode = plan, mesh, device_mesh, inputs
        self._rank = process_groups.check_world(mesh, device_mesh)
        self._coordinate = mesh.coordinate(self._rank)
        program = lower(captured, plan, self._rank)
        agree.check_programs(plan.hash, program.collectives())
        self._program = _Runner(program, captured, plan, self, device_mesh)
        self._first_call = True
        _take_over(self, source, captured, plan)
        self.train(source.training)

    def forward(self, *args, **kwargs):
        self._check_mode()
        tensors = self._local_inputs(args, kwargs)
        return self._program(tensors)

    def _check_mode(self) -> None:
        if self.training != self._program.training and self._program.mode_matters:
            mode = "train" if self.training else "eval"
            raise AutoparError(
                f"the model was compiled in {'train' if self._program.training else 'eval'} mode and is in {mode} mode now, "
                "where its buffers are treated otherwise",
                fix=f"call .{mode}() on the model before autopar.compile",
            )

    def _local_inputs(self, args, kwargs) -> list[torch.Tensor]:
        program = self._program
        signature = program.captured.signature
        local_mode = self._inputs_mode == "local"
        shapes = None
        if local_mode:
            shapes = tuple(
                s if s is None else local_shape(s, program.layout_of_input(n, s), self.mesh, self._coordinate)
                for n, s in zip(signature.names, signature.shapes)
            )
        tensors = signature.flatten(args, kwargs, shapes)
        if self._first_call and not local_mode:
            plain = [(n, t) for n, t in zip(signature.tensor_names, tensors) if not isinstance(t, DTensor)]
            agree.check_batches([n for n, _ in plain], [t for _, t in plain])
        self._first_call = False
        return [self._local(name, t, local_mode) for name, t in zip(signature.tensor_names, tensors)]

    def _local(self, name: str, tensor: torch.Tensor, is_local: bool) -> torch.Tensor:
        layout = self._program.layout_of_input(name, tensor.shape)
        if isinstance(tensor, DTensor):
            return tensor.redistribute(self._device_mesh, placements_of(layout, self.mesh)).to_local()
        return tensor if is_local else local_part(tensor, layout, self.mesh, self._coordinate)

    def shard_inputs(self, *args, **kwargs):
        """The batch of a call as DTensors in the layouts that the plan gave the inputs, in the structure of the call: a dict of
        the keyword arguments, or a tuple. For a loss outside of the model, `shard_inputs(labels=labels)` of inputs not compiled
        for are cut along dim 0 as the first input is."""
        first = next(iter(self._program.input_layouts.values()))

        def shard(name, value):
            if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
                return value
            layout = self._program.input_layouts.get(name)
            if layout is None or len(layout.dims) != value.dim():
                layout = Layout((first.dims[0], *((),) * (value.dim() - 1))) if value.dim() else Layout(())
            part = local_part(value, layout, self.mesh, self._coordinate)
            return as_dtensor(part, value.shape, layout, self.mesh, self._device_mesh)

        if kwargs:
            return {name: shard(name, value) for name, value in kwargs.items()}
        return tuple(shard(f"args[{i}]", value) for i, value in enumerate(args))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip gradients by their norm over the whole model; returns the norm as a plain tensor."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            source = self.__dict__.get("_source")
            if source is None or name.startswith("_"):
                raise
            value = getattr(source, name)
        if isinstance(value, nn.Module) or callable(value):
            raise AttributeError(f"{name} belongs to the source model, whose parameters were taken over")
        return value


class _Runner:
    """Calls one rank's forward and backward graphs."""

    def __init__(self, program: RankProgram, captured: Captured, plan: Plan, owner: ParallelModule, device_mesh):
        self.captured, self.plan, self.owner, self.device_mesh = captured, plan, owner, device_mesh
        mesh = plan.mesh
        parts = program.parts
        modules = [m for m in (parts.forward, parts.backward) if m is not None]
        names = set().union(*(group_names(m) for m in modules))
        bound = process_groups.bind(names, mesh, device_mesh, program.rank)
        for module in modules:
            bind_groups(module, bound)
            module.to(torch.device(device_mesh.device_type))
        self.forward_graph = parts.forward.forward
        self.backward_graph = parts.backward.forward if parts.backward is not None else None
        graph = captured.graph
        leaves = [n for n in graph.nodes if n.op == "placeholder" and n.meta["role"].kind != "tangent"]
        self.leaves = [n.meta["role"] for n in leaves]
        self.parameters = [r.name for r in self.leaves if r.kind == "parameter"]
        self.buffers = [r.name for r in self.leaves if r.kind == "buffer"]
        self.input_layouts = {
            n.meta["role"].name: plan.sharding.leaves[n.name] for n in leaves if n.meta["role"].kind == "input"
        }
        output = output_node(graph)
        roles = output.meta["roles"]
        self.shapes = [tuple(n.meta["val"].shape) for n in output.args[0]]
        self.outputs = [i for i, r in enumerate(roles) if r.kind == "output"]
        self.mutations = [(i, r.name) for i, r in enumerate(roles) if r.kind == "mutation"]
        self.forward_order = [i for i, r in enumerate(roles) if r.kind in ("output", "mutation")]
        gradients = [r for r in roles if r.kind not in ("output", "mutation")]
        self.gradient_of = {r.name: i for i, r in enumerate(gradients) if r.kind == "gradient"}
        self.layouts = {r.name: plan.layouts[r.name] for r in self.leaves if r.kind == "parameter"}
        self.loss = captured.returns.loss
        self.training = owner._source.training
        self.mode_matters = bool(self.mutations)
        tangents = [n for n in graph.nodes if n.op == "placeholder" and n.meta["role"].kind == "tangent"]
        self.tangents = [int(n.meta["role"].name) for n in tangents]
        self.tangent_layouts = [plan.sharding.leaves[n.name] for n in tangents]

    def layout_of_input(self, name: str, shape) -> Layout:
        return self.input_layouts.get(name, Layout.replicated(len(shape)))

    def __call__(self, tensors: list[torch.Tensor]):
        parameters = [self.owner.get_parameter(name) for name in self.parameters]
        buffers = [self.owner.get_buffer(name) for name in self.buffers]
        if torch.is_grad_enabled() and self.backward_graph is not None:
            outputs = _Bridge.apply(self, tensors, buffers, *parameters)
        else:
            outputs = self.run_forward(tensors, buffers, parameters)[0]
        return self.captured.returns.rebuild([self._finished(i, o) for i, o in enumerate(outputs)])

    def run_forward(self, tensors, buffers, parameters):
        """(outputs of the model, values saved for the backward); buffers take their new values."""
        ready = iter(tensors), iter(buffers), iter(p.to_local() for p in parameters)
        source = {"input": ready[0], "buffer": ready[1], "parameter": ready[2]}
        values = self.forward_graph(*(next(source[role.kind]) for role in self.leaves))
        named = dict(zip(self.forward_order, values))
        for i, name in self.mutations:
            self.owner.get_buffer(name).copy_(named[i])
        return [self._wrapped(i, named[i]) for i in self.outputs], values[len(self.forward_order) :]

    def _wrapped(self, i: int, local: torch.Tensor) -> torch.Tensor:
        layout = self.plan.sharding.outputs[i]
        if not self.shapes[i] or not isinstance(local, torch.Tensor):
            return local
        return as_dtensor(local, self.shapes[i], layout, self.plan.mesh, self.device_mesh)

    def _finished(self, position: int, output):
        if self.loss is not None and position != self.loss and isinstance(output, torch.Tensor):
            return output.detach()
        return output

    def run_backward(self, saved, tangents) -> dict[str, torch.Tensor]:
        """Local gradients by parameter name, from the tangents of the differentiable outputs."""
        local = []
        for position, layout in zip(self.tangents, self.tangent_layouts):
            tangent = tangents[position]
            i = self.outputs[position]
            if tangent is None:
                shape = local_shape(self.shapes[i], layout, self.plan.mesh, self.owner._coordinate)
                tangent = torch.zeros(shape)
            elif isinstance(tangent, DTensor):
                tangent = tangent.redistribute(self.device_mesh, placements_of(layout, self.plan.mesh)).to_local()
            local.append(tangent.contiguous())
        gradients = self.backward_graph(*saved, *local)
        return {name: gradients[i] for name, i in self.gradient_of.items()}


class _Bridge(torch.autograd.Function):
    """The graphs as one differentiable function of the parameters."""

    @staticmethod
    def forward(ctx, runner: _Runner, tensors, buffers, *parameters):
        outputs, saved = runner.run_forward(tensors, buffers, parameters)
        ctx.runner = runner
        ctx.tensor_at = [isinstance(s, torch.Tensor) for s in saved]
        ctx.others = [s for s in saved if not isinstance(s, torch.Tensor)]
        ctx.save_for_backward(*[s for s in saved if isinstance(s, torch.Tensor)])
        ctx.parameters = [(tuple(p.shape), p.placements, p.device_mesh, p.stride()) for p in parameters]
        fixed = [o for i, o in enumerate(outputs) if runner.loss is not None and i != runner.loss]
        ctx.mark_non_differentiable(*[o for o in fixed if isinstance(o, torch.Tensor)])
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *tangents):
        tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
        saved = [next(tensors) if is_tensor else next(others) for is_tensor in ctx.tensor_at]
        gradients = ctx.runner.run_backward(saved, tangents)
        result = []
        for name, (shape, placements, mesh, stride) in zip(ctx.runner.parameters, ctx.parameters):
            local = gradients.get(name)
            if local is not None:
                local = DTensor.from_local(
                    local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
                )
            result.append(local)
        return (None, None, None, *result)


def _take_over(module: ParallelModule, source: nn.Module, captured: Captured, plan: Plan) -> None:
    """Give `module` this rank's shards under all names of the source, and empty the source's parameters."""
    device = torch.device(module._device_mesh.device_type)
    roles = {n.meta["role"].name: n for n in captured.graph.nodes if n.op == "placeholder"}
    made: dict[int, nn.Parameter] = {}
    originals = list(source.named_parameters(remove_duplicate=False))
    for name, parameter in originals:
        if id(parameter) not in made:
            if parameter.is_meta:
                raise InputError(
                    f"{name} is on the meta device and has no values",
                    fix="compile a model with values; use plan() for meta models",
                )
            node = roles.get(captured.ties.get(name, name))
            unused = node is None or node.name not in plan.sharding.leaves
            layout = Layout.replicated(parameter.dim()) if unused else plan.sharding.leaves[node.name]
            local = local_part(parameter.detach(), layout, plan.mesh, module._coordinate).to(device)
            if layout.is_replicated and local.data_ptr() != parameter.data_ptr():
                local = local.clone()
            dtensor = as_dtensor(local, parameter.shape, layout, plan.mesh, module._device_mesh)
            made[id(parameter)] = nn.Parameter(dtensor, requires_grad=parameter.requires_grad)
        _place(module, name, lambda owner, leaf, p=made[id(parameter)]: owner.register_parameter(leaf, p))
    for name, buffer in source.named_buffers(remove_duplicate=False):
        kept = buffer.detach().clone().to(device)
        persistent = name in source.state_dict()
        _place(module, name, lambda owner, leaf, b=kept, s=persistent: owner.register_buffer(leaf, b, persistent=s))
    for parameter in {id(p): p for _, p in originals}.values():
        parameter.grad = None
        parameter.data = torch.empty(0)
        parameter.__class__ = MovedParameter


def _place(module: nn.Module, name: str, register: Callable[[nn.Module, str], None]) -> None:
    *path, leaf = name.split(".")
    owner: nn.Module = module
    for part in path:
        if part not in owner._modules:
            owner.add_module(part, _Container())
        owner = owner._modules[part]
    register(owner, leaf)
