"""The same plan, byte for byte, however often and in whichever process it is made."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .planning import captured, make_anew, toy

SHORT_OF_MEMORY = ("mlp:hidden=64,layers=4", "dp=4", None, 2.5e6)
WITH_A_STRATEGY = ("llama:hidden=32,layers=1,heads=4,kv_heads=2,ffn=64,vocab=64", "dp=2,tp=2", "fsdp", None)
ROOT = Path(__file__).parents[2]


def written(model: str, mesh: str, strategy: str | None, memory_bytes: float | None) -> str:
    batch, seq = (512, 1) if model.startswith("mlp") else (8, 16)
    machine = toy(flops=1e11, memory=1e10, latency=2e-5, launch=1e-6, bucket=1 << 18)
    graph = captured(model, batch, seq)
    plan = make_anew(graph, mesh, machine, strategy=strategy, memory_bytes=memory_bytes, baselines=True)
    return json.dumps(plan.to_json(), sort_keys=True) + str(plan)


def digest() -> str:
    return hashlib.sha256(written(*SHORT_OF_MEMORY).encode()).hexdigest()


@pytest.mark.slow
def test_twice_in_one_process():
    assert written(*WITH_A_STRATEGY) == written(*WITH_A_STRATEGY)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_processes_with_other_hash_seeds():
    command = "from tests.planner.test_determinism import digest; print(digest())"
    running = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        running.append(subprocess.Popen([sys.executable, "-W", "ignore", "-c", command], cwd=ROOT, env=environment,
                                        stdout=subprocess.PIPE, text=True))  # fmt: skip
    try:
        results = [process.communicate(timeout=240)[0].strip() for process in running]
    finally:
        for process in running:
            process.kill()
    assert results[0] == results[1] == digest()
