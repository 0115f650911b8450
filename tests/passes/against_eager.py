"""A captured step on one device against the same step of the model in eager torch, writes to parameters and buffers
included."""

from __future__ import annotations

import copy

import torch
from torch import nn

from autopar import compiler
from autopar._torch.regions import grad_switch
from autopar.frontend.export import Captured
from autopar.simulate.oracle import global_values, one_device_step


def assert_as_eager(model: nn.Module, *args, tolerance: float = 1e-6, **options) -> Captured:
    """Outputs, new values and gradients of `model(*args)`; a gradient that eager torch does not compute may be zero.
    Gradients are those of the sum of the outputs. Returns the capture."""
    captured = compiler.trace(model, args, **options)
    assert torch.is_grad_enabled() and all(grad_switch(n) is None for n in captured.graph.nodes)
    found = one_device_step(captured, global_values(captured, model, args))
    eager = copy.deepcopy(model)
    outputs = eager(*args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum(o.sum() for o in outputs if o.requires_grad).backward()
    close = dict(rtol=tolerance, atol=tolerance)
    for mine, wanted in zip(found.outputs, outputs, strict=True):
        torch.testing.assert_close(mine, wanted.detach(), **close)
    for name, parameter in eager.named_parameters():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        mine = found.gradients.get(name, torch.zeros_like(parameter))
        torch.testing.assert_close(mine, wanted, **close, msg=lambda text, n=name: f"gradient of {n}: {text}")
    before = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, value in [*eager.named_parameters(), *eager.named_buffers()]:
        mine = found.buffers.get(name, before[name])
        torch.testing.assert_close(mine, value, **close, msg=lambda text, n=name: f"new value of {n}: {text}")
    return captured
