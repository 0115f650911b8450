"""`state_dtype="bf16"`: an optimizer's tensors are kept in bfloat16 from step to step, and computed with in the type of
their parameters.

A step widens the state of some parameters, updates them, and rounds their new state to the nearest number, before it
goes on to the next ones; so no more than MOST_ELEMENTS are wide at once, or one parameter's. What it computes is what
one device computes that rounds the state after each step.

A moment that decays by less than 2**-9 of itself in a step is rounded back to what it was: with AdamW's usual beta2 of
0.999 the mean of the squares never falls. Optimizers that ask for that are warned once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import nn
from torch.optim import Optimizer

from .stand_in import give_back_of, idle, is_like, local, local_value, loss_of, stand_in, step_alone

MOST_ELEMENTS = 2**22
SMALLEST_DECAY = 2.0**-9  # of which bfloat16 has numbers between a value and the value less that share


def step_narrow(optimizer: Optimizer, kept: torch.dtype, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Update all parameters; return the arguments of a step of a stand-in, for which nothing is left to do."""
    known = loss_of(args, kwargs)
    for group in optimizer.param_groups:
        for some in _cut([p for p in group["params"] if p.grad is not None]):
            made = stand_in(optimizer, [group | {"params": [local(p) for p in some]}])
            for parameter, part in zip(some, made.param_groups[0]["params"]):
                if parameter in optimizer.state:
                    made.state[part] = widened(optimizer.state[parameter], part)
            step_alone(made)
            for parameter, part in zip(some, made.param_groups[0]["params"]):
                if part in made.state:
                    give_back_of(optimizer.state[parameter], parameter, made.state[part], kept)
    return (idle(optimizer), known), {}


def widened(state: dict, part: torch.Tensor) -> dict:
    """Return the state of a parameter's local part, with what is like the part in its type, if that is wider."""
    found = {key: local_value(value) for key, value in state.items()}
    return {
        key: value.to(part.dtype) if is_like(key, value, part) and _is_narrower(value, part) else value
        for key, value in found.items()
    }


def _is_narrower(value: torch.Tensor, part: torch.Tensor) -> bool:
    return value.is_floating_point() and value.dtype.itemsize < part.dtype.itemsize


def _cut(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Iterate over runs of parameters that have MOST_ELEMENTS here together, or are one."""
    some: list[nn.Parameter] = []
    elements = 0
    for parameter in parameters:
        here = local_value(parameter).numel()
        if some and elements + here > MOST_ELEMENTS:
            yield some
            some, elements = [], 0
        some.append(parameter)
        elements += here
    if some:
        yield some


def warn_of_decay(optimizer: Optimizer, kept: torch.dtype) -> None:
    """Warn of means that never fall in a narrow type, because they decay too slowly."""
    slow = sorted(
        {
            beta
            for group in optimizer.param_groups
            for beta in group.get("betas", ())
            if 0 < 1 - float(beta) < SMALLEST_DECAY
        }
    )
    if slow:
        warnings.warn(
            f"{type(optimizer).__name__} with betas of {', '.join(f'{b:g}' for b in slow)} decays by less in a step "
            f"than {kept} can tell: what is kept in it never falls. fix: a beta2 of 0.95, as language models are often "
            f"trained with, or no state_dtype",
            stacklevel=2,
        )
