"""The scripts of examples/ run on two processes, as torchrun starts them, and what they print is true."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import gloo

EXAMPLES = Path(__file__).parents[2] / "examples"


def _run(rank: int, name: str, folder: Path, arguments: tuple[str, ...]) -> str:
    """Run an example in `folder` as one of torchrun's processes, and return what it prints."""
    world = str(torch.distributed.get_world_size())
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world,
                      MASTER_ADDR="localhost", MASTER_PORT="1")  # fmt: skip
    os.environ["AUTOPAR_CACHE"] = str(folder / "cache")  # as it is for users, but for what is in it
    os.chdir(folder)
    sys.argv = [name, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


def printed(name: str, folder: Path, *arguments: str) -> str:
    """Run an example on two processes, and return what rank 0 prints."""
    return gloo.run(2, _run, name, folder, arguments)[0]


def losses(text: str) -> dict[int, float]:
    """Return the losses that are printed, by step."""
    found = re.findall(r"^step (\d+): .*?loss (\d+\.\d+)", text, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.gloo
def test_from_scratch(tmp_path):
    """A run that was ended goes on as if it had not been, on another mesh."""
    text = printed("from_scratch.py", tmp_path, "dp=2", "40")
    assert text.startswith("plan of LanguageModel on mesh dp=2")
    whole = losses(text)
    assert whole[40] < 2.8 < whole[1]
    newest = max((tmp_path / "output/checkpoints").iterdir())
    assert "40" in newest.name
    newest.rename(tmp_path / "last")
    resumed = losses(printed("from_scratch.py", tmp_path, "tp=2", "40"))
    assert resumed == pytest.approx({step: whole[step] for step in (30, 40)}, abs=1e-3)


@pytest.mark.gloo
def test_trainer_lora(tmp_path):
    text = printed("trainer_lora.py", tmp_path)
    found = losses(text)
    assert "trained 18,432 of 82,112 parameters" in text and found[40] < found[20] < 3.2
    assert (tmp_path / "output/adapter" / "adapter_model.safetensors").exists()


@pytest.mark.gloo
def test_qlora(tmp_path):
    text = printed("qlora.py", tmp_path)
    found = losses(text)
    assert found[12] < found[1] - 0.5
    folder, rank = map(float, re.search(r"in the folder: ([\d.]+) MiB, on a rank: ([\d.]+) MiB", text).groups())
    assert rank < folder / 7
    assert (tmp_path / "output/qlora-adapter" / "adapter_config.json").exists()


@pytest.mark.gloo
def test_pipeline(tmp_path):
    text = printed("pipeline.py", tmp_path)
    assert losses(text)[20] < 3.5 < losses(text)[1]
    assert "1f1b: 2 ranks along pp, 4 micro-batches of 4 samples" in text and "measured: 1f1b" in text
    assert (tmp_path / "output/pipeline.svg").read_text().startswith("<svg")


@pytest.mark.gloo
def test_quantization_aware(tmp_path):
    text = printed("quantization_aware.py", tmp_path)
    assert losses(text)[40] < 3.2 < losses(text)[1]
    assert float(re.search(r"logits differ by (\S+)", text)[1]) < 1e-5
    assert "read from the folder: equal True" in text and "QuantizedLinear(256, 64, int8 per_channel" in text


@pytest.mark.gloo
def test_custom_op(tmp_path):
    text = printed("custom_op.py", tmp_path)
    assert losses(text)[40] < 0.1 * losses(text)[1]
    assert "up (64, 256) is laid out as tp:S(1)" in text and "warnings of the plan: none" in text


@pytest.mark.slow
@pytest.mark.gloo
def test_two_nodes_of_a_cluster(tmp_path):
    """slurm.sh and torchrun.sh, with commands in place of SLURM's that run both nodes' tasks on this machine."""
    commands = {
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
        "scontrol": "echo localhost; echo other",
        "srun": 'shift; for node in 0 1; do SLURM_NODEID=$node "$@" & jobs="${jobs-} $!"; done; '
        "for j in $jobs; do wait $j; done",
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\nset -eu\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    said = dict(SLURM_NNODES="2", SLURM_JOB_NODELIST="node[0-1]", PER_NODE="1", PORT=port, MESH="dp=2")
    environment = os.environ | said | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    command = [str(EXAMPLES / "multi_node" / "slurm.sh")]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    assert "on mesh dp=2 (2 devices" in run.stdout and losses(run.stdout)[60] < 2.8
