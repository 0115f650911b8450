"""Tests of whether a folder has room, is the same on all ranks, and which of its checkpoints is loaded."""

from __future__ import annotations

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch

import autopar
from autopar.errors import CheckpointCorrupt, CheckpointError, InputError
from autopar.storage import checkpoint_folder, manifest
from tests.helpers import gloo
from tests.runtime.parity import device_mesh

from .test_checkpoint import names_of, regressor

Disk = namedtuple("Disk", "total used free")


def test_room_is_looked_for_before_anything_is_written(alone, tmp_path, monkeypatch):
    model = regressor(alone)
    bytes_ = sum(p.numel() * p.element_size() for p in model.parameters())
    first = autopar.save_checkpoint(tmp_path, model, step=1)
    monkeypatch.setattr(checkpoint_folder, "SPARE_BYTES", 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(1 << 30, 1 << 29, bytes_ - 1))
    with pytest.raises(CheckpointError, match="a checkpoint takes .* and .* has .* left"):
        autopar.save_checkpoint(tmp_path, model, step=2)
    assert names_of(tmp_path) == [first.name]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(1 << 30, 1 << 29, bytes_))
    autopar.save_checkpoint(tmp_path, model, step=2)


def test_damaged_ones_are_passed_over(alone, tmp_path):
    model = regressor(alone)
    whole, cut, changed = (autopar.save_checkpoint(tmp_path, model, step=step) for step in (1, 2, 3))
    (cut / "state.json").write_text("{")
    (changed / "manifest.json").write_text("{}")
    with pytest.warns(UserWarning, match="the checkpoint before it is loaded") as warned:
        assert autopar.load_checkpoint(tmp_path, model).path == whole
    assert [str(changed) in str(warned[0].message), str(cut) in str(warned[1].message)] == [True, True]
    with pytest.raises(CheckpointCorrupt, match="state.json"):
        autopar.load_checkpoint(cut, model)
    (whole / "state.json").unlink()
    with pytest.warns(UserWarning), pytest.raises(CheckpointCorrupt, match="state.json .* is missing"):
        autopar.load_checkpoint(tmp_path, model)


@pytest.mark.parametrize(("code", "said"), [
    (errno.EACCES, "cannot be read: Permission denied"), (errno.EIO, "cannot be read: Input/output error"),
    (errno.ENOENT, "is missing"),
])  # fmt: skip
def test_a_file_that_cannot_be_read_is_not_said_to_be_missing(code, said, alone, tmp_path, monkeypatch):
    def fails(path):
        raise OSError(code, os.strerror(code))

    model = regressor(alone)
    path = autopar.save_checkpoint(tmp_path, model, step=1)
    monkeypatch.setattr(manifest, "digest_of", fails)
    with pytest.raises(CheckpointCorrupt, match=f"model.* of {path} {said}"):
        autopar.load_checkpoint(path, model)


def _otherwise(rank: int, folder: str) -> str:
    """Save what the other rank does not."""
    model = regressor(device_mesh("dp=2"))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(InputError) as caught:
        autopar.save_checkpoint(folder, model, optimizer if rank else None, step=1)
    return str(caught.value)


@pytest.mark.gloo
def test_ranks_that_save_otherwise(tmp_path):
    """They do not wait for each other in collectives that the other does not make."""
    for said in gloo.run(2, _otherwise, str(tmp_path), seconds=60):
        assert "save_checkpoint(step=1, keep=None, optimizer)" in said and "save the same on every rank" in said
    assert not any(tmp_path.iterdir())


def _own_disks(rank: int, folder: str) -> str:
    checkpoint_folder.SEEN_SECONDS = 0.1
    for number in range(2):
        try:
            checkpoint_folder.check_shared(Path(folder, str(rank if number else "shared")))
        except CheckpointError as error:
            return str(error)
    return ""


@pytest.mark.gloo
def test_ranks_with_disks_of_their_own(tmp_path):
    for said in gloo.run(3, _own_disks, str(tmp_path)):
        assert "of ranks 1, 2 is another folder than that of rank 0" in said and "all machines share" in said
    assert not any((tmp_path / "shared").iterdir())
