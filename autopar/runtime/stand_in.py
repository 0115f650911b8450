"""An optimizer that stands for the user's in a step, with the local parts of parameters, or some of them, or whole
ones; and what it made of their state, given back as DTensors like the parameters."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .. import _torch
from ..ir.layout import local_part

SCALARS = frozenset(("step", "mu_product", "eta", "mu"))  # of a parameter's state


def stand_in(optimizer: Optimizer, groups: list[dict]) -> Optimizer:
    """Return an optimizer with the same settings, these groups and no state."""
    made = object.__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    made.state, made.param_groups = defaultdict(dict), groups
    return made


def idle(optimizer: Optimizer) -> Optimizer:
    """Return a stand-in for which nothing is left to do."""
    return stand_in(optimizer, [group | {"params": []} for group in optimizer.param_groups])


def step_alone(made: Optimizer) -> None:
    """Take a step of a stand-in, of which the user's hooks and schedulers know nothing."""
    made._optimizer_step_pre_hooks, made._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    type(made).step(made)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of an optimizer, in their order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def loss_of(args: tuple, kwargs: dict) -> Callable | None:
    """Run the closure of a step, which computes the gradients, if it has one; return one that gives the same loss."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    return lambda: loss


def local(parameter: nn.Parameter) -> torch.Tensor:
    """Return the part of a parameter that is here, with the same part of its gradient."""
    if not isinstance(parameter, DTensor):
        return parameter
    part = _torch.local_of(parameter).detach()
    if parameter.grad is not None:
        gradient = local_gradient(parameter)
        part.grad = gradient.detach() if gradient.requires_grad else gradient
    return part


def local_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return the part of a DTensor parameter's gradient that belongs to the part of the parameter that is here."""
    gradient: Any = parameter.grad
    if gradient.placements != parameter.placements:  # not reduced yet
        gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
    return _torch.local_of(gradient)


def written_to(parameters: list) -> None:
    """Let what still needs the former values of parameters notice, though their local parts alone were written to."""
    torch.autograd.graph.increment_version(parameters)


def local_value(value: Any) -> Any:
    """Return this rank's part of a DTensor, any other value as it is."""
    return _torch.local_of(value) if isinstance(value, DTensor) else value


@dataclass(frozen=True)
class Place:
    """The location of a parameter: its module, and its name there."""

    module: Any
    name: str

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return what this rank has of a tensor like the parameter."""
        stage = self.module.stage_mesh
        return local_part(whole, self.module.layouts[self.name], stage.mesh, stage.coordinate).contiguous()


def places_of(modules: Sequence[Any]) -> dict[int, Place]:
    """Return the places of the parameters of modules, by id."""
    return {id(p): Place(module, name) for module in modules for name, p in module.named_parameters()}


def is_like(key: str, value: Any, parameter: torch.Tensor) -> bool:
    """Return whether a value of a parameter's state has a number for each of its elements."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and key not in SCALARS


def give_back_of(state: dict, parameter: nn.Parameter, found: dict, kept: torch.dtype | None = None) -> None:
    """Give the state `found` of a parameter's local part back to the parameter's, as DTensors like the parameter; what
    is like a parameter is kept in a type of its own if there is one."""
    here = local_value(parameter)
    for key, value in found.items():
        if local_value(state.get(key)) is value:
            continue
        if not is_like(key, value, here) or not isinstance(parameter, DTensor):
            state[key] = value
        else:
            state[key] = like(parameter, value if kept is None else _rounded(value, kept))


def _rounded(value: torch.Tensor, kept: torch.dtype) -> torch.Tensor:
    is_wider = value.is_floating_point() and value.dtype.itemsize > kept.itemsize
    return value.to(kept) if is_wider else value


def like(parameter: DTensor, part: torch.Tensor) -> DTensor:
    """Return the tensor that has this local part, in the layout of a parameter."""
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
