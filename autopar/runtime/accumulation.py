"""Gradients that wait for their reduction, in the `.grad` of their parameters.

Inside `no_sync` the gradient of a parameter is a DTensor that is Partial: each rank has the sum of its own
micro-batches. Such a gradient is as true as a reduced one. `zero_grad` drops it, `full_tensor()` shows it, and DTensor
reduces it for whoever reads it. The next backward outside of `no_sync` adds its own part and reduces the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .. import _torch
from ..ir.layout import Layout, local_part, local_shape
from ..ir.mesh import Mesh

Takers = Mapping[str, tuple[nn.Parameter, object]]  # parameters by name, and what autograd does with gradients next
Locals = dict[str, torch.Tensor]  # local gradients by parameter


def is_unreduced(gradient: torch.Tensor | None) -> bool:
    """Return whether a gradient is a DTensor that is Partial over some axis."""
    return isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements)


class Accumulation:
    """The state that the backward passes of a module share. `is_deferring`: inside no_sync. `is_pending`: some `.grad`
    may be unreduced. `layouts` are the parameters' by name."""

    def __init__(self, module: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh, coordinate: Mapping[str, int]):
        self.module, self.layouts, self.mesh, self.coordinate = module, layouts, mesh, coordinate
        self.is_deferring = self.is_pending = False

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Let backward passes inside leave gradients unreduced; restore the former state at the end."""
        before, self.is_deferring = self.is_deferring, True
        try:
            yield
        finally:
            self.is_deferring = before

    def leave(self, takers: Takers, specs: Mapping[str, object]) -> None:
        """Prepare `.grad` for gradients that are added to it unreduced, with the DTensor `specs` if they are Partial:
        what is there of a call that leaves it in another layout is reduced."""
        for name, (parameter, node) in takers.items():
            old = parameter.grad
            if is_unreduced(old) and old._spec != specs.get(name) and _torch.accumulates(node):
                self.reduce(name, parameter)
        self.is_pending = True

    def take(self, takers: Takers, specs: Mapping[str, object]) -> Locals:
        """Take the unreduced gradients with these specs out of `.grad`, where the backward that runs now adds to it,
        and return their local values by name."""
        taken = {}
        for name, spec in specs.items():
            parameter, node = takers[name]
            if isinstance(parameter.grad, DTensor) and parameter.grad._spec == spec and _torch.accumulates(node):
                taken[name], parameter.grad = _torch.local_of(parameter.grad), None
        return taken

    def bytes_of(self, layouts: Mapping[str, Layout], specs: Mapping[str, Any]) -> int:
        """Return the bytes of this rank's gradients in some layouts, of parameters with the DTensor `specs`."""
        shapes = {name: local_shape(specs[name].shape, x, self.mesh, self.coordinate) for name, x in layouts.items()}
        return sum(math.prod(shape) * specs[name].tensor_meta.dtype.itemsize for name, shape in shapes.items())

    def reduce(self, name: str, parameter: nn.Parameter) -> None:
        """Reduce one `.grad` now, on its own, where no graph does it."""
        whole = parameter.grad.full_tensor()
        local = local_part(whole, self.layouts[name], self.mesh, self.coordinate).clone()
        parameter.grad = _torch.as_dtensor(local, parameter._spec)

    def reduce_rest(self) -> None:
        """Reduce what is left after a backward that reduces: the `.grad` of parameters that it has no gradient for."""
        for name, parameter in self.module.named_parameters():
            if is_unreduced(parameter.grad):
                self.reduce(name, parameter)
        self.is_pending = False


class ParameterGradients:
    """Gives autograd the gradients of the parameters `names`, as DTensors with their `specs`."""

    def __init__(self, names: Sequence[str], specs: Sequence, accumulation: Accumulation):
        self.names, self.specs, self.accumulation = names, specs, accumulation

    def __call__(
        self,
        parameters: Sequence,
        nodes: Sequence,
        unreduced: Mapping[str, object],
        make: Callable[[bool, Locals], Locals],
    ) -> list[torch.Tensor | None]:
        """Return the gradients of one backward, None for a parameter without one. `nodes`: what autograd does next with
        those of the `parameters`; `unreduced`: specs of those that can wait for their reduction, as they do inside of
        no_sync. `make(waits, taken)` returns them by name, not yet reduced if it `waits`, else together with what
        earlier backwards left unreduced, which is `taken` out of `.grad`; it empties `taken`."""
        accumulation, specs = self.accumulation, unreduced if self.accumulation.is_deferring else {}
        if accumulation.is_deferring:
            found, takers = make(True, {}), self._takers(parameters, nodes)
            accumulation.leave({name: takers[name] for name in self.names if name in found}, specs)
        elif accumulation.is_pending and any(map(_torch.accumulates, nodes)):
            found = make(False, accumulation.take(self._takers(parameters, nodes), unreduced))
            accumulation.reduce_rest()
        else:
            found = make(False, {})
        return [  # with the strides of the parameters, as autograd gives them: fused optimizers take them for granted
            _torch.as_dtensor(found[name].contiguous(), specs.get(name, spec)) if name in found else None
            for name, spec in zip(self.names, self.specs)
        ]

    def _takers(self, parameters: Sequence, nodes: Sequence) -> Takers:
        return dict(zip(self.names, zip(parameters, nodes)))
