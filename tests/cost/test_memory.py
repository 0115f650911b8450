"""Bytes of a parameter's state, by optimizer and precision."""

import pytest

from autopar.cost.memory import StateBytes
from autopar.errors import StrategyError


@pytest.mark.parametrize(("optimizer", "precision", "trained", "frozen"), [
    ("adamw", "fp32", 16, 4), ("adam", "fp32", 16, 4), ("sgd", "fp32", 8, 4), ("sgd_momentum", "fp32", 12, 4),
    ("none", "fp32", 8, 4), ("adamw", "bf16", 18, 2), ("sgd", "bf16", 10, 2), ("adamw", "fp64", 32, 8),
    ("sgd_momentum", "fp64", 24, 8),
])  # fmt: skip
def test_resident_bytes(optimizer, precision, trained, frozen):
    state = StateBytes.of(optimizer, precision)
    assert state.resident(trainable=True) == state.master + state.copy + state.gradient + state.optimizer == trained
    assert state.resident(trainable=False) == frozen


@pytest.mark.parametrize(("optimizer", "precision"), [("adamx", "fp32"), ("adamw", "fp8"), ("", "fp32"), ("AdamW", "fp32")])
def test_unknown_names(optimizer, precision):
    with pytest.raises(StrategyError, match="is known") as error:
        StateBytes.of(optimizer, precision)
    assert "adamw" in error.value.fix or "bf16" in error.value.fix
