"""Tests of which checkpoints a folder keeps, which one is the newest, and of files that no save wrote."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

import autopar
from autopar.errors import CheckpointCorrupt, CheckpointError
from tests.helpers import gloo
from tests.runtime.parity import device_mesh, full

from .test_checkpoint import names_of, regressor


@pytest.fixture(scope="module")
def model(alone):
    return regressor(alone)


def test_old_ones(model, tmp_path):
    """The one that was saved last first, whatever its step; pruned, replaced by one of the same step."""
    for step in (9, 10, 100000000, 11):
        autopar.save_checkpoint(tmp_path, model, step=step)
    assert autopar.latest_checkpoint(tmp_path).name == "step-00000011"
    (tmp_path / "step-00000012").mkdir()  # a save that did not end
    path = autopar.save_checkpoint(tmp_path, model, step=10, data="again", keep=2)
    assert path.is_dir() and names_of(tmp_path) == ["step-00000010", "step-00000011"]
    autopar.save_checkpoint(tmp_path, model, step=11, data="again")
    assert autopar.load_checkpoint(tmp_path, model).data == "again"
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        autopar.load_checkpoint(tmp_path / "step-00000012", model)


def test_a_later_run_in_the_folder_of_an_earlier_one(alone, tmp_path):
    """Checkpoints of the earlier run stay, and the newest one is what was just saved."""
    earlier, later = regressor(alone), regressor(alone)
    autopar.save_checkpoint(tmp_path, earlier, step=90)
    autopar.save_checkpoint(tmp_path, earlier, step=100)
    for step in (10, 20, 30):
        path = autopar.save_checkpoint(tmp_path, later, step=step, keep=1)
        assert autopar.latest_checkpoint(tmp_path) == path
        assert names_of(tmp_path) == [f"step-{step:08d}", "step-00000090", "step-00000100"]
    first, second = (
        autopar.load_checkpoint(tmp_path / name, regressor(alone)) for name in ("step-00000090", "step-00000030")
    )
    assert first.run != second.run and "" not in (first.run, second.run) and first.saved <= second.saved


def test_back_to_an_older_checkpoint(alone, tmp_path):
    """The run goes on from there: what it saves is the newest, and takes the places of what it saved before."""
    model = regressor(alone)
    for step in (50, 60, 70):
        autopar.save_checkpoint(tmp_path, model, step=step)
    run = autopar.load_checkpoint(tmp_path / "step-00000070", model).run
    again = regressor(alone)
    autopar.load_checkpoint(tmp_path / "step-00000050", again)
    autopar.save_checkpoint(tmp_path, again, step=55, keep=3)
    assert names_of(tmp_path) == ["step-00000055", "step-00000060", "step-00000070"]
    autopar.save_checkpoint(tmp_path, again, step=60, keep=2)
    assert names_of(tmp_path) == ["step-00000055", "step-00000060"]
    loaded = autopar.load_checkpoint(tmp_path, regressor(alone))
    assert (loaded.step, loaded.run) == (60, run)


@pytest.mark.parametrize("keep", [0, -1, 2.0, "2", True])
def test_numbers_that_are_none(model, tmp_path, keep):
    with pytest.raises(CheckpointError, match=f"keep is {keep!r}"):
        autopar.save_checkpoint(tmp_path, model, step=1, keep=keep)
    if keep != 0:
        with pytest.raises(CheckpointError, match=f"step is {keep!r}"):
            autopar.save_checkpoint(tmp_path, model, step=keep)
    assert not any(tmp_path.iterdir())


def test_a_root_that_is_named_like_a_checkpoint(model, tmp_path):
    root = tmp_path / "step-1-pretraining"
    path = autopar.save_checkpoint(root, model, step=3)
    assert autopar.latest_checkpoint(root) == path == autopar.load_checkpoint(root, model).path


@pytest.mark.parametrize(
    "name", ["model/model.safetensors.index.json", "optimizer-00001-of-00002.safetensors", "notes.txt"]
)
def test_files_that_nobody_saved(model, tmp_path, name):
    path = autopar.save_checkpoint(tmp_path, model, step=1)
    (path / name).write_bytes((path / "model" / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointCorrupt, match=f"^{name} of .* was not written by the save"):
        autopar.load_checkpoint(tmp_path, model)
    (path / name).rename(path / ".hidden")
    autopar.load_checkpoint(tmp_path, model)


def _merged(rank, root):
    """Somebody merged the shards into the file that is read before them, and changed a value."""
    mesh = device_mesh("dp=2")
    model = regressor(mesh)
    path = autopar.save_checkpoint(root, model, step=1)
    before = full(model.up.bias).clone()
    if rank == 0:
        tensors = {
            name: value for shard in path.glob("model/model-*.safetensors") for name, value in load_file(shard).items()
        }
        assert len(tensors) == 4
        save_file(tensors | {"up.bias": tensors["up.bias"] + 777}, path / "model" / "model.safetensors")
    with pytest.raises(CheckpointCorrupt, match="model/model.safetensors of .* was not written by the save"):
        autopar.load_checkpoint(root, model)
    assert torch.equal(full(model.up.bias), before)


@pytest.mark.gloo
def test_shards_that_were_merged(tmp_path):
    gloo.run(2, _merged, str(tmp_path))
