"""torch's optimizers on the parameters of compiled modules: which ones are right as they are, and what happens to the
others. And torch.amp.GradScaler, which skips a step on all ranks or on none.

Those of torch that update every element by itself step on the local parts of the parameters, as fast as on plain
tensors. Adafactor, which looks at all of a parameter at once, steps on whole ones, gathered one after the other; Muon
gathers what it orthogonalizes (muon.py). Others, and a user's own, step on DTensors. LBFGS computes with whole
parameters in a way that some layouts do not allow, and is refused for those before its first step. State may be kept in
a narrow type (narrow_state.py). torch calls the hook below at the start of every `step`.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import _torch
from ..errors import OptimizerError
from ..frontend.precision import state_type
from ..ir.layout import Layout
from ..ir.mesh import Mesh
from ..processes import process_groups, watch
from ..processes.dtensors import as_dtensor
from ..storage.weights import shortened
from .clipping import over_stages
from .lent_state import give_back, is_lent, lend
from .muon import check_parts, step_muon
from .narrow_state import step_narrow, warn_of_decay
from .stand_in import (
    Place,
    idle,
    local,
    local_value,
    loss_of,
    parameters_of,
    places_of,
    stand_in,
    step_alone,
    written_to,
)

# What inherits from them may mix elements.
BY_ELEMENT = frozenset((ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop))

_modules: WeakSet[nn.Module] = WeakSet()
# (form when it was checked, whether it steps on local parts, the type that its state is kept in if that is narrow,
# the meshes of the compiled modules whose parameters it has)
_checked: WeakKeyDictionary[Optimizer, tuple] = WeakKeyDictionary()
_stepped: WeakSet[Optimizer] = WeakSet()  # since `settings_of`


def follow(module: nn.Module) -> None:
    """See to the optimizers of a ParallelModule's parameters from here on."""
    if not _hooks:
        _hooks.extend((register_optimizer_step_pre_hook(_before), register_optimizer_step_post_hook(_after)))
        _torch.unscale_through(_unscaled_together)
        _torch.total_norm_through(over_stages(_modules))
    _modules.add(module)


_hooks: list = []


def _before(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Raise OptimizerError for an optimizer that cannot step; give one that needs local parts a stand-in that has
    them."""
    form = tuple((len(group["params"]), bool(group.get("fused"))) for group in optimizer.param_groups)
    known, is_local, kept, meshes = _checked.get(optimizer, (None, False, None, frozenset()))
    if known != form:
        owners = [m for m in _modules if _has_some_of(optimizer, m)]
        for module in owners:
            _check(optimizer, module)
        is_local = bool(owners) and _steps_on_local_parts(optimizer)
        kept = _kept_in(optimizer, owners, is_local)
        meshes = _meshes_of(owners)
        _checked[optimizer] = form, is_local, kept, meshes
    if meshes:
        _stepped.add(optimizer)
        watch.stepped(meshes, any(p.grad is not None for p in parameters_of(optimizer)))
    if kept is not None:
        return step_narrow(optimizer, kept, args, kwargs)
    if is_local:
        return _on_local_parts(optimizer, args, kwargs)
    step = BY_PARAMETER.get(type(optimizer))
    if step is not None and (modules := [m for m in _modules if _has_some_of(optimizer, m)]):
        return step(optimizer, modules, args, kwargs)
    return None


def settings_of(module: nn.Module) -> list[dict[str, str]]:
    """Return the settings, by name, of each group of parameters of the optimizers that have stepped the module's since
    the last call. (One that steps no more is there until it is collected, which ranks do at different times.)"""
    stepped = [optimizer for optimizer in _checked if optimizer in _stepped and _has_some_of(optimizer, module)]
    for optimizer in stepped:
        _stepped.discard(optimizer)
    groups = [(type(optimizer).__name__, group) for optimizer in stepped for group in optimizer.param_groups]
    return [
        {"optimizer": kind} | {name: _text(value) for name, value in sorted(group.items()) if name != "params"}
        for kind, group in groups
    ]


def _text(value: object) -> str:
    return str(value.tolist() if isinstance(value, torch.Tensor) else value)


def _meshes_of(owners: Sequence[Any]) -> frozenset[str]:
    return frozenset(str(module.plan.mesh) for module in owners)


def _has_some_of(optimizer: Optimizer, module: nn.Module) -> bool:
    mine = {id(p) for p in module.parameters()}
    return any(id(p) in mine for p in parameters_of(optimizer))


# what is refused
# ---------------------------------------------------------------------------------------------------------


def _check(optimizer: Optimizer, module: nn.Module) -> None:
    """Raise OptimizerError for an optimizer that would be wrong, or fail half way, on these parameters: on all ranks
    that have some of the same."""
    kind, ids, mesh = type(optimizer).__name__, {id(p) for p in parameters_of(optimizer)}, module.stage_mesh.mesh
    mine = {name: p for name, p in module.named_parameters() if id(p) in ids}
    if type(optimizer) is Muon:
        check_parts(optimizer)
    if isinstance(optimizer, LBFGS) and module.elsewhere:
        raise OptimizerError(
            f"{kind} searches along all parameters at once, and a rank of a pipeline has those of its stages only",
            mesh=module.plan.mesh,
            fix="an optimizer that updates parameter by parameter, such as AdamW, or a mesh without pp",
        )  # fmt: skip
    if isinstance(optimizer, LBFGS):
        _refuse(kind, "flattens parameters, which DTensor cannot where ranks have parts of different sizes or of fused "
                      "weights",
                {n: p for n, p in mine.items() if not _can_flatten(module.layouts[n], p.shape, mesh)},
                module)  # fmt: skip
    if isinstance(optimizer, Adafactor) and type(optimizer) not in BY_PARAMETER:
        _refuse(kind, "takes norms of rows and columns in place, which DTensor cannot do of sharded parameters",
                {n: p for n, p in mine.items() if module.layouts[n].sharding_axes}, module)  # fmt: skip
    if (
        isinstance(optimizer, (SGD, Adagrad, Rprop))
        and _calls_missing_ops(optimizer)
        and type(optimizer) not in BY_ELEMENT
    ):
        fix = "one of torch.optim's own" if isinstance(optimizer, Rprop) else "fused=False"
        raise OptimizerError(f"{kind} inherits from an optimizer that calls ops which DTensor does not have", fix=fix)


def _kept_in(optimizer: Optimizer, owners: Sequence[Any], is_local: bool) -> torch.dtype | None:
    """Return the narrow type that these modules' plans keep an optimizer's state in, None for that of the parameters.
    Raise OptimizerError where that cannot be done; warn where it is of no use."""
    asked = {module.plan.state_dtype for module in owners}
    kind, kept = type(optimizer).__name__, None if len(asked) != 1 else state_type(*asked)
    if len(asked) > 1:
        raise OptimizerError(
            f"{kind} has parameters of modules with state_dtype {' and '.join(sorted(map(str, asked)))}",
            fix="an optimizer for each of them, or the same state_dtype",
        )
    if kept is not None and not is_local:
        raise OptimizerError(
            f"{kind} does not update element by element, or lets gradients flow: its state is not kept in {kept}",
            fix="leave out state_dtype, or use torch.optim.AdamW, SGD or another of torch's that works by element",
        )
    if kept is not None:
        warn_of_decay(optimizer, kept)
    return kept


def _refuse(kind: str, why: str, parameters: dict[str, nn.Parameter], module: nn.Module) -> None:
    if not parameters:
        return
    found = [f"{name} {tuple(p.shape)} is {module.layouts[name]}" for name, p in parameters.items()]
    raise OptimizerError(
        f"{kind} {why}: {shortened(found)}", mesh=module.plan.mesh,
        fix="torch.optim.AdamW or SGD, or compile with strategy='ddp', or pin these to \"R\", which takes more memory",
    )  # fmt: skip


def _can_flatten(layout: Layout, shape: Sequence[int], mesh: Mesh) -> bool:
    """Return whether DTensor can flatten a tensor: no dim is cut inside its parts, none but the last into pieces of
    different sizes."""
    cuts = [math.prod(mesh.size(axis) for axis in axes) for axes in layout.dims]
    return max(layout.parts, default=1) == 1 and not any(size % cut for size, cut in zip(shape[:-1], cuts))


# what steps on local parts
# -----------------------------------------------------------------------------------------------


def _calls_missing_ops(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, Rprop) or any(group.get("fused") for group in optimizer.param_groups)


def _steps_on_local_parts(optimizer: Optimizer) -> bool:
    """Return whether an optimizer updates by element, and no gradient is to flow through its step."""
    differentiable = any(group.get("differentiable") for group in optimizer.param_groups)
    return type(optimizer) in BY_ELEMENT and not differentiable


def _on_local_parts(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Return the arguments of a step of a stand-in, which has the local parts of the parameters, their gradients and
    their state."""
    known = loss_of(args, kwargs)
    return (lend(optimizer), known), {}


# what steps on whole parameters
# ----------------------------------------------------------------------------


def _on_whole_parameters(optimizer: Optimizer, modules: Sequence[Any], args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Update the parameters one after the other, gathered; return the arguments of a step of a stand-in, for which
    nothing is left to do. Each rank that has parts of a parameter computes the same."""
    known = loss_of(args, kwargs)
    places = places_of(modules)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            whole, state = _full(parameter).clone(), optimizer.state[parameter]
            whole.grad = _full(parameter.grad)
            one = stand_in(optimizer, [group | {"params": [whole]}])
            one.state[whole] = {key: _full(value) for key, value in state.items()}
            step_alone(one)
            found = {key: _as(parameter, value, places) for key, value in one.state[whole].items()}
            state.update(found)
            local_value(parameter).detach().copy_(local_value(_as(parameter, whole, places)))
    return (idle(optimizer), known), {}


# Their update of a parameter reads all of it, and no other one.
BY_PARAMETER: dict[type, Callable] = {Adafactor: _on_whole_parameters, Muon: step_muon}


def _full(value):
    """Return a tensor as a whole, and anything else as it is."""
    return value.full_tensor().detach() if isinstance(value, DTensor) else value


def _as(parameter: nn.Parameter, value, places: dict[int, Place]):
    """Return a whole tensor that is like a DTensor parameter in the parameter's layout; anything else as it is."""
    if not (isinstance(value, torch.Tensor) and value.shape == parameter.shape and isinstance(parameter, DTensor)):
        return value
    place = places[id(parameter)]
    layout, stage = place.module.layouts[place.name], place.module.stage_mesh
    return as_dtensor(place.part_of(value.detach()), parameter.shape, layout, stage.mesh, stage.device_mesh)


def _local_groups(optimizer: Optimizer) -> list[dict]:
    """Return the groups of an optimizer with the local parts of its parameters and their gradients."""
    return [group | {"params": [local(p) for p in group["params"]]} for group in optimizer.param_groups]


def _after(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    """Give the state of a stand-in to the optimizer that it stood for, as DTensors like the parameters."""
    made = args[0]
    if made is not optimizer and is_lent(made):
        give_back(optimizer, made)
    elif made is not optimizer:
        written_to([p for p in parameters_of(optimizer) if p.grad is not None])


# gradients scaled by torch.amp.GradScaler
# ----------------------------------------------------------------------------


def _unscaled_together(unscale: Callable) -> Callable:
    """Return GradScaler's method for optimizers of compiled modules too, which all ranks call together: gradients are
    unscaled in their local parts, and a rank finds them infinite if any rank does, whatever parts it has itself."""

    def unscaled(scaler, optimizer: Optimizer, inv_scale, found_inf, allow_fp16: bool) -> dict:
        if not any(_has_some_of(optimizer, module) for module in _modules):
            return unscale(scaler, optimizer, inv_scale, found_inf, allow_fp16)
        parts = SimpleNamespace(param_groups=_local_groups(optimizer))
        found = unscale(scaler, parts, inv_scale, found_inf, allow_fp16)
        torch.autograd.graph.increment_version([p.grad for p in parameters_of(optimizer) if p.grad is not None])
        none = torch.full_like(found_inf, -1.0)  # a stage may have no gradient: that is no error if another has one
        worst = torch.stack([none, *(here.to(none.device) for here in found.values())]).amax()
        with watch.collective("whether gradients are finite"):
            dist.all_reduce(worst, dist.ReduceOp.MAX, process_groups.tensor_group("finite"))
        if not found and worst < 0:
            return {}  # which GradScaler refuses
        return {device: worst.to(device) for device in found or [worst.device]}

    return unscaled


def scale_of_scalers() -> float:
    """Return the least scale of the GradScalers of this process that are enabled, 1 if there is none."""
    kind: Any = torch.amp.GradScaler
    scalers = [x for x in gc.get_objects() if issubclass(type(x), kind) and x.is_enabled()]
    return min((float(scaler.get_scale()) for scaler in scalers), default=1.0)
