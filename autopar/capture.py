"""From a module and an example call to a joint graph: `export` the forward, then (after the passes that rewrite it)
`differentiate`.

The exported forward graph reads parameters and buffers by `get_attr` under their own qualified names and takes the tensors of
the call as placeholders. The joint graph has one placeholder for each of them and is annotated as autopar/graph.py says.
"""

from __future__ import annotations

import contextlib
import inspect
import linecache
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from . import _torch
from ._torch import tree_flatten, tree_map
from ._torch_regions import plain_regions
from .calls import CallSignature, LossOutput, Returns, split_example
from .compact import Compact
from .errors import AutoparError, CaptureError, InputError
from .experts import in_order
from .fake_state import DEVICE, Form, fake, fake_state, forms_of
from .functions import inline, kept_backwards
from .graph import RANDOM_STATE, OutputRole, Role, leaf_name, mark_phases, output_node
from .idioms import traced_idioms
from .precision import computing_in, narrowed, widened
from .zero_tangents import drop_tangents

ROOT = "model"  # name of the user's module inside the traced wrapper


@dataclass
class Exported:
    """The forward graph of a call. `ties` maps every name of a shared parameter to its first name; `forms`: of all parameters of
    the model under their first names, those that the call does not read included."""

    graph_module: fx.GraphModule
    signature: CallSignature
    returns: Returns
    inputs: list[torch.Tensor]
    ties: dict[str, str] = field(default_factory=dict)
    forms: Mapping[str, Form] = field(default_factory=dict)


@dataclass
class Captured:
    """The joint graph of a call, annotated (see autopar/graph.py), and how to call it. `compact`: the same with few of many equal
    blocks, if it was captured so."""

    graph_module: fx.GraphModule
    signature: CallSignature
    returns: Returns
    ties: dict[str, str]
    compact: Compact | None = None

    @property
    def graph(self) -> fx.Graph:
        return self.graph_module.graph


class FlatCall(nn.Module):
    """The user's module as a function of flat tensors; without a cache, which training never reads. `dtype` is what it computes
    in (see autopar/precision.py), None for its own types; `as_eager`: the module does not learn that it is being traced;
    `loss_alone`: a loss that requires a gradient is the only output that has one; `around`: makes the context that it is called
    in."""

    def __init__(
        self, model: nn.Module, signature: CallSignature, returns: Returns, loss_fn: Callable | None,
        dtype: torch.dtype | None = None, loss_alone: bool = True,
    ):  # fmt: skip
        super().__init__()
        self.add_module(ROOT, model)
        self.signature, self.returns, self.loss_fn, self.dtype = signature, returns, loss_fn, dtype
        self.as_eager, self.loss_alone, self.around = False, loss_alone, contextlib.nullcontext

    def forward(self, *tensors):
        with self.around(), computing_in(getattr(self, ROOT), self.dtype), _torch.as_if_eager(self.as_eager):
            return self._call(*self.signature.rebuild(tensors))

    def _call(self, args: tuple, kwargs: dict):
        model = getattr(self, ROOT)
        loss_kwargs = {}
        if self.loss_fn is not None:
            kwargs, loss_kwargs = _route(model.forward, self.loss_fn, kwargs)
        if _keeps_cache(model) and "use_cache" not in kwargs:
            kwargs = {**kwargs, "use_cache": False}
        args, kwargs = tree_map(lambda x: narrowed(x, self.dtype), (args, kwargs))
        output = model(*args, **kwargs)
        if self.loss_fn is not None:
            output = LossOutput(self.loss_fn(output, **loss_kwargs), output)
        outputs = self.returns.take_apart(output)
        self.returns.differentiable = [o.requires_grad for o in outputs]
        if (at := self.returns.loss) is not None:
            wide = outputs[at] if self.dtype is None else widened(outputs[at])
            wanted = self.returns.differentiable
            # of a frozen model something may train later
            self.returns.loss_alone = self.loss_alone and (wanted[at] or not any(wanted))
            outputs = [wide if i == at else o.detach() if self.returns.loss_alone else o for i, o in enumerate(outputs)]
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        return tuple(_apart(outputs, [*model.parameters(), *inputs]))


def _apart(outputs: list[torch.Tensor], leaves: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs, each in memory of its own if it has a gradient: torch traces no gradient through an output that is a view of
    a parameter, an input or another output."""
    taken, result = {_torch.storage_key(p) for p in leaves}, []
    for output in outputs:
        if output.requires_grad and _torch.storage_key(output) in taken:
            output = output.clone()
        taken.add(_torch.storage_key(output))
        result.append(output)
    return result


def _keeps_cache(model: nn.Module) -> bool:
    """Whether a call takes `use_cache`, by name or among the keywords of a model whose configuration has it."""
    takes = inspect.signature(model.forward).parameters
    is_open = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    return "use_cache" in takes or (is_open and bool(getattr(getattr(model, "config", None), "use_cache", False)))


def _route(forward: Callable, loss_fn: Callable, kwargs: dict) -> tuple[dict, dict]:
    """Keyword arguments of the call go to the model if it takes them and to the loss function if that takes them."""
    model_takes, loss_takes = inspect.signature(forward).parameters, list(inspect.signature(loss_fn).parameters)[1:]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in model_takes.values())
    to_loss = {k: v for k, v in kwargs.items() if k in loss_takes}
    return {k: v for k, v in kwargs.items() if k in model_takes or (open_ended and k not in to_loss)}, to_loss


def export(
    model: nn.Module, example_inputs, loss_fn: Callable | None = None, forms: Mapping[str, Form] | None = None,
    dtype: torch.dtype | None = None, loss_alone: bool = True,
) -> Exported:  # fmt: skip
    """Trace the forward of `model` on an example call; only shapes are read of it and of the model, so either may be on any
    device. `forms`: shapes and dtypes to give the parameters instead of their own; `dtype`: what to compute in; `loss_alone`: of
    the outputs, differentiate the loss if there is one (see FlatCall).

    Raises CaptureError with torch's reason and the user's line if the model cannot be traced, InputError if the model
    rejects the example."""
    signature, inputs = CallSignature.of(*split_example(example_inputs))
    if not inputs:
        raise InputError("the example call passes no tensor", fix="pass example_inputs with at least one tensor")
    mode, forms = _torch.fake_mode(), forms or forms_of(model)
    differentiated = {*signature.differentiated_names}
    inputs = [  # one each, also for a tensor that is passed twice
        fake(mode, x.shape, x.dtype).requires_grad_(name in differentiated) for name, x in zip(signature.tensor_names, inputs)
    ]
    returns = Returns()
    wrapper = FlatCall(model, signature, returns, loss_fn, dtype, loss_alone)
    wrapper.around = traced_idioms
    try:
        with fake_state(model, mode, forms), in_order(model), kept_backwards(), plain_regions():
            program = _program(wrapper, inputs)
    except AutoparError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} could not be traced: {_first_line(error)}",
            source=_source_of_exception(error),
            shape=", ".join(f"{n} {tuple(x.shape)}" for n, x in zip(signature.tensor_names, inputs)),
            fix=FIX_VALUES if _torch.is_data_dependent(error) else "check that model(**example_inputs) runs",
        ) from error
    graph_module = program.module(check_guards=False)
    ties = tie_map(model)
    for node in graph_module.graph.nodes:
        if node.op == "get_attr" and node.target.startswith(ROOT + "."):
            name = node.target[len(ROOT) + 1 :]
            node.target = f"{ROOT}.{ties.get(name, name)}"
    return Exported(graph_module, signature, returns, inputs, ties, forms)


FIX_VALUES = (
    "this line reads the values of a tensor, which are known only when the model runs: compute with torch.where, a mask or "
    "torch.topk, whose shapes do not depend on values"
)


def _program(wrapper: FlatCall, inputs: list[torch.Tensor]):
    """The exported program. Some models take another way when they are compiled than in eager mode (they leave out masks, or
    loops over values): what cannot be traced on the one may be on the other, and the numbers are the same."""
    try:
        return torch.export.export(wrapper, tuple(inputs), strict=False)
    except AutoparError:
        raise
    except Exception as error:
        wrapper.as_eager = True
        try:
            return torch.export.export(wrapper, tuple(inputs), strict=False)
        except Exception:
            raise error from None


def tie_map(model: nn.Module) -> dict[str, str]:
    """Every qualified name of a parameter or buffer -> the first name of the same tensor."""
    first: dict[int, str] = {}
    ties = {}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            ties[name] = first.setdefault(id(tensor), name)
    return ties


def differentiate(exported: Exported) -> Captured:
    """The joint graph of an exported forward, annotated. Gradients are those of the loss, or of all outputs without one."""
    _refuse_sizes_from_values(exported.graph_module.graph)
    try:
        graph_module, placeholders, outputs = _torch.joint_graph(exported.graph_module, exported.inputs, inline())
    except Exception as error:
        raise CaptureError(
            f"the forward could not be differentiated: {_first_line(error)}",
            source=_source_of_exception(error),
            fix="write to the tensor before it is read, or to a clone of it" if "inplace operation" in str(error)
            else "write it without operations that read a tensor's values (item, nonzero, a mask as an index)",
        ) from error  # fmt: skip
    graph = graph_module.graph
    graph.set_codegen(fx.graph.CodeGen())  # plain flat arguments and results
    names = exported.signature.tensor_names
    leaves = list(zip([n for n in graph.nodes if n.op == "placeholder"], placeholders))
    for node, (kind, name) in leaves:
        if kind in ("parameter", "buffer"):
            name = exported.ties.get(_strip(name), _strip(name))
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
    kept, roles = [], []
    for node, described in zip(output.args[0], outputs):
        if node is None or described is None:  # a frozen parameter, or a later name of a shared one
            continue
        kind, name = described
        if kind in ("gradient", "mutation"):
            name = exported.ties.get(_strip(name), _strip(name))
        elif kind in ("input_gradient", "input_mutation"):
            name = names[name]
        else:
            name = str(name)
        kept.append(node)
        roles.append(OutputRole(kind, name))
    output.args = (tuple(kept),)
    output.meta["roles"] = roles
    _merge_shared_placeholders(graph)
    _refuse_fake_constants(graph_module)
    for node in graph.nodes:
        if node.op == "get_attr":
            node.meta["role"] = Role("constant", str(node.target))
            node.meta.setdefault("val", getattr(graph_module, node.target, None))
        node.meta["module"] = module_path(node)
        node.meta["source"] = source_line(node)
    mark_phases(graph)
    graph_module.recompile()
    return Captured(graph_module, exported.signature, exported.returns, exported.ties)


def _refuse_sizes_from_values(graph: fx.Graph) -> None:
    """Raises CaptureError for numbers and shapes that a forward graph computes from the values of tensors."""
    found = [n for n in graph.nodes if _torch.has_unknown_number(n.meta.get("val"))]
    if found:
        lines = list(dict.fromkeys(filter(None, map(source_line, found))))
        raise CaptureError(
            f"the shapes or numbers of {len(found)} ops depend on the values of tensors: {found[0].target}"
            + (f", at {', '.join(lines[:8])}" if lines else ""),
            node=found[0].name, source=lines[0] if lines else None, fix=FIX_VALUES,
        )  # fmt: skip


def _refuse_fake_constants(graph_module: fx.GraphModule) -> None:
    """Raises CaptureError for a tensor of the tracing itself among the constants: its values, and the gradient through it, are
    lost."""
    for node in graph_module.graph.nodes:
        if node.op == "get_attr" and _torch.is_fake(getattr(graph_module, node.target, None)):
            user = next(iter(node.users), node)
            raise CaptureError(
                f"{user.name} reads a tensor that is there only while the model is traced, as the forward does which "
                "torch.autograd.grad goes back through",
                node=user.name, source=source_line(user) or None,
                fix="compute derivatives outside of the model, or write them as ops of the forward",
            )  # fmt: skip


def move(captured: Captured, device: torch.device) -> None:
    """Rewrite a joint graph for tensors on `device`, in place. Graphs are traced and planned on the CPU."""
    if device == DEVICE:
        return
    mode = next(n for n in captured.graph.nodes if n.op == "placeholder").meta["val"].fake_mode

    def moved(value):
        if isinstance(value, (tuple, list)):
            return type(value)(map(moved, value))
        if not isinstance(value, torch.Tensor):
            return value
        with mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

    for node in captured.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}
        node.meta["val"] = moved(node.meta.get("val"))
    captured.graph_module.recompile()


def _merge_shared_placeholders(graph: fx.Graph) -> None:
    """One placeholder for each shared parameter or buffer, under its first name."""
    first: dict[Role, fx.Node] = {}
    for node in [n for n in graph.nodes if n.op == "placeholder"]:
        if node.meta["role"].kind in ("parameter", "buffer"):
            keeper = first.setdefault(node.meta["role"], node)
            if keeper is not node:
                node.replace_all_uses_with(keeper)
                graph.erase_node(node)


def _strip(name: str) -> str:
    return name[len(ROOT) + 1 :] if name.startswith(ROOT + ".") else name


def module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values() if isinstance(entry, tuple) and isinstance(entry[0], str)]
    return _strip(paths[-1]) if paths and paths[-1] != ROOT else ""


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def source_line(node: fx.Node) -> str:
    """The user's innermost "file.py:line" that made the node: the last frame outside torch and autopar."""
    trace = node.meta.get("stack_trace") or ""
    frames = [(path, line) for path, line in _FRAME.findall(trace) if not _is_internal(path)]
    return f"{os.path.basename(frames[-1][0])}:{frames[-1][1]}" if frames else ""


_INTERNAL = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.abspath(__file__)) + os.sep)


def _is_internal(path: str) -> bool:
    return path.startswith(_INTERNAL) or path.startswith("<")


def _source_of_exception(error: BaseException) -> str | None:
    frames = []
    trace = error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if not _is_internal(path):
            frames.append((path, trace.tb_lineno))
        trace = trace.tb_next
    if not frames:
        return None
    path, line = frames[-1]
    return f"{path}:{line}: {linecache.getline(path, line).strip()}"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
