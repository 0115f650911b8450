"""Steps of a compiled model, and simulated ones, beside those of the model itself."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from autopar.frontend.export import Captured
from autopar.plans.plan import Plan
from autopar.simulate.oracle import global_values, relative_error
from autopar.simulate.step import simulate_step


def assert_same_gradients(parallel: nn.Module, reference: nn.Module, batches: Iterable[tuple], exact: float) -> None:
    """After a backward of each of some batches, whose losses the models return, all gradients are the model's own."""
    for given in batches:
        parallel(*given).backward()
        reference(*given).backward()
    wanted = dict(reference.named_parameters())
    for name, parameter in parallel.named_parameters():
        assert relative_error(parameter.grad.full_tensor(), wanted[name].grad) <= exact, name


def assert_step_like_eager(captured: Captured, plan: Plan, model: nn.Module, inputs) -> None:
    """Simulate a step in fp64: its loss and all gradients are the model's own."""
    step = simulate_step(captured, plan, global_values(captured, model, inputs))
    found = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    loss = getattr(found, "loss", found)
    model.zero_grad()
    loss.backward()
    torch.testing.assert_close(step.loss, loss.detach(), rtol=1e-12, atol=1e-12)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(step.gradients[name], parameter.grad, rtol=1e-10, atol=1e-12)
