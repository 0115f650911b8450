"""Comparison of a compiled model with the unsharded one, for tests in one process and in several."""

from __future__ import annotations

import copy

import torch
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.ir.mesh import Mesh
from tests.helpers import kept


def device_mesh(text: str):
    mesh = Mesh.parse(text)
    return init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)


def planned(model, mesh: str, inputs, **options) -> autopar.Plan:
    """A plan without the expert strategies, which take most of the time, of a call that is traced once."""
    return kept.plan(model, mesh, inputs, hardware="cpu-gloo", baselines=False, **options)


def pair(model, mesh, example, /, **options):
    """(compiled, an independent copy of the model)."""
    reference = copy.deepcopy(model)
    return autopar.compile(model, mesh, example, **options), reference


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(model, batch, steps: int, lr: float = 1e-2, optimizer=None) -> list[float]:
    """The losses of so many steps of AdamW over what trains, all on one batch."""
    optimizer, losses = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr), []
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_close(mine, whole, what: str = "", tolerance: float = 1e-5) -> None:
    """Relative to the largest element, since sums in another order differ by rounding of their terms."""
    mine, whole = full(mine).detach(), whole.detach()
    assert mine.shape == whole.shape and mine.dtype == whole.dtype, what
    error, scale = (mine - whole).abs().max().item(), whole.abs().max().item()
    assert error <= tolerance * max(scale, 1e-3), f"{what}: {error} of {scale}"


def assert_same_gradients(parallel, reference, tolerance: float = 1e-5) -> None:
    mine, whole = dict(parallel.named_parameters()), dict(reference.named_parameters())
    assert list(mine) == list(whole)
    for name, parameter in whole.items():
        assert (mine[name].grad is None) == (parameter.grad is None), name
        if parameter.grad is not None:
            assert mine[name].grad.placements == mine[name].placements, name
            assert_close(mine[name].grad, parameter.grad, name, tolerance)


def assert_same_values(parallel, reference, tolerance: float = 1e-5) -> None:
    for name, parameter in reference.named_parameters():
        assert_close(dict(parallel.named_parameters())[name], parameter, name, tolerance)


def check_programs(makes, mesh: str, tolerance: float = 1e-5) -> None:
    """Compare loss and gradients of data-parallel models with the unsharded ones, on every rank of `mesh`.

    Each of `makes` returns (a model whose call gives a loss, its inputs)."""
    for make in makes:
        model, inputs = make()
        mine, whole = pair(model, device_mesh(mesh), inputs, strategy="ddp")
        losses = [m(**inputs) for m in (mine, whole)]
        assert_close(*losses)
        for loss in losses:
            loss.backward()
        assert_same_gradients(mine, whole, tolerance=tolerance)
