"""Random states come back."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

import autopar
from autopar.errors import CheckpointCorrupt
from autopar.storage import generators

from .test_checkpoint import regressor


def _draws() -> list[float]:
    return [random.random(), random.gauss(), numpy.random.rand(), numpy.random.randn(), torch.rand(()).item()]


def test_all_generators_go_on(alone, tmp_path):
    model = regressor(alone)
    _draws()  # of a normal number there may be another one left
    path = autopar.save_checkpoint(tmp_path, model, step=1)
    expected = _draws() + _draws()
    autopar.load_checkpoint(path, model)
    assert _draws() + _draws() == expected


def test_a_checkpoint_of_before_has_torch_alone():
    states = {name: state for name, state in generators.states().items() if name == "cpu"}
    generators.check(states)
    before = random.getstate()
    generators.restore(states)
    assert random.getstate() == before


@pytest.mark.parametrize("change", [
    {"cpu": torch.zeros(3, dtype=torch.uint8)}, {"python": torch.zeros(3, dtype=torch.int64)},
    {"numpy": torch.zeros(3, dtype=torch.int64)}, {"numpy normal": torch.zeros(3)},
    {"python": torch.ones(626).long() << 40},
], ids=lambda change: next(iter(change)))  # fmt: skip
def test_what_is_no_state_is_refused(change, alone, tmp_path, monkeypatch):
    model, states = regressor(alone), generators.states() | change
    monkeypatch.setattr(generators, "states", lambda: states)
    path = autopar.save_checkpoint(tmp_path, model, step=1)
    before = [*_states()]
    with pytest.raises(CheckpointCorrupt, match="rng-00000"):
        autopar.load_checkpoint(path, model)
    assert [*_states()] == before


def _states() -> tuple:
    return random.getstate(), numpy.random.get_state()[2], torch.get_rng_state().tolist()
