"""torch's optimizers on the parameters of compiled modules: which ones are right as they are, and what happens to the
others. And torch.amp.GradScaler, which skips a step on all ranks or on none.

Those of torch that update every element by itself step on the local parts of the parameters, as fast as on plain
tensors. Adafactor, which looks at all of a parameter at once, steps on whole ones, gathered one after the other.
Others, and a user's own, step on DTensors. LBFGS computes with whole parameters in a way that some layouts do not
allow, and is refused for those before its first step. torch calls the hook below at the start of every `step`.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
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
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import _torch
from ..errors import OptimizerError
from ..ir.layout import Layout, local_part
from ..ir.mesh import Mesh
from ..processes import watch
from ..processes.dtensors import as_dtensor
from ..storage.weights import shortened

# What inherits from them may mix elements.
BY_ELEMENT = frozenset((ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop))
BY_PARAMETER = frozenset((Adafactor,))  # their update of a parameter reads all of it, and no other one
SCALARS = frozenset(("step", "mu_product", "eta", "mu"))  # of their state

_modules: WeakSet[nn.Module] = WeakSet()
_checked: WeakKeyDictionary[Optimizer, tuple] = (
    WeakKeyDictionary()
)  # (form when it was checked, whether it steps on local parts)


def follow(module: nn.Module) -> None:
    """See to the optimizers of a ParallelModule's parameters from here on."""
    if not _hooks:
        _hooks.extend((register_optimizer_step_pre_hook(_before), register_optimizer_step_post_hook(_after)))
        _torch.unscale_through(_unscaled_together)
    _modules.add(module)


_hooks: list = []


def _before(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Raise OptimizerError for an optimizer that cannot step; give one that needs local parts a stand-in that has
    them."""
    form = tuple((len(group["params"]), bool(group.get("fused"))) for group in optimizer.param_groups)
    known, is_local = _checked.get(optimizer, (None, False))
    if known != form:
        owners = [m for m in _modules if _has_some_of(optimizer, m)]
        for module in owners:
            _check(optimizer, module)
        is_local = bool(owners) and _steps_on_local_parts(optimizer)
        _checked[optimizer] = form, is_local
    if is_local:
        return _on_local_parts(optimizer, args, kwargs)
    if type(optimizer) in BY_PARAMETER and (modules := [m for m in _modules if _has_some_of(optimizer, m)]):
        return _on_whole_parameters(optimizer, modules, args, kwargs)
    return None


def _has_some_of(optimizer: Optimizer, module: nn.Module) -> bool:
    mine = {id(p) for p in module.parameters()}
    return any(id(p) in mine for p in _parameters(optimizer))


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


# what is refused
# ---------------------------------------------------------------------------------------------------------


def _check(optimizer: Optimizer, module: nn.Module) -> None:
    """Raise OptimizerError for an optimizer that would be wrong, or fail half way, on these parameters: on all ranks
    that have some of the same."""
    kind, ids, mesh = type(optimizer).__name__, {id(p) for p in _parameters(optimizer)}, module.stage_mesh.mesh
    mine = {name: p for name, p in module.named_parameters() if id(p) in ids}
    if isinstance(optimizer, LBFGS) and module.plan.pipeline.is_staged:
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
    known = _loss_of(args, kwargs)
    stand_in = _stand_in(optimizer, _local_groups(optimizer))
    for parameter, local in zip(_parameters(optimizer), _parameters(stand_in)):
        if parameter in optimizer.state:
            stand_in.state[local] = {key: _local_value(value) for key, value in optimizer.state[parameter].items()}
    return (stand_in, known), {}


def _loss_of(args: tuple, kwargs: dict) -> Callable | None:
    """Run the closure of a step, which computes the gradients, if it has one; return one that gives the same loss."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    return lambda: loss


def _stand_in(optimizer: Optimizer, groups: list[dict]) -> Optimizer:
    """Return an optimizer with the same settings, these groups and no state."""
    made = object.__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    made.state, made.param_groups = defaultdict(dict), groups
    return made


# what steps on whole parameters
# ----------------------------------------------------------------------------


def _on_whole_parameters(optimizer: Optimizer, modules: Sequence[Any], args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Update the parameters one after the other, gathered; return the arguments of a step of a stand-in, for which
    nothing is left to do. Each rank that has parts of a parameter computes the same."""
    known = _loss_of(args, kwargs)
    places = {id(p): (module, name) for module in modules for name, p in module.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            whole, state = _full(parameter).clone(), optimizer.state[parameter]
            whole.grad = _full(parameter.grad)
            one = _stand_in(optimizer, [group | {"params": [whole]}])
            one._optimizer_step_pre_hooks, one._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
            one.state[whole] = {key: _full(value) for key, value in state.items()}
            one.step()
            found = {key: _as(parameter, value, places) for key, value in one.state[whole].items()}
            state.update(found)
            _local_value(parameter).detach().copy_(_local_value(_as(parameter, whole, places)))
    return (_stand_in(optimizer, [group | {"params": []} for group in optimizer.param_groups]), known), {}


def _full(value):
    """Return a tensor as a whole, and anything else as it is."""
    return value.full_tensor().detach() if isinstance(value, DTensor) else value


def _as(parameter: nn.Parameter, value, places: dict[int, tuple[Any, str]]):
    """Return a whole tensor that is like a DTensor parameter in the parameter's layout; anything else as it is."""
    is_like = isinstance(value, torch.Tensor) and value.shape == parameter.shape and isinstance(parameter, DTensor)
    if not is_like:
        return value
    module, name = places[id(parameter)]
    layout, stage = module.layouts[name], module.stage_mesh
    part = local_part(value.detach(), layout, stage.mesh, stage.coordinate).contiguous()
    return as_dtensor(part, parameter.shape, layout, stage.mesh, stage.device_mesh)


def _local_groups(optimizer: Optimizer) -> list[dict]:
    """Return the groups of an optimizer with the local parts of its parameters and their gradients."""
    return [group | {"params": [_local(p) for p in group["params"]]} for group in optimizer.param_groups]


def _local(parameter: nn.Parameter) -> torch.Tensor:
    """Return the part of a parameter that is here, with the same part of its gradient."""
    if not isinstance(parameter, DTensor):
        return parameter
    local = _torch.local_of(parameter).detach()
    if parameter.grad is not None:
        local.grad = local_gradient(parameter).detach()
    return local


def local_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return the part of a DTensor parameter's gradient that belongs to the part of the parameter that is here."""
    gradient = parameter.grad
    if gradient.placements != parameter.placements:  # not reduced yet
        gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
    return _torch.local_of(gradient)


def _local_value(value: Any) -> Any:
    return _torch.local_of(value) if isinstance(value, DTensor) else value


def _after(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    """Give the state of a stand-in to the optimizer that it stood for, as DTensors like the parameters."""
    stand_in = args[0]
    if stand_in is optimizer:
        return
    # what still needs the former values has to notice, though the local parts alone were written to
    torch.autograd.graph.increment_version([p for p in _parameters(optimizer) if p.grad is not None])
    for parameter, local in zip(_parameters(optimizer), _parameters(stand_in)):
        state = optimizer.state[parameter] if local in stand_in.state else {}
        for key, value in stand_in.state.get(local, {}).items():
            if _local_value(state.get(key)) is value:
                continue
            is_like = isinstance(value, torch.Tensor) and value.shape == local.shape and key not in SCALARS
            if not is_like or not isinstance(parameter, DTensor):
                state[key] = value
            else:
                state[key] = DTensor.from_local(
                    value, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
                    stride=parameter.stride(),
                )  # fmt: skip


# gradients scaled by torch.amp.GradScaler
# ----------------------------------------------------------------------------


def _unscaled_together(unscale: Callable) -> Callable:
    """Return GradScaler's method for optimizers of compiled modules too, which all ranks call together: gradients are
    unscaled in their local parts, and a rank finds them infinite if any rank does, whatever parts it has itself."""

    def unscaled(scaler, optimizer: Optimizer, inv_scale, found_inf, allow_fp16: bool) -> dict:
        if not any(_has_some_of(optimizer, module) for module in _modules):
            return unscale(scaler, optimizer, inv_scale, found_inf, allow_fp16)
        local = SimpleNamespace(param_groups=_local_groups(optimizer))
        found = unscale(scaler, local, inv_scale, found_inf, allow_fp16)
        torch.autograd.graph.increment_version([p.grad for p in _parameters(optimizer) if p.grad is not None])
        none = torch.full_like(found_inf, -1.0)  # a stage may have no gradient: that is no error if another has one
        worst = torch.stack([none, *(here.to(none.device) for here in found.values())]).amax()
        with watch.collective("whether gradients are finite"):
            dist.all_reduce(worst, dist.ReduceOp.MAX)
        if not found and worst < 0:
            return {}  # which GradScaler refuses
        return {device: worst.to(device) for device in found or [worst.device]}

    return unscaled
