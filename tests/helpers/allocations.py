"""Memory of a training step of a compiled model, as an allocation tracker sees it."""

from __future__ import annotations

import torch

from autopar.utils.allocation_tracker import Allocations


def training_step(
    module: torch.nn.Module, inputs: dict, optimizer: torch.optim.Optimizer, steps: int = 4
) -> Allocations:
    """That step of a compiled model that held most, after one that makes the optimizer's state: forward, backward and
    update. When a communication library lets go of what it sent differs from step to step. Kinds as in a plan, but for
    all that is saved for the backward, which is "activations" here, gathered parameters too. The global batch is the
    caller's and does not count, the parts of it that the model makes do."""
    found = []
    for _ in range(1 + steps):
        with Allocations() as seen:
            seen.hold_state(module, optimizer)
            seen.leave_out(inputs.values())
            loss = module(**inputs).loss
            seen.hold_rest("activations")
            loss.backward()
            seen.hold("gradients", [p.grad for p in module.parameters() if p.grad is not None])
            optimizer.step()
            optimizer.zero_grad()
        found.append(seen)
        del loss
    return max(found[1:], key=lambda seen: seen.peak_bytes)
