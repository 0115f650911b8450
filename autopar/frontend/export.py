"""Turn a module and an example call into a joint graph: `export` the forward, then (after the passes that rewrite it)
`differentiate`.

The exported forward graph reads parameters and buffers by `get_attr` under their own qualified names and takes the
tensors of the call as placeholders. The joint graph has one placeholder for each of them and is annotated as
autopar/ir/graph.py says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from .. import _torch
from .._torch.regions import plain_regions
from ..errors import AutoparError, CaptureError, InputError
from ..ir.compiler_pass import Pass
from ..ir.graph import RANDOM_STATE, OutputRole, Role, leaf_name, mark_phases, output_node
from . import expert_loops, moe_in_token_order, refusals
from .autograd_functions import inline, recorded_backwards
from .block_lists import GATHERS
from .call_record import CallRecord
from .call_signature import CallSignature, Returns, leaf_names, split_example
from .fake_parameters import Form, Forms, fake, fake_state, forms_of, tie_map
from .flat_call import ROOT, FlatCall
from .flex_attention import flex_attention_written_out
from .guards import Guards
from .hand_written_experts import hand_written_experts
from .hooks import refuse_backward_hooks
from .moved_layers import layers_stay
from .open_numbers import closed, opened
from .quiet import quiet
from .random_branches import no_random_branches
from .repeated_blocks import Compact
from .traced_forms import traced_forms
from .user_lines import line_of_definition, line_of_error, line_of_node
from .value_checks import checks_pass
from .watch import Watch
from .zero_tangents import drop_tangents


@dataclass
class Exported:
    """The forward graph of a call. `ties` maps every name of a shared parameter to its first name; `forms`: of all
    parameters of the model under their first names, those that the call does not read included; `guards`: the Python
    state that it holds for."""

    graph_module: fx.GraphModule
    signature: CallSignature
    returns: Returns
    inputs: list[torch.Tensor]
    ties: dict[str, str] = field(default_factory=dict)
    forms: Mapping[str, Form] = field(default_factory=dict)
    guards: Guards = field(default_factory=Guards)
    as_eager: bool = False


@dataclass
class Captured:
    """The joint graph of a call, annotated (see autopar/ir/graph.py), and how to call it. `guards`: the Python state
    that it holds for; `compact`: the same with few of many equal blocks, if it was captured so; `passes`: the user's
    own that run where this graph is compiled; `as_eager`: the model was not told that it was traced; `gathers`: what
    follows the blocks read more of them than the last, and was moved to them (passes/canonicalize/by_block.py)."""

    graph_module: fx.GraphModule
    signature: CallSignature
    returns: Returns
    ties: dict[str, str]
    guards: Guards = field(default_factory=Guards)
    compact: Compact | None = None
    passes: tuple[Pass, ...] = ()
    as_eager: bool = False
    gathers: bool = False

    @property
    def graph(self) -> fx.Graph:
        """Return the joint graph."""
        return self.graph_module.graph


def export(
    model: nn.Module, example_inputs, loss_fn: Callable | None = None, forms: Mapping[str, Form] | None = None,
    dtype: torch.dtype | None = None, loss_alone: bool = True, with_gradients: bool = True,
) -> Exported:  # fmt: skip
    """Trace the forward of `model` on an example call; only shapes are read of it and of the model, so either may be on
    any device. `forms` gives shapes and dtypes that the parameters have instead of their own, and `dtype` is what the
    model computes in. With `loss_alone`, of the outputs only the loss is differentiated, if there is one (see
    FlatCall).

    Raises CaptureError with torch's reason and the user's line if the model cannot be traced, InputError if the model
    rejects the example."""
    run = _with_open_numbers(model, example_inputs, loss_fn, forms, dtype, loss_alone, with_gradients)
    constants = [c for c in run.program.constants.values() if isinstance(c, torch.Tensor)]
    with quiet():
        graph_module = run.program.module(check_guards=False)
    refusals.refuse(graph_module.graph, run.entered)
    graph_module.meta["entered"] = run.entered
    for node in graph_module.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = _torch.tree_map(_of_no_inference, node.meta["val"])
        if node.op == "get_attr" and node.target.startswith(ROOT + "."):
            name = node.target[len(ROOT) + 1 :]
            if name in run.with_gradient and node.users:
                raise CaptureError(
                    f"the forward reads {name}, a tensor that requires a gradient and is no parameter: it would get "
                    f"none",
                    source=line_of_node(next(iter(node.users))) or None,
                    fix="keep tensor.detach(), or make it an nn.Parameter if it is to train",
                )
            node.target = f"{ROOT}.{run.ties.get(name, name)}"
    call, guards = run.call, Guards.of(run.watch, constants)
    return Exported(graph_module, call.signature, call.returns, run.inputs, run.ties, run.forms, guards, call.as_eager)


def open_sizes(
    model: nn.Module, example_inputs, dims: Mapping[str, Mapping[int, int]], as_eager: bool,
    loss_fn: Callable | None = None, forms: Mapping[str, Form] | None = None, dtype: torch.dtype | None = None,
    loss_alone: bool = True, with_gradients: bool = True,
) -> _torch.OpenSizes:  # fmt: skip
    """Return for which sizes of these dims of the inputs, by name and dim the place of the size, the forward takes the
    way that it takes on the example, and its numbers; `as_eager`: as in Exported. Raises what `export` raises,
    also where the model cannot be traced with a size that is not known."""
    open_dims = [dims.get(n, {}) for n in CallSignature.of(*split_example(example_inputs))[0].tensor_names]
    how = loss_fn, forms, dtype, loss_alone, with_gradients

    def run_open(mode, call: FlatCall, inputs: list[torch.Tensor]) -> _torch.OpenSizes:
        def run(opened: list[torch.Tensor]) -> None:
            inputs_by_name = {f"input {at}": x for at, x in enumerate(opened)}
            with CallRecord(mode, inputs_by_name | dict(call.named_parameters()) | dict(call.named_buffers()), {}):
                call(*opened)

        with _torch.as_if_exported():
            return _torch.run_open(mode, run, inputs, open_dims)

    with contextlib.suppress(AutoparError):  # what a run alone does not show, or cannot do, an export may
        run = traced(model, example_inputs, *how, run_open, as_eager, False, _torch.open_mode())
        if run.is_plain:
            return run.program
    program = traced(
        model, example_inputs, *how, lambda mode, call, inputs: _torch.export_open(call, inputs, open_dims), as_eager
    ).program
    return _torch.open_sizes(program, {at: found for at, found in enumerate(open_dims) if found})


@dataclass(frozen=True)
class TracedCall:
    """A trace of a call, by torch or as `program` of `traced` makes it, with what was seen meanwhile."""

    program: Any
    call: FlatCall
    watch: Watch
    inputs: list[torch.Tensor]
    ties: dict[str, str]
    forms: Forms
    with_gradient: set[str]
    entered: dict

    @property
    def is_plain(self) -> bool:
        """Return whether all that the call does is to compute outputs from its inputs and the model's tensors."""
        returns = self.call.returns
        more = returns.effects or returns.buffers or returns.own_buffers or self.entered or self.with_gradient
        return not (more or self.call.signature.open_numbers)


def _with_open_numbers(model: nn.Module, example_inputs, *how) -> TracedCall:
    """Trace a call, again with those numbers closed of which the forward reads the values."""
    args, kwargs = split_example(example_inputs)
    open_names = list(CallSignature.of(args, kwargs)[0].open_numbers)
    if not open_names:
        return traced(model, example_inputs, *how)
    try:
        run = traced(model, (args, kwargs), *how)
    except AutoparError:  # of the call with plain numbers, if it has one too
        return traced(model, closed(args, kwargs), *how)
    read = run.call.numbers_read.names
    if not read:
        return run
    still_open = [name for name in open_names if name not in read]
    again = opened(*closed(args, kwargs), still_open, leaf_names(args, kwargs))
    return _with_open_numbers(model, again, *how)


def traced(model: nn.Module, example_inputs, loss_fn: Callable | None, forms: Mapping[str, Form] | None,
           dtype: torch.dtype | None, loss_alone: bool, with_gradients: bool,
           program: Callable[[Any, FlatCall, list[torch.Tensor]], Any] | None = None, as_eager: bool = False,
           with_values: bool = True, mode: Any = None) -> TracedCall:  # fmt: skip
    """Trace a call, or make a `program` of a FlatCall and its inputs, which are of a fake `mode`; without `with_values`
    buffers are fake too. Raises what `export` raises."""
    signature, inputs = CallSignature.of(*split_example(example_inputs))
    if not inputs or len(inputs) == len(signature.open_numbers):
        raise InputError("the example call passes no tensor", fix="pass example_inputs with at least one tensor")
    mode, forms = mode or _torch.fake_mode(), forms if isinstance(forms, Forms) else with_tables(model, forms)
    differentiated = {*signature.differentiated_names}
    inputs = [  # one each, also for a tensor that is passed twice
        fake(mode, x.shape, x.dtype).requires_grad_(name in differentiated)
        for name, x in zip(signature.tensor_names, inputs)
    ]
    refuse_backward_hooks(model)
    watch = Watch(model, loss_fn, [held.container for held in forms.held])
    call = FlatCall(model, signature, Returns(), loss_fn, dtype, loss_alone, forms.held, watch)
    call.with_gradients, call.as_eager = with_gradients, as_eager
    draws, entered = no_random_branches(), {}
    try:
        with (
            quiet(), fake_state(model, mode, forms, with_values) as with_gradient,
            moe_in_token_order.in_order(model), expert_loops.in_order(model), layers_stay(), recorded_backwards(),
            checks_pass(draws.refuse), traced_forms(), hand_written_experts(), draws, plain_regions(),
            _torch.plain_checkpoints(), flex_attention_written_out(), refusals.noted() as entered, watch.installed(),
        ):  # fmt: skip
            made = _program(call, inputs) if program is None else program(mode, call, inputs)
            ties = tie_map(model)
    except AutoparError as error:
        error.locate(line_of_error(error) or line_of_definition(type(model).forward))
        raise refusals.explained(error, entered) or error from None
    except Exception as error:
        source = line_of_error(error)
        raise refusals.explained(error, entered, of_user=source) or CaptureError(
            f"{type(model).__name__} could not be traced: {_first_line(error)}",
            source=source,
            shape=", ".join(f"{n} {tuple(x.shape)}" for n, x in zip(signature.tensor_names, inputs)),
            fix=FIX_VALUES if _torch.is_data_dependent(error) else "check that the model itself runs on these inputs",
        ) from error
    return TracedCall(made, call, watch, inputs, ties, forms, with_gradient, entered)


def _of_no_inference(value: object) -> object:
    """Return a value of a node, if it was made in an inference mode as a tensor that passes may compute with."""
    if not isinstance(value, torch.Tensor) or not value.is_inference() or torch.is_inference_mode_enabled():
        return value
    with value.fake_mode:  # type: ignore[attr-defined]  # of a tensor that is traced
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def with_tables(model: nn.Module, forms: Mapping[str, Form] | None) -> Forms:
    """Return the forms of a model's parameters, or others for them, with the tables of its tensors."""
    found = forms_of(model)
    return found if forms is None else Forms(forms, found.buffers, found.tables, found.held)


FIX_VALUES = (
    "this line reads the values of a tensor, which are known only when the model runs: compute with torch.where, a "
    "mask or torch.topk, whose shapes do not depend on values"
)


def _program(wrapper: FlatCall, inputs: list[torch.Tensor]):
    """Export the program. Some models take another way when they are compiled than in eager mode (they leave out masks,
    or loops over values): what cannot be traced on the one may be on the other, and the numbers are the same."""
    try:
        return torch.export.export(wrapper, tuple(inputs), strict=False)
    except AutoparError:
        raise
    except Exception as error:
        wrapper.as_eager = True
        try:
            return torch.export.export(wrapper, tuple(inputs), strict=False)
        except AutoparError:
            raise
        except Exception:
            raise error from None


def differentiate(exported: Exported) -> Captured:
    """Return the joint graph of an exported forward, annotated. Gradients are those of the loss, or of all outputs
    where there is no loss."""
    _refuse_sizes_from_values(exported.graph_module.graph)
    try:
        with quiet():
            graph_module, placeholders, outputs = _torch.joint_graph(exported.graph_module, exported.inputs, inline())
    except Exception as error:
        forward = exported.graph_module
        raise refusals.explained(error, forward.meta.get("entered", {}), forward.graph) or CaptureError(
            f"the forward could not be differentiated: {_first_line(error)}",
            source=line_of_error(error),
            fix="write to the tensor before it is read, or to a clone of it"
            if "inplace operation" in str(error)
            else "write it without operations that read a tensor's values (item, nonzero, a mask as an index)",
        ) from error
    graph = graph_module.graph
    graph.set_codegen(fx.graph.CodeGen())  # plain flat arguments and results
    names = exported.signature.tensor_names
    leaves = list(zip([n for n in graph.nodes if n.op == "placeholder"], placeholders))
    for node, (kind, name) in leaves:
        if kind in ("parameter", "buffer"):
            name = exported.ties.get(strip(name), strip(name))
            node.meta["role"] = Role(kind, name, name in exported.forms and exported.forms[name].trainable)
            if name == RANDOM_STATE:
                node.meta["role"] = Role("random", "state")
        elif kind == "input":
            node.meta["role"] = Role("input", names[name])
        else:
            node.meta["role"] = Role("tangent", str(name))
        _torch.rename(node, leaf_name(node.meta["role"]))
    tangents = [(node, kind) for node, (kind, _) in leaves if kind in ("tangent", "zero")]
    drop_tangents(graph, [node for node, kind in tangents if kind == "zero"], [node for node, _ in tangents])
    output = output_node(graph)
    values, roles = [], []
    for node, described in zip(output.args[0], outputs):
        if node is None or described is None:  # a frozen parameter, or a later name of a shared one
            continue
        kind, name = described
        if kind == "output" and name in exported.returns.buffers:
            kind, name = "mutation", exported.returns.buffers[name]
        elif kind == "mutation" and strip(name) in exported.returns.buffers.values():
            continue  # written to, and then replaced
        if kind in ("gradient", "mutation"):
            name = exported.ties.get(strip(name), strip(name))
        elif kind in ("input_gradient", "input_mutation"):
            name = names[name]
        else:
            name = str(name)
        values.append(node)
        roles.append(OutputRole(kind, name))
    output.args = (tuple(values),)
    output.meta["roles"] = roles
    _merge_shared_placeholders(graph)
    registered = getattr(exported.forms, "buffers", {})
    for node in [n for n in graph.nodes if n.op == "placeholder" and not n.users]:
        if (
            node.meta["role"].kind == "buffer" and node.meta["role"].name not in registered
        ):  # an attribute that nobody reads
            graph.erase_node(node)
    _refuse_fake_constants(graph_module)
    for node in graph.nodes:
        if node.op == "get_attr":
            node.meta["role"] = Role("constant", str(node.target))
            node.meta.setdefault("val", getattr(graph_module, node.target, None))
        node.meta["module"] = module_path(node)
        node.meta["source"] = line_of_node(node)
    mark_phases(graph)
    graph_module.recompile()
    return Captured(graph_module, exported.signature, exported.returns, exported.ties, exported.guards,
                    as_eager=exported.as_eager, gathers=GATHERS in exported.graph_module.meta)  # fmt: skip


def _refuse_sizes_from_values(graph: fx.Graph) -> None:
    """Raise CaptureError for numbers and shapes that a forward graph computes from the values of tensors."""
    found = [n for n in graph.nodes if _torch.has_unknown_number(n.meta.get("val"))]
    if found:
        lines = list(dict.fromkeys(filter(None, map(line_of_node, found))))
        raise CaptureError(
            f"the shapes or numbers of {len(found)} ops depend on the values of tensors: {found[0].target}"
            + (f", at {', '.join(lines[:8])}" if lines else ""),
            node=found[0].name, source=lines[0] if lines else None, fix=FIX_VALUES,
        )  # fmt: skip


def _refuse_fake_constants(graph_module: fx.GraphModule) -> None:
    """Raise CaptureError for a tensor of the tracing itself among the constants: its values, and the gradient through
    it, are lost."""
    for node in graph_module.graph.nodes:
        if node.op == "get_attr" and _torch.is_fake(getattr(graph_module, node.target, None)):
            user = next(iter(node.users), node)
            raise CaptureError(
                f"{user.name} reads a tensor that is there only while the model is traced, as the forward does which "
                "torch.autograd.grad goes back through",
                node=user.name, source=line_of_node(user) or None,
                fix="compute derivatives outside of the model, or write them as ops of the forward",
            )  # fmt: skip


def _merge_shared_placeholders(graph: fx.Graph) -> None:
    """Leave one placeholder for each shared parameter or buffer, under its first name."""
    first: dict[Role, fx.Node] = {}
    for node in [n for n in graph.nodes if n.op == "placeholder"]:
        if node.meta["role"].kind in ("parameter", "buffer"):
            keeper = first.setdefault(node.meta["role"], node)
            if keeper is not node:
                node.replace_all_uses_with(keeper)
                graph.erase_node(node)


def strip(name: str) -> str:
    """Return the name that something has in the user's model, without that of the model in what is traced."""
    return name[len(ROOT) + 1 :] if name.startswith(ROOT + ".") else name


def module_path(node: fx.Node) -> str:
    """Return the dotted path of the module that the node comes from, an empty text for the model itself or if
    unknown."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values() if isinstance(entry, tuple) and isinstance(entry[0], str)]
    return strip(paths[-1]) if paths and paths[-1] != ROOT else ""


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
