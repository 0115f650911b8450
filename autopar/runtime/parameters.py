"""Parameters change hands: this rank's shards take the places of the source's parameters, which are emptied and say so.

The compiled module has the source's own submodules. What a user sets on one of them (a dropout's p, a temperature, a
training flag) is set on what is traced, and what is found by its class is what was written.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from .. import _torch
from ..adapt.attach import Replaced
from ..errors import InputError, MovedParameterError, StrategyError
from ..frontend.export import Captured
from ..frontend.fake_parameters import CallRefusal, Forms
from ..frontend.user_lines import line_now
from ..ir.layout import Layout, local_part
from ..plans.plan import Plan
from ..processes.dtensors import as_dtensor
from ..processes.stage_mesh import StageMesh
from ..storage.weights import Weights
from . import data_writes
from .parameter_hooks import give_whole_gradients
from .source_attributes import OfSource

# What may still be asked of an emptied parameter: enough to print, count, hash and delete the model that holds it.
WRAPPERS = ("torch.distributed.fsdp.", "torch.nn.parallel.")  # modules of classes that make a model parallel
_ANSWERS = frozenset(
    """__repr__ __hash__ size shape dim ndim numel dtype device layout requires_grad is_leaf is_meta is_cuda is_sparse
    is_floating_point is_complex is_quantized type element_size untyped_storage""".split()
)


Tables = dict[tuple[str, str], tuple[dict, str]]


class MovedParameter(nn.Parameter):
    """A parameter of the source model that was taken over: any use, also by an optimizer built on it before, says where
    its values went."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name == "__get__":  # of an attribute
            name = getattr(function.__self__, "__name__", "")
        if name in _ANSWERS:
            return super().__torch_function__(function, types, args, kwargs or {})
        raise MovedParameterError(
            "this parameter was taken over by autopar.compile and is empty",
            source=line_now(),
            fix="use the module that compile returned, and build the optimizer from its parameters()",
        )

    def __repr__(self) -> str:
        return "MovedParameter(taken over by autopar.compile)"


_taken_over: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def check_model(source: nn.Module) -> None:
    """Raise InputError or MovedParameterError for what cannot be traced as a model."""
    if not isinstance(source, nn.Module):
        raise InputError(
            f"the model is a {type(source).__name__}, not a torch.nn.Module", fix="wrap it in a torch.nn.Module"
        )
    if source in _taken_over:
        raise MovedParameterError(
            f"the {type(source).__name__} was taken over by an earlier autopar.compile",
            source=line_now(),
            fix="build the model again, or copy it before compiling",
        )
    for name, module in source.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{name or 'the model'} is a {type(module).__name__} of TorchScript, which cannot be traced",
                fix="pass the Python module that it was scripted or traced from",
            )
        if wrapper := next(
            (cls.__name__ for cls in type(module).__mro__ if f"{cls.__module__}.".startswith(WRAPPERS)), None
        ):
            raise InputError(
                f"{name or 'the model'} is parallel already: it is a {wrapper}",
                fix="pass the plain model (model.module): the plan shards parameters and reduces "
                "gradients itself; "
                'strategy="ddp" or "fsdp" plans as the wrapper would',
            )
    for name, tensor in (*source.named_parameters(), *source.named_buffers()):
        if isinstance(tensor, MovedParameter):
            raise MovedParameterError(
                f"{name} was taken over by an earlier autopar.compile",
                source=line_now(),
                fix="build the model again, or copy it before compiling",
            )
        if nn.parameter.is_lazy(tensor):
            raise InputError(
                f"{name} has no shape yet", fix="call the model once, so that its lazy layers know their sizes"
            )
    for name, parameter in source.named_parameters():
        if parameter.is_complex():
            raise InputError(
                f"{name} is complex, and gradients of complex parameters are not available", fix="use real parameters"
            )


def parallel_already(wrapper: str) -> StrategyError:
    """Return the error that refuses to make a compiled model parallel once more."""
    return StrategyError(
        f"{wrapper} cannot wrap a compiled model: it is parallel already, with gradients reduced and parameters "
        f"sharded as planned",
        fix='train it as it is; strategy="ddp" or "fsdp" in autopar.compile plans as the wrapper would',
    )


def check_source(source: nn.Module, weights: bool = False) -> None:
    """Raise InputError or MovedParameterError if the model cannot be taken over; without `weights` it must have
    values."""
    check_model(source)
    for name, tensor in (*source.named_parameters(), *source.named_buffers()):
        if tensor.is_meta and not weights:
            raise InputError(
                f"{name} is on the meta device and has no values",
                fix="pass weights=FOLDER, or compile a model with values; autopar.plan takes models on the meta device",
            )
    for name, parameter in source.named_parameters():
        if isinstance(parameter, DTensor):
            raise InputError(f"{name} is a DTensor already", fix="compile the model before it is parallelized")


def take_over(
    source: nn.Module,
    forms: Forms,
    captured: Captured,
    plan: Plan,
    stage: StageMesh,
    weights: Weights | None = None,
    added: Collection[str] = (),
    replaced: Mapping[str, Replaced] | None = None,
    elsewhere: Collection[str] = (),
) -> dict[str, Layout]:
    """Put this rank's parts, on the device or where the plan puts them, in the places of the parameters and buffers of
    `source`, with its values or those that `weights` reads (which has none of the names in `added`). `replaced`:
    parameters that are not kept, and what is computed from them instead. Each source parameter is emptied as soon as
    its part is made, so that the two are never in memory as a whole. Of the parameters and buffers `elsewhere`, of
    other stages of a pipeline, this rank gets none. Returns the layouts of the parameters by name."""
    mesh, device_mesh, coordinate = stage.mesh, stage.device_mesh, stage.coordinate
    device = torch.device(device_mesh.device_type)
    leaves = {n.meta["role"].name: n.name for n in captured.graph.nodes if n.op == "placeholder"}

    def part_of(name: str, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        if weights is not None and name not in added:
            part = weights.part(name, tensor.dtype, layout, mesh, coordinate)
        else:
            part = local_part(tensor.detach(), layout, mesh, coordinate).contiguous()
        if leaves.get(captured.ties.get(name, name)) not in plan.sharding.on_host:
            return part.to(device)
        return (
            part.cpu().pin_memory() if device.type == "cuda" else part.cpu()
        )  # pinned memory is copied at the link's speed

    persistent = set(source.state_dict())
    buffers: dict[int, torch.Tensor] = {}
    for name, buffer in list(source.named_buffers(remove_duplicate=False)):
        table, leaf = table_of(source, name, "_buffers")
        if captured.ties.get(name, name) in elsewhere:
            table.pop(leaf, None)
            if name not in persistent:
                forms.left[captured.ties.get(name, name)] = buffer
            continue
        if id(buffer) not in buffers:
            saved = name in persistent and weights is not None and name not in added
            replicated = Layout.replicated(buffer.dim())
            buffers[id(buffer)] = part_of(name, buffer, replicated) if saved else buffer.detach().to(device)
        table[leaf] = buffers[id(buffer)]

    def layout_of(name: str, dims: int) -> Layout:
        return plan.sharding.leaves.get(leaves.get(captured.ties.get(name, name), "")) or Layout.replicated(dims)

    made: dict[int, nn.Parameter] = {}
    layouts: dict[str, Layout] = {}
    shapes = {id(p): p.shape for p in source.parameters()}
    computed: dict[str, torch.Tensor] = {}  # this rank's parts of what replaces a parameter
    gone = {id(source.get_parameter(name)) for name in replaced or {}}
    for name, parameter in list(source.named_parameters(remove_duplicate=False)):
        table, leaf = table_of(source, name, "_parameters")
        if captured.ties.get(name, name) in elsewhere:
            _empty(parameter)
            table.pop(leaf, None)
            continue
        if id(parameter) in gone:
            if name in replaced and not {*replaced[name].names} <= {*elsewhere}:
                whole = part_of(name, parameter, Layout.replicated(parameter.dim()))
                if not torch.isfinite(whole).all():
                    raise InputError(
                        f"{name} has values that are not finite, and its blocks would be too", fix="mend the weights"
                    )
                for new, value in zip(replaced[name].names, replaced[name].compute(whole)):
                    computed[new] = local_part(value, layout_of(new, value.dim()), mesh, coordinate)
            if name in replaced:
                _empty(parameter)
            table.pop(leaf, None)
            continue
        layout = layouts[name] = layout_of(name, len(shapes[id(parameter)]))
        if id(parameter) not in made:
            local = computed.pop(name) if name in computed else part_of(name, parameter, layout)
            dtensor = as_dtensor(local, shapes[id(parameter)], layout, mesh, device_mesh)
            made[id(parameter)] = nn.Parameter(dtensor, requires_grad=parameter.requires_grad)
            data_writes.take(made[id(parameter)])
            give_whole_gradients(made[id(parameter)], layout, stage)
            _torch.move_hooks(parameter, made[id(parameter)])
            _empty(parameter)
        table[leaf] = made[id(parameter)]
    for held in forms.held:
        if held.leaf in held.owner._parameters or held.leaf in held.owner._buffers:
            held.refresh()
    for module in source.modules():
        module.register_forward_pre_hook(CallRefusal(), prepend=True)
    taken_over(source)
    return layouts


def taken_over(source: nn.Module) -> None:
    """Note that a model belongs to a compiled module."""
    _taken_over.add(source)


def _empty(parameter: nn.Parameter) -> None:
    if isinstance(parameter, MovedParameter):
        return
    parameter.grad = None
    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    parameter.__class__ = MovedParameter


def tables_of(module: nn.Module, graphs: Iterable[fx.Graph]) -> Tables:
    """Return the tables (see `table_of`) of the parameters and buffers that joint graphs read, by kind and name."""
    roles = (n.meta["role"] for graph in graphs for n in graph.nodes if n.op == "placeholder")
    state = [role for role in roles if role.kind in ("parameter", "buffer")]
    return {(role.kind, role.name): table_of(module, role.name, f"_{role.kind}s") for role in state}


def table_of(module: nn.Module, name: str, kind: str) -> tuple[dict, str]:
    """Return the table in which a parameter or buffer lives, and its key there: looking it up there at every step
    always finds the current one. A tensor that is a plain attribute counts as a buffer."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if isinstance(owner, OfSource):
        owner = owner._source
    table = getattr(owner, kind)
    return (vars(owner) if isinstance(vars(owner).get(leaf), torch.Tensor) and leaf not in table else table), leaf
