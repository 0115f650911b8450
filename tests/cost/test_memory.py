"""Bytes of a parameter's state, by optimizer and types."""

import pytest

from autopar.cost.memory import Optimizer, StateBytes
from autopar.errors import StrategyError


@pytest.mark.parametrize(("optimizer", "master", "copy", "trained", "frozen"), [
    ("adamw", 4, 0, 16, 4), ("adam", 4, 0, 16, 4), ("sgd", 4, 0, 8, 4), ("sgd_momentum", 4, 0, 12, 4),
    ("none", 4, 0, 8, 4), ("adamw", 4, 2, 18, 6), ("sgd", 4, 2, 10, 6), ("adamw", 8, 0, 32, 8),
    ("sgd_momentum", 8, 0, 24, 8), ("adamw", 2, 0, 8, 2),
])  # fmt: skip
def test_resident_bytes(optimizer, master, copy, trained, frozen):
    state = StateBytes.of(Optimizer.of(optimizer), master, copy)
    assert state.resident(trainable=True) + state.copy + state.gradient == trained
    assert state.resident(trainable=False) + state.copy == frozen


@pytest.mark.parametrize("optimizer", ["adamx", "", "AdamW"])
def test_unknown_names(optimizer):
    with pytest.raises(StrategyError, match="is known") as error:
        Optimizer.of(optimizer)
    assert "adamw" in error.value.fix
