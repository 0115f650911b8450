"""On real processes: dropout draws what one device draws, and mixed precision trains fp32 masters."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar import compiler
from autopar.simulate.oracle import global_values, one_device_step
from tests.helpers import gloo

from . import tiny
from .parity import assert_close, device_mesh, planned

DROPPED = dict(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, n_layer=1)
STEPS = 2


def _one_device(precision: str) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Loss and gradients of each step of SGD on one device, from the seed 7."""
    model, batch = tiny.gpt2(**DROPPED)
    captured = compiler.trace(model.train(), batch, precision=precision)
    optimizer, results = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(STEPS):
        values = global_values(captured, model, batch) | {"r_state": torch.tensor([7, step])}
        outputs, gradients, _ = one_device_step(captured, values)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].clone()
        results.append((outputs[0].item(), gradients))
        optimizer.step()
    return results


def _train(rank: int, precision: str, plan, expected) -> int:
    """Steps of SGD as on one device; how many forwards drew random numbers."""
    model, batch = tiny.gpt2(**DROPPED)
    torch.manual_seed(7 + rank)  # rank 0's counts
    parallel = autopar.compile(model.train(), device_mesh("dp=2"), batch, plan=plan, precision=precision)
    assert parallel.random.seed == 7
    generator = torch.get_rng_state()
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    tolerance = 1e-5 if precision == "fp32" else 3e-2
    for loss, gradients in expected:
        mine = parallel(**batch).loss
        mine.backward()
        assert abs(mine.item() - loss) <= tolerance * loss and mine.dtype == torch.float32
        for name, parameter in parallel.named_parameters():
            assert parameter.dtype == parameter.grad.dtype == torch.float32
            assert_close(parameter.grad, gradients[name], name, 10 * tolerance if precision == "fp32" else 0.1)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(torch.get_rng_state(), generator)
    return parallel.random.offset


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_training(precision):
    model, batch = tiny.gpt2(**DROPPED)
    plan = planned(model.train(), "dp=2", batch, strategy="fsdp", precision=precision)
    assert gloo.run(2, _train, precision, plan, _one_device(precision), seconds=240) == [STEPS] * 2
