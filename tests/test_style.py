"""Files are as ruff checks and formats them (pyproject.toml has the rules)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("words", [("check",), ("format", "--check")], ids=["check", "format"])
def test_ruff(words):
    found = subprocess.run(
        [sys.executable, "-m", "ruff", *words, "--no-cache", "."], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 0, found.stdout + found.stderr
