"""A run goes on with fewer processes."""

from __future__ import annotations

import os
import re
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from autopar import models
from autopar.cli import elastic
from autopar.cli.elastic import LostRanks, smaller
from autopar.errors import MeshError, RankFailure
from autopar.ir.mesh import Mesh

from .command import autopar, left_of, ranks_of


@pytest.mark.parametrize(("mesh", "devices", "expected"), [
    ("dp=4,tp=2", 7, "dp=3,tp=2"), ("dp=4,tp=2", 1, "dp=1,tp=1"), ("tp=2,dp=2", 3, "tp=2,dp=1"),
    ("tp=4", 3, "tp=3"), ("pp=2,dp=2,tp=2", 3, "pp=1,dp=1,tp=2"), ("dp=2,tp=4", 5, "dp=1,tp=4"),
])  # fmt: skip
def test_the_axis_of_data_is_cut_first(mesh, devices, expected):
    assert str(smaller(Mesh.parse(mesh), devices)) == expected


def test_as_long_as_some_are_left(capsys, tmp_path):
    runs, planned, lost = [], [], [[3], None, [0], [1, 0]]
    settings = {"mesh": "dp=2,tp=2", "resume": False, "checkpoint": str(tmp_path), "keep": None}

    def spawn(settings: dict, devices: int) -> int:
        runs.append((settings["mesh"], settings["resume"], devices, bool(settings["template"])))
        if (ranks := lost.pop(0)) is None:
            return 128 + signal.SIGUSR2
        raise LostRanks(ranks, RankFailure("rank 3 died"))

    @contextmanager
    def planning(settings: dict, meshes: list[Mesh], folder: Path):
        planned.append([str(mesh) for mesh in meshes])
        (folder / f"{meshes[0]}.json").touch()
        yield

    with pytest.raises(LostRanks):
        elastic.train(settings, 4, spawn, planning)
    two, four = ("dp=1,tp=2", 2), ("dp=2,tp=2", 4)
    assert [(mesh, devices) for mesh, _, devices, _ in runs] == [four, two, four, two]
    assert [resume for _, resume, _, _ in runs] == [False, False, False, False]  # nothing was saved
    assert [template for _, _, _, template in runs] == [False, True, False, True]
    assert planned[:2] == [["dp=1,tp=2", "dp=1,tp=1", "dp=2,tp=2"], ["dp=1,tp=1", "dp=2,tp=2"]]
    err = capsys.readouterr().err
    assert "rank 3 died): going on with mesh dp=1,tp=2, from the first step (no rank has left" in err


def test_under_torchrun_the_mesh_is_of_as_many_as_there_are(tmp_path, capsys):
    settings = {"mesh": "dp=4,tp=2", "resume": False, "checkpoint": str(tmp_path), "keep": None}
    found = [elastic.under_torchrun(settings, world, rank) for world, rank in ((8, 0), (6, 0), (2, 1))]
    assert [(words["mesh"], words["resume"]) for words in found] == [
        (mesh, True) for mesh in ("dp=4,tp=2", "dp=3,tp=2", "dp=1,tp=2")
    ]
    assert capsys.readouterr().err == ""
    for world in (7, 9):
        with pytest.raises(MeshError, match=f"{world} processes for mesh dp=4,tp=2"):
            elastic.under_torchrun(settings, world, 0)
    (tmp_path / elastic.LEFT).mkdir()
    elastic.under_torchrun(settings, 6, 0)
    assert "with mesh dp=3,tp=2, from the first step (no rank has left" in capsys.readouterr().err
    assert not (tmp_path / elastic.LEFT).exists()


def _losses(out: str) -> dict[int, float]:
    """Return the last loss that each step had."""
    return {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  loss ([\d.]+)", out)}


def _loss_of(checkpoint: Path) -> float:
    """Return the loss of a saved model on one batch."""
    model, batch = models.build("gpt2-tiny", batch=8, seq=16, device="cpu", seed=3)
    saved = [load_file(file) for file in (checkpoint / "model").glob("*.safetensors")]
    tensors = {name: tensor for part in saved for name, tensor in part.items()}
    assert model.load_state_dict(tensors, strict=False) == (["lm_head.weight"], [])  # that is another name of one
    with torch.no_grad():
        return model.double()(**batch).loss.item()


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("strategy, options, source", [
    ("megatron+zero1", ["--every", "50"], "from what those that remain hold, step-0000001"),  # copies
    ("megatron", [], "from what those that remain hold, step-000000"),
])  # fmt: skip
def test_losses_are_those_of_a_run_without_the_accident(strategy, options, source, tmp_path):
    words = ["--model", "gpt2-tiny", "--mesh", "dp=2,tp=2", "--batch", "4", "--seq", "16", "--steps", "60",
             "--strategy", strategy]  # fmt: skip
    process = autopar("train", *words, "--checkpoint", str(tmp_path / "cut"), *options, "--elastic")
    try:
        assert any(re.match("step +12 ", line) for line in process.stdout)
        os.kill(ranks_of(process)[-1], signal.SIGKILL)
        out, err = process.communicate(timeout=200)
    finally:
        if left_of(process):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0 and "1 of 4 processes lost (rank 3 died" in err, err
    assert f"going on with mesh dp=1,tp=2, {source}" in err and "resumed from" in out
    alone, _ = autopar("train", *words, "--checkpoint", str(tmp_path / "whole")).communicate(timeout=200)
    found, expected = _losses(out), _losses(alone)
    differ = {step: loss - expected[step] for step, loss in found.items() if abs(loss - expected[step]) > 1.5e-4}
    assert len(found) > 40 and not differ, differ
    cut, whole = (_loss_of(tmp_path / name / "step-00000060") for name in ("cut", "whole"))
    assert abs(cut - whole) <= 1e-6
    print(f"losses of the two models at the end differ by {abs(cut - whole):.1e}")
