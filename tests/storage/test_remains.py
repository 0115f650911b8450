"""Ranks that remain put together the checkpoint that all would have saved, or there is none."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.errors import CheckpointError
from autopar.storage import remains
from autopar.storage.checkpoint import load_checkpoint, run_of, save_checkpoint
from autopar.storage.copies import Copies
from autopar.storage.held_parts import NOTES, PARTS, HeldParts, noted
from autopar.storage.opened import RNG
from autopar.storage.tensor_file import Form, TensorFile, TensorFileWriter
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
    """Take a step, save and copy it, begin the next one, leave what there is, and copies; return the tensors that the
    step has made."""
    x = torch.randn(12, 7, generator=torch.Generator().manual_seed(1))
    model = autopar.compile(Net(), device_mesh(mesh), (x,), **options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    behind = noted(model, 1, DATA, scaler, run_of(model))
    copies = Copies(model, optimizer)
    copies.take(behind)
    save_checkpoint(folder / "saved", model, optimizer, step=1, data=DATA, scaler=scaler)
    torch.rand(3)
    model(x).backward()
    for ranks in _some_of(dist.get_world_size()):
        if rank in ranks:
            lost = {*range(dist.get_world_size())} - {*ranks}
            HeldParts.of(model, optimizer, behind, lost).leave(folder / "left" / _name(ranks), model)
    for ranks in _some_of(dist.get_world_size()):
        if rank in ranks:
            copies.leave(folder / "copies" / _name(ranks), but=-1)
    _take_more(copies, optimizer, model, x, scaler)
    return {} if "pp" in mesh else {name: full(p).detach() for name, p in model.named_parameters()}


def _take_more(copies: Copies, optimizer, model, x, scaler) -> None:
    """Check that shares of an earlier step are kept until all ranks have those of the last."""
    (before,) = copies.held
    optimizer.step()
    copies.take(noted(model, 2, DATA, scaler, None))
    assert copies.held[1] is before
    assert [HeldParts.unpacked(mine).notes["step"] for mine, _ in copies.held] == [2, 1]
    copies.forget_older()
    assert [HeldParts.unpacked(mine).notes["step"] for mine, _ in copies.held] == [2]


def _tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in (*checkpoint.glob("model/*.safetensors"), *checkpoint.glob("optimizer*.safetensors")):
        file = TensorFile(path)
        found |= {f"{path.name[:5]} {name}": file.read(name) for name in file.forms}
    return found


def _is_whole(folders: list[Path]) -> bool:
    """Return whether every element of every tensor is with one of some ranks."""
    notes = [json.loads((folder / NOTES).read_text()) for folder in folders]
    for name in {name for note in notes for name in note["names"]}:
        found = None
        for shape, ranges in (note["tensors"][name] for note in notes if name in note["tensors"]):
            found = np.zeros(shape, bool) if found is None else found
            for block in itertools.product(*ranges):
                found[tuple(slice(*ends) for ends in block)] = True
        if found is None or not found.all():
            return False
    return True


def _bytes_in(left: Path) -> int:
    file = TensorFile(left / PARTS)
    return sum(form.bytes_ for name, form in file.forms.items() if not name.startswith(RNG))


def _some_of(world: int) -> list[tuple[int, ...]]:
    return [ranks for count in range(1, world + 1) for ranks in itertools.combinations(range(world), count)]


def _name(ranks) -> str:
    return "-".join(map(str, ranks))


@pytest.mark.gloo
@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh, options", CASES, ids=str)
def test_any_ranks_that_remain(mesh, options, tmp_path):
    world = math.prod(int(part.partition("=")[2]) for part in mesh.split(","))
    gloo.run(world, _leave, mesh, options, tmp_path)
    saved, [first] = _tensors(tmp_path / "saved/step-00000001"), (tmp_path / "saved").glob("step-*")
    bytes_ = sum(t.numel() * t.element_size() for t in saved.values())
    whole: dict[str, list[tuple[int, ...]]] = {"left": [], "copies": []}
    for kind, ranks in itertools.product(whole, _some_of(world)):
        left = tmp_path / kind / _name(ranks)
        some = sorted((left / "step-00000001").iterdir())
        if not _is_whole(some):
            with pytest.raises(CheckpointError, match="with lost ranks alone"):
                remains.put_together(left, tmp_path / "made")
            continue
        made = remains.put_together(left, tmp_path / "made")
        found = _tensors(made)
        assert found.keys() == saved.keys() and all(torch.equal(found[key], saved[key]) for key in saved), ranks
        states = [json.loads((path / "state.json").read_text()) for path in (made, first)]
        assert states[0].pop("ranks") == len({folder.name[:10] for folder in some})
        assert states[1].pop("ranks") == world and states[0] == states[1]
        # nothing is left twice
        assert kind == "copies" or sum(map(_bytes_in, some)) == bytes_, ranks
        whole[kind].append(ranks)
    assert len(whole["left"]) >= (2**world - 1 if options.get("strategy") == "ddp" else 1)
    shares = [_bytes_in(tmp_path / f"copies/{_name(range(world))}/step-00000001/rank-{r:05d}") for r in range(world)]
    assert max(shares) < sum(shares) == bytes_
    assert {ranks for ranks in _some_of(world) if len(ranks) >= world - 1} <= {*whole["copies"]}


@pytest.mark.gloo
def test_a_run_goes_on_from_it(alone, tmp_path):
    """On another mesh, with the numbers of a run that has saved them."""
    gloo.run(2, _leave, "tp=2", {}, tmp_path)
    remains.put_together(tmp_path / "left/0-1", tmp_path / "made")
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
    for rank, (step, ranges) in enumerate([(3, [0, 3]), (3, [3, 5]), (4, [0, 3]), (4, [3, 4])]):
        folder = tmp_path / f"left/step-{step:08d}/rank-{rank:05d}"
        folder.mkdir(parents=True)
        file = TensorFileWriter(folder / PARTS, {"model/w": Form((ranges[1] - ranges[0],), torch.float32)})
        file.append(torch.ones(ranges[1] - ranges[0]))
        file.close()
        notes = {"step": step, "names": ["model/w"], "tensors": {"model/w": [[5], [[ranges]]]}}
        (folder / NOTES).write_text(json.dumps(notes))
    with pytest.raises(CheckpointError, match="what else remains is of step 3"):  # all of step 3, not of step 4
        remains.put_together(tmp_path / "left", tmp_path / "made", newer_than=3)
    (tmp_path / "left/step-00000003/rank-00001" / NOTES).unlink()  # unfinished
    with pytest.raises(CheckpointError, match="parts of w were with lost ranks alone"):
        remains.put_together(tmp_path / "left", tmp_path / "made")
