"""Autocast of an exported forward -> casts in front of the ops that it casts for.

What it casts is not written down here: every op under autocast is given to torch's own dispatcher, on stand-ins without values
(passes/dispatched.py). If what arrives at kernels begins with casts of the op's arguments and goes on as the op does on cast
arguments without autocast, then these casts are put in front of it. Ops that autocast tells a type instead (`sum`, `softmax` on
CUDA) get it as their `dtype`. An op that is made of others, with casts between them, becomes these others.

A parameter that trains is cast once, as autocast does that keeps the cast for as long as it is on.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from .._torch import autocast_switch, grad_switch, has_autocast_kernel, schema_names, tree_map, written
from ..autocast import State, entered
from ..capture import source_line
from ..errors import CaptureError
from ..fake_state import DEVICE
from ..graph import flat_arguments, is_tensor, tensor_arguments
from .dispatched import Call, Recorder

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def explicit_casts(graph_module: fx.GraphModule, around: State = (), device: str = "cpu") -> fx.GraphModule:
    """Rewrites an exported forward in place and returns the module, in which nothing switches autocast any more. `around`: the
    autocast that the model was called under; `device`: the type of device whose autocast it is. Raises CaptureError for an op that
    gave another type when it was traced."""
    graph, casts = graph_module.graph, _Casts(graph_module, device)
    now, outer, gradients = dict(around).get(device), [], True
    for node in list(graph.nodes):
        switch, on = autocast_switch(node), grad_switch(node)
        gradients = gradients if on is None else on
        if switch is not None:
            if switch:
                outer.append(now)
                kind, dtype, enabled = switch
                now = (dtype if enabled else None) if kind == device else now
            else:
                now = outer.pop()
            if not outer and not around:
                casts.kept.clear()
        elif now is not None and node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            casts.rewrite(node, now, gradients)
    for node in [n for n in reversed(graph.nodes) if autocast_switch(n) is not None]:
        graph.erase_node(node)
    graph.lint()
    graph_module.recompile()
    return graph_module


@dataclass(frozen=True)
class _Way:
    """How an op runs under autocast: types that its tensor arguments are cast to (None: not cast) and the `dtype` that it is told,
    or as the calls that it is made of."""

    casts: tuple[torch.dtype | None, ...] = ()
    dtype: torch.dtype | None = None
    is_taken_apart: bool = False


@dataclass
class _Casts:
    graph_module: fx.GraphModule
    device: str
    known: dict[tuple, _Way] = field(default_factory=dict)
    kept: dict[tuple[fx.Node, torch.dtype], fx.Node] = field(default_factory=dict)

    def __post_init__(self):
        self.trained = {n for n, p in self.graph_module.named_parameters(remove_duplicate=False) if p.requires_grad}

    def rewrite(self, node: fx.Node, dtype: torch.dtype, gradients: bool) -> None:
        """Put casts in front of an op that runs under autocast to `dtype`."""
        arguments = tensor_arguments(node)
        if not any(a.meta["val"].is_floating_point() for a in arguments) or not has_autocast_kernel(node.target, self.device):
            return
        key = (node.target, dtype, *map(_trait, flat_arguments(node)))
        if key not in self.known:
            self.known[key] = _way(node, dtype, self.device)
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

    def _cast(self, node: fx.Node, argument: fx.Node, dtype: torch.dtype, may_keep: bool) -> fx.Node:
        """The cast of an argument, in front of `node`; of a view, a view of the cast: rewrites look for views in front of ops."""
        origin = argument
        while origin.op == "call_function" and (before := written(origin)) is not None:
            origin = before
        is_weight = origin.op == "get_attr" and origin.target in self.trained and argument.meta["val"].dtype == torch.float32
        if is_weight and (origin, dtype) in self.kept:
            return self.kept[origin, dtype]
        if argument.target in VIEWS:
            source = self._cast(node, argument.args[0], dtype, False)
            new = node.graph.call_function(argument.target, (source, *argument.args[1:]))
        else:
            new = node.graph.call_function(aten.to.dtype, (argument, dtype))
        new.meta = {**node.meta, "val": argument.meta["val"].to(dtype)}
        if is_weight and may_keep:
            self.kept[origin, dtype] = new
        return new


def _trait(argument: object) -> object:
    """What autocast may look at."""
    if not is_tensor(argument):
        return str(argument)
    value = argument.meta["val"]
    return value.dtype, value.dim()


def _way(node: fx.Node, dtype: torch.dtype, device: str) -> _Way:
    recorder, values = Recorder(device), [a.meta["val"] for a in tensor_arguments(node)]
    try:
        calls, result = _run(recorder, node, {}, dtype)
    except RuntimeError:  # some composite ops ask for the device itself when autocast tells them a type
        return _wide(node)
    if (found := _types(result)) != (traced := _types(node.meta["val"])):
        raise CaptureError(
            f"{node.target} gives {found} under torch.autocast on {device}, and gave {traced} when it was traced",
            node=node.name, source=source_line(node) or None, fix="cast its arguments in the model",
        )  # fmt: skip
    casts: dict[int, torch.dtype] = {}
    stand_ins = {id(recorder.stand_in(v)): id(v) for v in values}
    for call in calls:
        if call.target is not aten._to_copy.default or id(call.args[0]) not in stand_ins:
            break
        casts[stand_ins[id(call.args[0])]] = call.result.dtype
    told = (None, torch.float32) if _takes_type(node) else (None,)
    for cast, dtype in [({}, None), *((casts, t) for t in told)]:
        plain, _ = _run(Recorder(device), node, cast, None, dtype)
        if [call.summary for call in plain] == [call.summary for call in calls[len(cast) :]]:
            return _Way(tuple(cast.get(id(v)) for v in values), dtype)
    return _Way(is_taken_apart=True)


def _wide(node: fx.Node) -> _Way:
    """An op that computes in float32."""
    if _takes_type(node):
        return _Way(dtype=torch.float32)
    values = [a.meta["val"] for a in tensor_arguments(node)]
    narrow = [v.is_floating_point() and v.dtype.itemsize < 4 for v in values]
    return _Way(tuple(torch.float32 if n else None for n in narrow))


def _takes_type(node: fx.Node) -> bool:
    names = schema_names(node.target)
    return "dtype" in names and node.kwargs.get("dtype") is None and names.index("dtype") >= len(node.args)


def _run(recorder: Recorder, node: fx.Node, casts: dict[int, torch.dtype], dtype: torch.dtype | None,
         told: torch.dtype | None = None) -> tuple[list[Call], object]:  # fmt: skip
    """(calls, result) of an op on stand-ins for its arguments, cast as `casts` says by the id of a value; under autocast to
    `dtype`, if that is not None."""

    def value_of(argument: fx.Node):
        value = argument.meta["val"]
        if not isinstance(value, Tensor):
            return value
        return recorder.stand_in(value.to(casts[id(value)]) if id(value) in casts else value)

    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), value_of)
    if told is not None:
        kwargs = {**kwargs, "dtype": told}
    with entered(((recorder.device, dtype),) if dtype is not None else ()):
        return recorder.run(node.target, args, kwargs)


def _types(value: object) -> list[torch.dtype]:
    found: list[torch.dtype] = []
    tree_map(lambda x: found.append(x.dtype) if isinstance(x, Tensor) else None, value)
    return found


def _take_apart(node: fx.Node, dtype: torch.dtype, device: str) -> None:
    """The calls that an op makes under autocast, casts included, in its place."""
    recorder, made = Recorder(device), {}
    calls, result = _run(recorder, node, {}, dtype)
    for argument in tensor_arguments(node):
        made[id(recorder.stand_in(argument.meta["val"]))] = argument
    with node.graph.inserting_before(node):
        for call in calls:
            args, kwargs = tree_map(lambda x: made.get(id(x), _here(x)), (call.args, call.kwargs))
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
    """An argument of a call as it is on the device that graphs are traced on."""
    return DEVICE if isinstance(value, torch.device) else value
