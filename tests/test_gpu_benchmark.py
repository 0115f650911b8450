"""The parts of benchmarks/gpu.py run, in tiny sizes on the processor: what waits for a GPU is mended before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"
OTHERS = ("families", "slice", "verified", "ranks", "packed", "calibrated", "waits", "nccl", "state", "faults")


@pytest.mark.parametrize(
    "part", ["attention", "own_attention", *[pytest.param(part, marks=pytest.mark.slow) for part in OTHERS]]
)
def test_a_part_runs(part, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--fake", "--parts", part])
    code, said = gpu.main(), capsys.readouterr().out
    assert code == 0 and f"== {part} (" in said, said
    assert "WRONG" not in said and "Error" not in said, said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "there is no GPU: --fake" in done.stderr
