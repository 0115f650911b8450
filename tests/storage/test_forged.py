"""Checkpoints that somebody wrote, or changed and committed again: COMMIT is a checksum, not a signature."""

from __future__ import annotations

import hashlib
import json
import sys

import pytest
import torch

import autopar
from autopar.errors import CheckpointCorrupt
from autopar.storage.durable import digest_of

from . import damage
from .test_checkpoint import regressor, same, state_of, take_steps


@pytest.fixture(scope="module")
def model(alone):
    return regressor(alone)


FORGED = {
    "no object": lambda s: [], "no step": lambda s: s.pop("step"), "step": lambda s: s.update(step="1"),
    "data": lambda s: s.update(data={}), "no data": lambda s: s.update(data=[]),
    "ranks": lambda s: s.update(ranks=None), "dropout": lambda s: s.update(dropout=3),
    "half of dropout": lambda s: s.update(dropout={"seed": 1}),
    "scheduler": lambda s: s.update(scheduler={"!tensor": ["load", [1], [1]]}),
    "deep": lambda s: s.update(scheduler=nested(2 * sys.getrecursionlimit() // 5)),
    "optimizer": lambda s: s.update(optimizer=3),
    "class": lambda s: s["optimizer"].pop("class"), "groups": lambda s: s["optimizer"].update(groups=3),
    "options": lambda s: s["optimizer"]["groups"][0].update(options=3),
    "kind": lambda s: s["optimizer"]["state"]["up.weight"]["exp_avg"].update(tensor="x"),
    "device": lambda s: s["optimizer"]["state"]["up.weight"]["exp_avg"].update(device="nowhere"),
    "key": lambda s: s["optimizer"]["state"]["up.weight"].update(other=s["optimizer"]["state"]["up.weight"]["exp_avg"]),
    "shape": lambda s: (w := s["optimizer"]["state"]["up.weight"]).update(step=w["exp_avg"]),
    "state": lambda s: s["optimizer"].update(state=[]),
}  # fmt: skip


def nested(depth: int):
    """Values that Python writes and cannot read within its limit, which Inductor raises for the whole process."""
    value = {}
    for _ in range(depth):
        value = {"!tuple": [value]}
    return value


def commit(path, change=lambda manifest: None) -> None:
    """Make a checkpoint of files that were changed, as a forger would."""
    manifest = json.loads((path / "manifest.json").read_text())
    for name in manifest["files"]:
        digest = digest_of(path / name)
        manifest["files"][name] = [digest.bytes_, digest.sha256]
    changed = change(manifest)
    manifest = changed if changed == [] else manifest
    (path / "manifest.json").write_text(json.dumps(manifest))
    (path / "COMMIT").write_text(digest_of(path / "manifest.json").sha256)


def test_forged_files(model, tmp_path):
    """Typed errors, and nothing changes."""
    optimizer = torch.optim.AdamW(model.parameters())
    take_steps(model, optimizer)
    path = autopar.save_checkpoint(tmp_path / "root", model, optimizer, step=1)
    take_steps(model, optimizer)
    before = state_of(model, optimizer)
    start = damage.copy_of(path, tmp_path / "start")
    for what, change in FORGED.items():
        damage.copy_of(start, path)
        state = json.loads((path / "state.json").read_text())
        changed = change(state)
        (path / "state.json").write_text(json.dumps(changed if what == "no object" else state))
        commit(path)
        print(what)
        with pytest.raises(CheckpointCorrupt, match="state.json of .* is not what a save writes"):
            autopar.load_checkpoint(path, model, optimizer)
    for text in (b"", b"{", b"[" * 100_000, b"\xff"):
        (path / "state.json").write_bytes(text)
        commit(path)
        with pytest.raises(CheckpointCorrupt, match="state.json of .* is not what a save writes"):
            autopar.load_checkpoint(path, model, optimizer)
    zero = [0, hashlib.sha256().hexdigest()]
    manifests = {
        "outside": lambda m: m["files"].update({"../../etc": zero}),
        "root": lambda m: m["files"].update({"/dev/zero": zero}),
        "lengths": lambda m: m["files"].update({"state.json": "ab"}), "list": lambda m: m.update(files=[]),
        "step": lambda m: m.pop("step"), "run": lambda m: m.update(run=3), "nothing": lambda m: [],
        "version": lambda m: m.pop("version"), "empty": lambda m: m.update(files={}),
        "without the state": lambda m: m["files"].pop("state.json"),
    }  # fmt: skip
    for what, change in manifests.items():
        damage.copy_of(start, path)
        commit(path, change)
        print(what)
        with pytest.raises(CheckpointCorrupt):
            autopar.load_checkpoint(path, model, optimizer)
    damage.copy_of(start, path)
    (path / "model" / "config.json").symlink_to("/dev/zero")
    commit(path, lambda manifest: manifest["files"].update({"model/config.json": zero}))
    with pytest.raises(CheckpointCorrupt, match="model/config.json of .* is not a file"):
        autopar.load_checkpoint(path, model, optimizer)
    assert same(state_of(model, optimizer), before)
    damage.copy_of(start, path)
    autopar.load_checkpoint(path, model, optimizer)
