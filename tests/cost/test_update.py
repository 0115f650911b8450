"""The optimizer's update goes through memory: 28 bytes an element for AdamW."""

import pytest

from autopar.cost.memory import Optimizer, StateBytes
from autopar.cost.update import UpdateCost
from autopar.hardware.profile import load
from autopar.models import registry
from tests.helpers import kept


@pytest.mark.parametrize("optimizer, bytes_", [("adamw", 28), ("sgd", 12), ("sgd_momentum", 20), ("none", 0)])
def test_bytes_of_an_element(optimizer, bytes_):
    """Read: gradient, parameter and state; written: parameter and state."""
    state = StateBytes.of(Optimizer.of(optimizer), 4, 2)
    assert (state.updated(True), state.updated(False)) == (bytes_, 0)
    assert UpdateCost(1e9, 2).pass_seconds(1e6, state, True) == pytest.approx(bytes_ * 1e6 / 1e9 / 2)


@pytest.mark.parametrize("optimizer, held, moved", [("adamw", 4, 52), ("sgd_momentum", 2, 32), ("sgd", 0, 12)])
def test_bytes_of_narrow_state(optimizer, held, moved):
    """Two bytes a tensor are kept; they are read and written wide, and each cast reads one type and writes the other.
    State of a type as narrow costs what it did."""
    one = Optimizer.of(optimizer, 2)
    state = StateBytes.of(one, 4, 0)
    assert (state.optimizer, state.updated(True), state.updated(False)) == (held, moved, 0)
    assert StateBytes.of(one, 2, 0) == StateBytes.of(Optimizer.of(optimizer), 2, 0)


def update_seconds(strategy: str, micro_batches: int = 1, **options) -> float:
    model, inputs = registry.build("gpt2-tiny:layers=1", batch=8, seq=64, device="meta")
    options |= dict(strategy=strategy, micro_batches=micro_batches, hardware="h100", baselines=False)
    return kept.plan(model, "dp=4", inputs, **options).update_seconds


def test_zero_shares_the_update():
    """Under DDP every device updates all parameters, under ZeRO-1 a quarter of them; once a step of any passes."""
    model, _ = registry.build("gpt2-tiny:layers=1", batch=8, seq=64, device="meta")
    elements = sum(p.numel() for p in model.parameters())
    hardware = load("h100")
    whole = 28 * elements / hardware.reached_memory_bytes_per_second
    assert update_seconds("ddp") == pytest.approx(whole) == pytest.approx(update_seconds("ddp", 2))
    assert update_seconds("zero1") == pytest.approx(whole / 4, rel=0.05)
    assert update_seconds("ddp", optimizer="none") == 0
    assert update_seconds("ddp", state_dtype="bf16") == pytest.approx(52 / 28 * whole)
