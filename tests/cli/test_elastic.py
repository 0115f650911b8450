"""A run goes on with fewer processes."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
import torch
from safetensors.torch import load_file

from autopar import Plan, models
from autopar.cli import elastic, templates
from autopar.cli.elastic import LostRanks, smaller, template
from autopar.cli.main import main
from autopar.errors import MeshError, RankFailure
from autopar.ir.mesh import Mesh

from .command import MLP, autopar, children_of, left_of, ranks_of


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


def test_copies_are_for_elastic_runs(tmp_path, capsys):
    assert main(["train", *MLP, "--checkpoint", str(tmp_path), "--copy-every", "5"]) == 2
    assert "fix: add --elastic" in capsys.readouterr().err


def test_a_mesh_that_does_not_fit_leaves_no_plan_and_the_others_have_theirs(tmp_path, monkeypatch):
    """Plans are made by a process of the lowest priority, which would end with its first error."""
    words = ["train", *MLP, "--checkpoint", str(tmp_path), "--elastic", "--strategy", "fsdp", "--memory", "500KiB"]
    seen = []
    monkeypatch.setattr(elastic, "train", lambda settings, *more: seen.append(settings) or 0)
    monkeypatch.setattr(os, "nice", lambda by: None)
    monkeypatch.setattr(templates, "end_with_parent", lambda: None)
    assert main(words) == 0
    templates._plan(seen[0], ["dp=1,tp=1", "dp=2,tp=2"], tmp_path)
    assert template(tmp_path, Mesh.parse("dp=1,tp=1")) is None
    plan = Plan.load(template(tmp_path, Mesh.parse("dp=2,tp=2")))
    assert plan.peak_bytes <= 500 * 1024


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
        smaller = list(itertools.takewhile(lambda line: not line.startswith("step 30 "), process.stdout))
        process.send_signal(signal.SIGUSR2)
        out, err = process.communicate(timeout=200)
    finally:
        if left_of(process):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0 and "1 of 4 processes lost (rank 3 died" in err, err
    assert f"going on with mesh dp=1,tp=2, {source}" in err and "going on with mesh dp=2,tp=2" in err
    out = "".join(smaller) + out
    assert out.count("taking the plan that was made for mesh") >= 1 and out.count("resumed from") == 2
    alone, _ = autopar("train", *words, "--checkpoint", str(tmp_path / "whole")).communicate(timeout=200)
    found, expected = _losses(out), _losses(alone)
    differ = {step: loss - expected[step] for step, loss in found.items() if abs(loss - expected[step]) > 1.5e-4}
    assert len(found) > 40 and not differ, differ
    cut, whole = (_loss_of(tmp_path / name / "step-00000060") for name in ("cut", "whole"))
    assert abs(cut - whole) <= 1e-6
    print(f"losses of the two models at the end differ by {abs(cut - whole):.1e}")


def _agent(host: str, port: int, folder: Path, log: IO):
    """Start what torchrun is on a node of two processes. What it says, which is more than a pipe takes, goes to log."""
    conf = f"last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=3,is_host={host}"
    launcher = ["-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "5",
                "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic",
                "--rdzv-conf", conf, "-m", "autopar.cli"]  # fmt: skip
    words = ["--model", "gpt2-tiny", "--mesh", "dp=4", "--batch", "8", "--seq", "16", "--steps", "100000",
             "--strategy", "zero1", "--checkpoint", str(folder), "--elastic"]  # fmt: skip
    return autopar("train", *words, launcher=launcher, stderr=log, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_node_goes_and_another_one_comes(tmp_path):
    """ZeRO's shards of the one that went were with the other node, too."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = open(tmp_path / "log", "w+")
    here, other = (_agent(host, port, tmp_path, log) for host in ("true", "false"))
    nodes, seen = [here, other], []

    def wait_for(*patterns: str) -> None:
        for pattern in patterns:
            seen.append(next((line for line in here.stdout if re.search(pattern, line)), f"the end, not {pattern}"))

    try:
        wait_for("plan of .* mesh dp=4", r"step +\d*00 ")
        for pid in [other.pid, *children_of(other.pid)]:
            os.kill(pid, signal.SIGKILL)
        wait_for("plan of .* mesh dp=2", "resumed from", r"step +\d*00 ")
        nodes.append(_agent("false", port, tmp_path, log))
        wait_for("plan of .* mesh dp=4", "resumed from", r"step +\d*0 ")
    finally:
        for node in nodes:
            for pid in [*children_of(node.pid), node.pid] if node.poll() is None else ():
                os.kill(pid, signal.SIGKILL)
            node.wait(30)
    log.seek(0)
    err = log.read()
    assert len(seen) == 8 and not any("the end" in line for line in seen), (seen, err[-3000:])
    assert "with mesh dp=2, from what those that remain hold, step-0000" in err, err[-3000:]
