"""Autocast of an exported forward -> casts in front of the ops that it casts for.

What it casts is not written down here: every op under autocast is given to torch's own dispatcher, on stand-ins without
values (passes/canonicalize/dispatched.py). If what arrives at kernels begins with casts of the op's arguments and goes
on as the op does on cast arguments without autocast, then these casts are put in front of it. Ops that autocast tells a
type instead (`sum`, `softmax` on CUDA) get it as their `dtype`. An op that is made of others, with casts between them,
becomes these others.

A parameter that trains is cast once, as autocast does that keeps the cast for as long as it is on.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch import fx

from ..._torch.regions import autocast_switch, grad_switch, has_autocast_kernel, written
from ...errors import CaptureError
from ...frontend.autocast import State
from ...frontend.fake_parameters import DEVICE
from ...frontend.user_lines import line_of_node
from ...ir.graph import flat_arguments, is_tensor, operand, tensor_arguments, values_of
from .dispatched import Recorder, Way, map_leaves, way_of

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def explicit_casts(graph_module: fx.GraphModule, around: State = (), device: str = "cpu") -> fx.GraphModule:
    """Write out the casts of an exported forward in place and return its module, in which nothing switches autocast any
    more. `around`: the autocast that the model was called under; `device`: the type of device whose autocast it is,
    which a traced model takes the CPU's to be. Raises CaptureError for an op that gave another type when it was
    traced."""
    graph, casts = graph_module.graph, _Casts(graph_module, device)
    now, outer, gradients = dict(around).get(device), [], True
    for node in list(graph.nodes):
        switch, on = autocast_switch(node), grad_switch(node)
        gradients = gradients if on is None else on
        if switch is not None:
            if switch:
                outer.append(now)
                kind, dtype, enabled = switch
                now = (dtype if enabled else None) if kind in (device, DEVICE.type) else now
            else:
                now = outer.pop()
            if not outer and not around:
                casts.cached.clear()
        elif now is not None and node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            casts.rewrite(node, now, gradients)
    for node in [n for n in reversed(graph.nodes) if autocast_switch(n) is not None]:
        graph.erase_node(node)
    graph.lint()
    graph_module.recompile()
    return graph_module


@dataclass
class _Casts:
    graph_module: fx.GraphModule
    device: str
    known: dict[tuple, Way] = field(default_factory=dict)
    cached: dict[tuple[fx.Node, torch.dtype], fx.Node] = field(default_factory=dict)

    def __post_init__(self):
        self.trained = {n for n, p in self.graph_module.named_parameters(remove_duplicate=False) if p.requires_grad}

    def rewrite(self, node: fx.Node, dtype: torch.dtype, gradients: bool) -> None:
        """Put casts in front of an op that runs under autocast to `dtype`."""
        arguments = tensor_arguments(node)
        if not any(a.meta["val"].is_floating_point() for a in arguments) or not has_autocast_kernel(
            node.target, self.device
        ):
            return
        key = (node.target, dtype, *map(_trait, flat_arguments(node)))
        if key not in self.known:
            self.known[key] = _checked(node, dtype, self.device)
        way = self.known[key]
        if way.is_taken_apart:
            _take_apart(node, dtype, self.device)
            return
        with node.graph.inserting_before(node):
            for argument, to in dict(zip(arguments, way.casts)).items():
                if to is not None:
                    node.replace_input_with(argument, self._cast(node, argument, to, gradients and to == dtype))
        if way.dtype is not None:
            node.kwargs = {**node.kwargs, "dtype": way.dtype}

    def _cast(self, node: fx.Node, argument: fx.Node, dtype: torch.dtype, may_cache: bool) -> fx.Node:
        """Return the cast of an argument, in front of `node`; of a view, a view of the cast: rewrites look for views in
        front of ops."""
        origin = argument
        while origin.op == "call_function" and (before := written(origin)):
            origin = before[0]
        is_weight = (
            origin.op == "get_attr" and origin.target in self.trained and argument.meta["val"].dtype == torch.float32
        )
        if is_weight and (origin, dtype) in self.cached:
            return self.cached[origin, dtype]
        if argument.target in VIEWS:
            source = self._cast(node, operand(argument), dtype, False)
            new = node.graph.call_function(argument.target, (source, *argument.args[1:]))
        else:
            new = node.graph.call_function(aten.to.dtype, (argument, dtype))
        new.meta = {**node.meta, "val": argument.meta["val"].to(dtype)}
        if is_weight and may_cache:
            self.cached[origin, dtype] = new
        return new


def _trait(argument: object) -> object:
    """Return what autocast may look at in an argument."""
    if not is_tensor(argument):
        return str(argument)
    value = argument.meta["val"]
    return value.dtype, value.dim()


def _values(node: fx.Node) -> tuple[tuple, dict]:
    return fx.node.map_arg((node.args, dict(node.kwargs)), lambda a: a.meta["val"])


def _checked(node: fx.Node, dtype: torch.dtype, device: str) -> Way:
    way, traced = way_of(node.target, *_values(node), dtype, device), tuple(v.dtype for v in values_of(node))
    if way.types and way.types != traced:
        raise CaptureError(
            f"{node.target} gives {way.types} under torch.autocast on {device}, and gave {traced} when it was traced",
            node=node.name,
            source=line_of_node(node) or None,
            fix="cast its arguments in the model",
        )
    return way


def _take_apart(node: fx.Node, dtype: torch.dtype, device: str) -> None:
    """Replace an op by the calls that it makes under autocast, casts included."""
    recorder = Recorder(device)
    calls, result = recorder.run(node.target, *_values(node), dtype)
    made = {id(recorder.stand_in(a.meta["val"])): a for a in tensor_arguments(node)}
    with node.graph.inserting_before(node):
        for call in calls:
            args, kwargs = map_leaves((tuple(call.args), dict(call.kwargs)), lambda x: made.get(id(x), _here(x)))
            new = node.graph.call_function(call.target, args, kwargs)
            new.meta = {**node.meta, "val": recorder.plain(call.result)}
            made[id(call.result)] = new
            if isinstance(call.result, (tuple, list)):
                for i, item in enumerate(call.result):
                    made[id(item)] = node.graph.call_function(operator.getitem, (new, i))
                    made[id(item)].meta = {**node.meta, "val": recorder.plain(item)}
    if isinstance(result, (tuple, list)):
        for user in list(node.users):
            user.replace_all_uses_with(made[id(result[user.args[1]])])
            node.graph.erase_node(user)
    else:
        node.replace_all_uses_with(made[id(result)])
    node.graph.erase_node(node)


def _here(value: object) -> object:
    """Return an argument of a call as it is on the device that graphs are traced on."""
    return DEVICE if isinstance(value, torch.device) else value
