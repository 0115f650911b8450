"""Run what needs Triton in a process of its own: it asks for its interpreter at the start, and complains at the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.ops import packed_linear

ROOT = Path(__file__).resolve().parents[2]
NEEDS_TRITON = pytest.mark.skipif(not packed_linear._has_triton(), reason="needs Triton, which is made for Linux")


def run_alone(program: str, **variables: str) -> None:
    """Run a program, which finds the tests."""
    environment = os.environ | variables | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=290)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
