"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import errno
import os
import threading

import pytest
import torch

import autopar
from autopar.errors import CheckpointError
from autopar.storage import tensor_file
from tests.helpers import gloo
from tests.runtime.parity import device_mesh

from .test_checkpoint import names_of, regressor, same, state_of, take_steps


def test_what_is_saved_is_what_was_there_at_the_call(alone, tmp_path, monkeypatch):
    """Parameters change while they are written."""
    model = regressor(alone)
    optimizer = torch.optim.AdamW(model.parameters())
    take_steps(model, optimizer)
    go, write = threading.Event(), tensor_file.FileForLater.write
    monkeypatch.setattr(tensor_file.FileForLater, "write", lambda file: go.wait(30) and write(file))
    saved = state_of(model, optimizer)
    path = autopar.save_checkpoint(tmp_path, model, optimizer, step=2, wait=False)
    take_steps(model, optimizer)
    assert not path.exists() and autopar.latest_checkpoint(tmp_path) is None
    go.set()
    autopar.finish_checkpoint()
    assert names_of(tmp_path) == [path.name] and not [*path.glob(".*")]
    again = torch.optim.AdamW(model.parameters())
    assert autopar.load_checkpoint(tmp_path, model, again).step == 2 and same(state_of(model, again), saved)
    kept = autopar.save_checkpoint(tmp_path, model, again, step=3, keep=1, wait=False)
    assert autopar.load_checkpoint(tmp_path, model, again).path == kept and names_of(tmp_path) == [kept.name]


def _full_disk(rank: int, folder: str, victim: int | None) -> tuple[str, list[str]]:
    model = regressor(device_mesh("dp=2"))
    optimizer = torch.optim.AdamW(model.parameters())
    take_steps(model, optimizer)
    autopar.save_checkpoint(folder, model, optimizer, step=1, wait=False)
    autopar.finish_checkpoint()
    write = os.write

    def full(file, data):
        if threading.current_thread().name == "autopar checkpoint":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    if rank == victim:
        os.write = full
    try:
        autopar.save_checkpoint(folder, model, optimizer, step=2, wait=False)
        take_steps(model, optimizer)
        autopar.finish_checkpoint()
    except CheckpointError as error:
        os.write = write
        said, before = str(error), state_of(model, optimizer)
        assert autopar.load_checkpoint(folder, model, optimizer).step == 1
        assert not same(state_of(model, optimizer), before)
        return said, sorted(os.listdir(folder))
    return "saved", sorted(os.listdir(folder))


@pytest.mark.gloo
@pytest.mark.parametrize("victim", [1, *(pytest.param(rank, marks=pytest.mark.slow) for rank in (0, None))])
def test_a_rank_that_cannot_write(victim, tmp_path):
    """All ranks hear of it where they meet next, and the checkpoint before stays."""
    for said, left in gloo.run(2, _full_disk, str(tmp_path), victim):
        if victim is None:
            assert said == "saved" and left == ["step-00000001", "step-00000002"]
        else:
            assert ("No space left" in said or "rank 1 did not write its part" in said) and left == ["step-00000001"]
