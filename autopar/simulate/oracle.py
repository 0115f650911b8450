"""The unsharded model: what a sharded step is compared with, and how far apart the two are.

`eager_step` runs the model itself in plain eager torch; `one_device_step` runs its joint graph, which draws the same
random numbers as the ranks (torch's own generator draws others). `upcast_capture` is a capture in the next wider type:
what is still different there between a sharded and an unsharded step is a mistake, and what the narrower type is off by
on one device is rounding.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from .._torch import graph_module, tree_map
from .._torch.regions import no_autocast
from ..errors import InputError
from ..frontend.call_signature import CallSignature, Returns, split_example
from ..frontend.export import Captured
from ..frontend.fake_parameters import buffers_of
from ..frontend.flat_call import FlatCall
from ..frontend.precision import compute_dtype
from ..ir.graph import OutputRole, output_node, outputs_of
from ..runtime.random_state import RandomState


class OneDevice(NamedTuple):
    """The results of a step: outputs in order, gradients by name, and the values by name of buffers and of what else
    the forward writes to; all global. Parameters and buffers have their own names, the input x is "input x"."""

    outputs: Sequence[Tensor]
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


def global_values(captured: Captured, model: nn.Module, example_inputs) -> dict[str, Tensor]:
    """Copy a model's parameters and buffers and a call's tensors, by placeholder name; tangents are ones, and the
    random state is the first that a run from torch's present seed takes."""
    args, kwargs = split_example(example_inputs)
    inputs = dict(zip(captured.signature.tensor_names, CallSignature.of(args, kwargs)[1], strict=True))
    state = dict(model.named_parameters()) | buffers_of(model)
    values = {}
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            role, like = node.meta["role"], node.meta["val"]
            if role.kind == "tangent":
                values[node.name] = torch.ones(tuple(like.shape), dtype=like.dtype, device=like.device)
            elif role.kind == "random":
                values[node.name] = RandomState(torch.initial_seed()).next()
            else:
                values[node.name] = (inputs if role.kind == "input" else state)[role.name].detach().clone()
    return values


def eager_step(captured: Captured, model: nn.Module, values, loss_fn: Callable | None, precision: str) -> OneDevice:
    """Take a step of the model itself, in a precision. Its state gets its old values back."""
    roles = {n.name: n.meta["role"] for n in captured.graph.nodes if n.op == "placeholder"}
    named = {role.name: values[name] for name, role in roles.items() if role.kind == "input"}
    differentiated = captured.signature.differentiated_names
    inputs = {n: x.clone().requires_grad_(n in differentiated) for n, x in named.items()}
    tangents = [int(role.name) for role in roles.values() if role.kind == "tangent"]
    returns = Returns()
    call = FlatCall(
        model, captured.signature, returns, loss_fn, compute_dtype(precision), tangents == [captured.returns.loss]
    )
    written = {output_name(r) for r in output_node(captured.graph).meta["roles"] if "mutation" in r.kind}
    state = {n: p for n, p in model.named_parameters() if n in written} | buffers_of(model)
    old = {name: tensor.detach().clone() for name, tensor in state.items()}
    try:
        outputs = call(*(inputs[name] for name in captured.signature.tensor_names))
    except RuntimeError as error:  # tracing looks at shapes only
        raise InputError(
            f"the model itself fails on these inputs: {error}", fix="check that model(**inputs) runs"
        ) from error
    sums = [outputs[at].sum() for at in tangents if outputs[at].requires_grad]
    leaves = {n: p for n, p in model.named_parameters() if p.requires_grad} | {
        f"input {n}": inputs[n] for n in differentiated
    }
    gradients = torch.autograd.grad(sums, list(leaves.values()), allow_unused=True) if sums and leaves else ()
    new = {name: tensor.detach().clone() for name, tensor in state.items()}
    new |= {f"input {n}": x.detach() for n, x in inputs.items() if f"input {n}" in written}
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(old[name])
    return OneDevice(outputs, {name: g for name, g in zip(leaves, gradients) if g is not None}, new)


def output_name(role: OutputRole) -> str:
    """Return the name of what a gradient or a new value belongs to."""
    return f"input {role.name}" if role.kind.startswith("input_") else role.name


def written_parameters(captured: Captured, model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that a call writes to, by name."""
    written = {r.name for r in output_node(captured.graph).meta["roles"] if r.kind == "mutation"}
    return {name: p.detach() for name, p in model.named_parameters() if name in written}


def one_device_step(captured: Captured, values: Mapping[str, Tensor]) -> OneDevice:
    """Take a step of the unsharded joint graph."""
    known, outputs = interpret(captured.graph_module, values), outputs_of(captured.graph)
    return sorted_results([known[node.name] for node, _ in outputs], [role for _, role in outputs])


def sorted_results(results: Sequence[Tensor], roles: Sequence[OutputRole]) -> OneDevice:
    """Sort the values of a joint graph's outputs by what they are."""
    found: dict[str, dict[str, Tensor]] = {"output": {}, "gradient": {}, "mutation": {}}
    for value, role in zip(results, roles):
        found[role.kind.removeprefix("input_")][output_name(role)] = value
    outputs = tuple(found["output"][name] for name in sorted(found["output"], key=int))
    return OneDevice(outputs, found["gradient"], found["mutation"])


def interpret(module: fx.GraphModule, values: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the value of every node of the joint graph, by name."""
    with no_autocast():
        return _interpret(module, values)


def _interpret(module: fx.GraphModule, values: Mapping[str, Tensor]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for node in module.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: result[n.name])
        if node.op == "placeholder":
            result[node.name] = values[node.name]
        elif node.op == "get_attr":
            result[node.name] = operator.attrgetter(node.target)(module)
        elif node.op == "call_function":
            result[node.name] = node.target(*args, **kwargs)
    return result


WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}


def upcast_capture(captured: Captured, narrow: torch.dtype) -> Captured:
    """Copy a capture with the type WIDER[narrow] wherever its graph had `narrow`."""

    def type_of(value: object):
        return WIDER[narrow] if value is narrow else value

    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.output(graph.graph_copy(captured.graph, copies))
    output.meta = dict(output_node(captured.graph).meta)
    module = graph_module(captured.graph_module, graph)
    for original, node in copies.items():
        node.args, node.kwargs = tree_map(type_of, (node.args, node.kwargs))
        if _makes(node, narrow):  # in torch's default type
            node.kwargs = {**node.kwargs, "dtype": WIDER[narrow]}
        if _floats_of_integers(original, narrow):  # in torch's default type, and no argument says another
            with graph.inserting_after(node):
                wide = graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": WIDER[narrow]})
            wide.meta = {**node.meta, "val": upcast_value(node.meta["val"], narrow)}
            node.replace_all_uses_with(wide, delete_user_cb=wide.__ne__)
            continue
        node.meta["val"] = tree_map(partial(upcast_value, narrow=narrow), node.meta["val"])
        if node.op == "get_attr":
            setattr(module, node.target, upcast_value(getattr(module, node.target), narrow))
    module.recompile()
    return replace(captured, graph_module=module)


def _makes(node: fx.Node, dtype: torch.dtype) -> bool:
    """Return whether an op makes a tensor of `dtype` from none and without being told the type."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or node.all_input_nodes or node.kwargs.get("dtype") is not None:
        return False
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.dtype is dtype and any(a.name == "dtype" for a in schema.arguments)


def _floats_of_integers(node: fx.Node, dtype: torch.dtype) -> bool:
    """Return whether an op makes a tensor of `dtype` from numbers and tensors that have no float type."""
    value, given = node.meta["val"], [n.meta["val"] for n in node.all_input_nodes]
    is_op = node.op == "call_function" and bool(given) and node.kwargs.get("dtype") is None
    if not is_op or not isinstance(value, Tensor) or value.dtype is not dtype:
        return False
    return all(isinstance(v, Tensor) and not v.is_floating_point() for v in given) and dtype not in node.args


def upcast_value(value: object, narrow: torch.dtype):
    """Return a tensor of the type `narrow` in WIDER[narrow], and anything else as it is."""
    return value.to(WIDER[narrow]) if isinstance(value, Tensor) and value.dtype is narrow else value


# errors ---------------------------------------------------------------------------------------------------------------


def group_errors(reference: Mapping[str, Tensor], mine: Mapping[str, Tensor], share: float) -> dict[str, float]:
    """Return the largest relative error of each group of tensors whose names differ only in the numbers of their
    modules; infinite where one is missing."""
    floor = share * max(map(norm, reference.values()), default=0.0)
    errors: dict[str, float] = {}
    for name, value in reference.items():
        group = ".".join("*" if word.isdigit() else word for word in name.split("."))
        error = relative_error(mine[name], value, floor) if name in mine else math.inf
        errors[group] = worst(errors.get(group, 0.0), error)
    return errors


def worst(*errors: float) -> float:
    """Return the largest error, or the first that is not a number."""
    return next((e for e in errors if e != e), max(errors))


def relative_error(mine: Tensor, reference: Tensor, floor: float = 0.0) -> float:
    """Return the norm of the difference over that of the reference, or over `floor` if that is larger."""
    difference = norm(mine.double() - reference.double())
    return difference / max(norm(reference), floor) if difference else 0.0


def norm(value: object) -> float:
    """Return the 2-norm of a tensor in fp64, 0 for anything else."""
    return value.detach().double().norm().item() if isinstance(value, Tensor) else 0.0
