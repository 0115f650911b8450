"""autopar train under signals of a terminal, Kubernetes and SLURM, and when the process that started it is killed."""

from __future__ import annotations

import os
import re
import signal
import socket

import pytest

from autopar.storage.checkpoint import latest_checkpoint
from tests.cli.command import MLP, autopar, left_of


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_every_process_after_a_checkpoint(number, tmp_path):
    process = autopar("train", *MLP, "--mesh", "dp=2", "--steps", "1000000", "--checkpoint", str(tmp_path))
    try:
        assert any("loss" in line for line in process.stdout)
        os.killpg(process.pid, number)  # as a terminal and a scheduler send it, to all
        out, err = process.communicate(timeout=60)
        assert process.returncode == 128 + number and not left_of(process), err
        step = int(re.search(r"stopped after step (\d+): saved in", out)[1])
        assert latest_checkpoint(tmp_path).name == f"step-{step:08d}"
    finally:
        if left_of(process):
            os.killpg(process.pid, signal.SIGKILL)


HANDLED = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--signals-to-handle", HANDLED,
            "-m", "autopar.cli"]  # fmt: skip


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "number"), [
    (["-m", "autopar.cli"], signal.SIGTERM),  # Kubernetes, of whose container it is the first process
    (TORCHRUN, signal.SIGTERM),
    (TORCHRUN, signal.SIGUSR1),  # sbatch --signal=USR1@120
], ids=["kubernetes", "kubernetes torchrun", "slurm torchrun"])  # fmt: skip
def test_a_scheduler_signals_the_process_that_it_started(launcher, number, tmp_path):
    """And would kill it some 30 s later."""
    words = [*MLP, "--mesh", "dp=2", "--steps", "1000000", "--checkpoint", str(tmp_path)]
    process = autopar("train", *words, launcher=launcher)
    try:
        assert any("loss" in line for line in process.stdout)
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
        assert process.returncode == (1 if launcher is TORCHRUN else 128 + number) and not left_of(process), err
        step = int(re.search(r"stopped after step (\d+): saved in", out)[1])
        assert latest_checkpoint(tmp_path).name == f"step-{step:08d}"
    finally:
        if left_of(process):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.gloo
@pytest.mark.slow
def test_slurm_signals_every_task(tmp_path):
    """A task a rank, without torchrun."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = [*MLP, "--mesh", "dp=2", "--steps", "1000000", "--checkpoint", str(tmp_path)]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    tasks = [autopar("train", *words, RANK=str(rank), **place) for rank in range(2)]
    try:
        assert any("loss" in line for line in tasks[0].stdout)
        for task in tasks:
            task.send_signal(signal.SIGUSR1)
        (out, err), _ = [task.communicate(timeout=30) for task in tasks]
        assert [task.returncode for task in tasks] == [128 + signal.SIGUSR1] * 2, err
        assert "stopped after step" in out and latest_checkpoint(tmp_path) is not None
    finally:
        for task in tasks:
            task.kill()


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("moment", ["planning", "loss"])
def test_no_process_outlives_the_one_that_started_it(moment):
    """Also where it ignores interrupts, as background jobs do."""
    process = autopar("train", *MLP, "--mesh", "dp=2", "--steps", "1000000", background=True)
    try:
        assert any(moment in line for line in process.stdout)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
        assert not left_of(process)
    finally:
        if left_of(process):
            os.killpg(process.pid, signal.SIGKILL)
