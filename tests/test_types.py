"""Types are as mypy checks them (pyproject.toml has the rules): nothing is wrong in the folders of STRICT, and elsewhere
no more lines than tests/golden/mypy_errors.txt counts. `pytest --update-golden` writes lower counts, never higher ones.

Lines are counted, not messages: mypy says of one wrong line as many things as a union of torch's has members.
"""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE = ROOT / "tests" / "golden" / "mypy_errors.txt"
STRICT = ("ir", "plans", "rules", "schedule")


def errors(folder: Path) -> dict[str, dict[str, str]]:
    """Return {folder of autopar: {"file:line": first message}}. `folder` gets links that give every module its name."""
    package = folder / "autopar"
    package.mkdir()
    for part in (*(ROOT / "autopar").iterdir(), ROOT / "passes", ROOT / "models"):
        (package / part.name).symlink_to(part)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "-p", "autopar"]
    run = subprocess.run([*command, "--cache-dir", "/dev/null"], cwd=folder, capture_output=True, text=True)
    assert run.returncode in (0, 1), run.stdout + run.stderr  # 2: it could not check
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for place, part, message in re.findall(r"^(autopar/(\w+)\S*:\d+): error: (.*)$", run.stdout, re.MULTILINE):
        found[part].setdefault(place, message)
    return found


def test_mypy(tmp_path, request):
    found = errors(tmp_path)
    known = {part: int(count) for part, count in re.findall(r"^(\w+) (\d+)$", FILE.read_text(), re.MULTILINE)}
    assert not known.keys() & set(STRICT)
    head = f"lines that mypy {version('mypy')} finds wrong with torch {version('torch')}"
    more = [part for part in found if len(found[part]) > known.get(part, 0)]
    wrong = "\n".join(f"{place}: {message}" for part in more for place, message in found[part].items())
    assert not more, f"{head} in {', '.join(more)} are more than in {FILE.name}:\n{wrong}"
    fewer = {part: len(found[part]) for part in known if len(found[part]) < known[part]}
    if fewer and request.config.getoption("--update-golden"):
        lines = [f"{part} {count}" for part, count in sorted((known | fewer).items()) if count]
        FILE.write_text("\n".join([f"# {head}", *lines]) + "\n")
    elif fewer:
        warnings.warn(f"{head} in {', '.join(fewer)} are fewer than in {FILE.name}: pytest --update-golden")
