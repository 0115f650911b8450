"""Ranks that remain put together the checkpoint that all would have saved, or there is none."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar.errors import CheckpointError
from autopar.storage import remains
from autopar.storage.checkpoint import load_checkpoint, run_of, save_checkpoint
from autopar.storage.tensor_file import TensorFile
from tests.helpers import gloo
from tests.runtime.parity import device_mesh, full


class Net(nn.Module):
    """Linear layers, of a size that no mesh divides, with dropout, a buffer that each forward changes and a parameter
    that does not train."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(7, 10), nn.BatchNorm1d(10), nn.Linear(10, 3)
        self.down.bias.requires_grad_(False)

    def forward(self, x):
        return self.down(nn.functional.dropout(self.norm(self.up(x)).relu(), 0.2)).square().mean()


CASES = [
    ("dp=2,tp=2", dict(strategy="megatron")), ("dp=3", dict(strategy="zero1")), ("dp=2", dict(strategy="ddp")),
    ("pp=2,dp=2", dict(micro_batches=1)), ("dp=4", dict(strategy="fsdp")), ("dp=2,tp=2", {}),
]  # fmt: skip
DATA = {"position": 5}


def _leave(rank: int, mesh: str, options: dict, folder: Path) -> dict[str, torch.Tensor]:
    """Take a step, save it, begin the next one and leave what there is; return the tensors that the step has made."""
    x = torch.randn(12, 7, generator=torch.Generator().manual_seed(1))
    model = autopar.compile(Net(), device_mesh(mesh), (x,), **options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    noted = remains.noted(model, 1, DATA, scaler, run_of(model))
    save_checkpoint(folder / "saved", model, optimizer, step=1, data=DATA, scaler=scaler)
    torch.rand(3)
    model(x).backward()
    remains.leave(folder / "left", model, optimizer, noted)
    return {} if "pp" in mesh else {name: full(p).detach() for name, p in model.named_parameters()}


def _tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in (*checkpoint.glob("model/*.safetensors"), *checkpoint.glob("optimizer*.safetensors")):
        file = TensorFile(path)
        found |= {f"{path.name[:5]} {name}": file.read(name) for name in file.forms}
    return found


def _is_whole(folders: tuple[Path, ...]) -> bool:
    """Return whether every element of every tensor is with one of some ranks."""
    notes = [json.loads((folder / remains.NOTES).read_text()) for folder in folders]
    names = {key for note in notes for key in note["tensors"]} | {
        f"model/{n}" for note in notes for n in note["elsewhere"]
    }
    for name in names:
        found = None
        for shape, ranges in (note["tensors"][name] for note in notes if name in note["tensors"]):
            found = np.zeros(shape, bool) if found is None else found
            for block in itertools.product(*ranges):
                found[tuple(slice(*ends) for ends in block)] = True
        if found is None or not found.all():
            return False
    return True


@pytest.mark.gloo
@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh, options", CASES, ids=str)
def test_any_ranks_that_remain(mesh, options, tmp_path):
    world = math.prod(int(part.partition("=")[2]) for part in mesh.split(","))
    gloo.run(world, _leave, mesh, options, tmp_path)
    saved, [first] = _tensors(tmp_path / "saved/step-00000001"), (tmp_path / "saved").glob("step-*")
    left, whole = sorted((tmp_path / "left").iterdir()), 0
    for count in range(1, world + 1):
        for some in itertools.combinations(left, count):
            shutil.rmtree(tmp_path / "some", ignore_errors=True)
            for folder in some:
                shutil.copytree(folder, tmp_path / "some" / folder.name)
            if not _is_whole(some):
                with pytest.raises(CheckpointError, match="with lost ranks alone"):
                    remains.put_together(tmp_path / "some", tmp_path / "made")
                continue
            made = remains.put_together(tmp_path / "some", tmp_path / "made")
            found = _tensors(made)
            assert found.keys() == saved.keys() and all(torch.equal(found[key], saved[key]) for key in saved), some
            states = [json.loads((path / "state.json").read_text()) for path in (made, first)]
            assert states[0].pop("ranks") == count and states[1].pop("ranks") == world and states[0] == states[1]
            whole += 1
    assert whole >= (2**world - 1 if options.get("strategy") == "ddp" else 1)


@pytest.mark.gloo
def test_a_run_goes_on_from_it(alone, tmp_path):
    """On another mesh, with the numbers of a run that has saved them."""
    gloo.run(2, _leave, "tp=2", {}, tmp_path)
    remains.put_together(tmp_path / "left", tmp_path / "made")
    x, found = torch.randn(12, 7, generator=torch.Generator().manual_seed(1)), []
    for folder in ("saved", "made"):
        model = autopar.compile(Net(), alone, (x,))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        assert load_checkpoint(tmp_path / folder, model, optimizer).data == DATA
        loss = model(x)
        loss.backward()
        optimizer.step()
        found.append([loss.detach(), *(full(p).detach() for p in model.parameters()), torch.rand(2)])
    assert all(map(torch.equal, *found))


def test_what_cannot_be_put_together(tmp_path):
    with pytest.raises(CheckpointError, match="no rank has left"):
        remains.put_together(tmp_path / "left", tmp_path / "made")
    assert not (tmp_path / "made").exists()
    for rank, step in enumerate((3, 4)):
        folder = tmp_path / "left" / f"rank-{rank:05d}"
        folder.mkdir(parents=True)
        remains.TensorFileWriter(folder / remains.PARTS, {}).close()
        (folder / remains.NOTES).write_text(json.dumps({"step": step}))
    with pytest.raises(CheckpointError, match="behind steps 3 and 4"):
        remains.put_together(tmp_path / "left", tmp_path / "made")
