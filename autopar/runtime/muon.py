"""torch.optim.Muon on the parameters of compiled modules, in any layout.

Momentum is by element, on local parts. What is orthogonalized is a whole matrix: the update is gathered in bfloat16, in
which torch computes it, each rank that has parts of the matrix orthogonalizes all of it, and adds its part.

A group of parameters may say `parts`, for each dim how many equal parts it has, or their sizes; each part is then
orthogonalized alone, with the learning rate of a matrix of its own shape. (3, 1) are a fused q, k and v, (12, 1) twelve
heads in the rows, ([512, 128, 128], 1) parts of different sizes:

    torch.optim.Muon([{"params": fused, "parts": (3, 1)}, {"params": others}], lr=0.02)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Muon, Optimizer

from ..errors import OptimizerError
from .stand_in import Place, idle, like, local, local_value, loss_of, places_of, stand_in, step_alone

PARTS = "parts"
MOMENTUM = "momentum_buffer"  # as torch calls it


def check_parts(optimizer: Muon) -> None:
    """Raise OptimizerError for parts that are not those of their parameters."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if PARTS in group else ():
            _ranges(tuple(parameter.shape), group[PARTS])


def step_muon(optimizer: Muon, modules: Sequence[Any], args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Update all parameters; return the arguments of a step of a stand-in, for which nothing is left to do."""
    known, places = loss_of(args, kwargs), places_of(modules)
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(optimizer, group, parameter, places.get(id(parameter)))
    return (idle(optimizer), known), {}


def _update(optimizer: Optimizer, group: dict, parameter: nn.Parameter, place: Place | None) -> None:
    part, state = local(parameter), optimizer.state[parameter]
    gradient: Any = part.grad
    if MOMENTUM not in state:
        zeros = torch.zeros_like(gradient)
        state[MOMENTUM] = like(parameter, zeros) if isinstance(parameter, DTensor) else zeros
    momentum = local_value(state[MOMENTUM])
    momentum.lerp_(gradient, 1 - group["momentum"])
    update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
    step = _whole_step(optimizer, group, parameter, update.bfloat16())
    part.mul_(1 - float(group["lr"]) * group["weight_decay"])
    part.add_(step if place is None else place.part_of(step))


def _whole_step(optimizer: Optimizer, group: dict, parameter: nn.Parameter, update: Tensor) -> Tensor:
    """Return what is to be added to the whole of a parameter, by torch's own step on zeros with an update's parts as
    gradients. `update`: the local part."""
    whole = like(parameter, update).full_tensor() if isinstance(parameter, DTensor) else update
    zeros = torch.zeros(whole.shape, dtype=parameter.dtype, device=whole.device)
    parts = []
    for where in _ranges(tuple(whole.shape), group.get(PARTS, (1, 1))):
        one = zeros[where]
        one.grad = whole[where].to(one.dtype)
        parts.append(one)
    made = stand_in(optimizer, [group | {"params": parts, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}])
    step_alone(made)
    return zeros


def _ranges(shape: tuple[int, ...], parts: Any) -> list[tuple[slice, ...]]:
    """Return where the parts of a matrix are. Raise OptimizerError if it has none such."""
    try:
        counted = [_sizes(size, one) for size, one in zip(shape, parts, strict=True)]
    except (TypeError, ValueError) as error:
        raise OptimizerError(
            f"a parameter of shape {shape} has no parts {parts!r}: {error}",
            fix='for each dim a number of equal parts, or their sizes: "parts": (3, 1), or ([512, 128, 128], 1)',
        ) from None
    ends = [list(itertools.accumulate(sizes, initial=0)) for sizes in counted]
    return [
        tuple(slice(a, b) for a, b in where)
        for where in itertools.product(*(itertools.pairwise(each) for each in ends))
    ]


def _sizes(size: int, one: int | Sequence[int]) -> list[int]:
    sizes = [size // one] * one if isinstance(one, int) and one > 0 else list(one)  # type: ignore[arg-type]
    if sum(sizes) != size or min(sizes) < 1:
        raise ValueError(f"{one} do not add up to {size}")
    return sizes
