"""Types are as mypy checks them (pyproject.toml has the rules): nothing is wrong in the folders of STRICT, in the
programs of README, docs/guide.md and examples/, and elsewhere no more lines than tests/golden/mypy_errors.txt counts.
`pytest --update-golden` writes lower counts, never higher ones.

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
from typing import get_args

from autopar.api import words
from autopar.cost import memory
from autopar.planner.problem import offload, recipes
from autopar.planner.solver import minimize
from autopar.planner.spmd import fixed_recompute
from autopar.schedule import catalogue

ROOT = Path(__file__).parent.parent
FILE = ROOT / "tests" / "golden" / "mypy_errors.txt"
STRICT = ("ir", "plans", "rules", "schedule")
NAMES_OF_README = """
from collections.abc import Iterable
from torch import nn
model: nn.Module = nn.Linear(1, 1)
batch: dict[str, torch.Tensor] = {}
loader: Iterable[dict[str, torch.Tensor]] = []
"""
REVEALED = """
import autopar
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
model = autopar.compile(nn.Linear(1, 1), mesh)
reveal_type(model)
reveal_type(model.plan)
reveal_type(autopar.plan(nn.Linear(1, 1), "dp=2", None, strategy="megatron_sp+zero1"))
autopar.compile(nn.Linear(1, 1), mesh, inputs="globl")
"""


def blocks(text: str) -> list[str]:
    """Return the blocks of Python in a document."""
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def messages(folder: Path) -> str:
    """Return what mypy says of autopar, of examples/ and of the programs above. `folder` gets links that give every
    module its name."""
    package, programs = folder / "autopar", folder / "programs"
    package.mkdir()
    for part in (*(ROOT / "autopar").iterdir(), ROOT / "passes", ROOT / "models"):
        (package / part.name).symlink_to(part)
    (folder / "examples").symlink_to(ROOT / "examples")
    programs.mkdir()
    imports, _, rest = blocks((ROOT / "README.md").read_text())[0].partition("\n\n")
    (programs / "readme.py").write_text(f"{imports}\n{NAMES_OF_README}{rest}")
    (programs / "guide.py").write_text("".join(blocks((ROOT / "docs/guide.md").read_text())))
    (programs / "revealed.py").write_text(REVEALED)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    options = ["--cache-dir", str(ROOT / ".mypy_cache"), "-p", "autopar", "-p", "examples", "-p", "programs"]
    run = subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True)
    assert run.returncode in (0, 1), run.stdout + run.stderr  # 2: it could not check
    return run.stdout


def test_mypy(tmp_path, request):
    said = messages(tmp_path)
    of_users = re.findall(r"^((?:examples|programs)/.*)$", said, re.MULTILINE)
    at = "programs/revealed.py"
    assert [re.sub(r"\d+: ", "", line) for line in of_users] == [
        f'{at}:note: Revealed type is "autopar.runtime.module.ParallelModule"',
        f'{at}:note: Revealed type is "autopar.plans.plan.Plan"',
        f'{at}:note: Revealed type is "autopar.plans.plan.Plan"',
        f'{at}:error: Argument "inputs" to "compile" has incompatible type "Literal[\'globl\']"; '
        "expected \"Literal['global', 'local']\"  [arg-type]",
    ]
    found: dict[str, dict[str, str]] = defaultdict(dict)  # {folder of autopar: {"file:line": first message}}
    for place, part, message in re.findall(r"^(autopar/(\w+)\S*:\d+): error: (.*)$", said, re.MULTILINE):
        found[part].setdefault(place, message)
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


def test_words_are_those_that_are_known():
    def listed(alias) -> set[str]:
        return {word for part in get_args(alias) for word in (get_args(part) or [part]) if isinstance(word, str)}

    assert listed(words.Offload) == {*offload.LEVELS}
    assert listed(words.Recompute) == {*fixed_recompute.LEVELS}
    assert listed(words.Solver) == {minimize.DUAL, minimize.ILP}
    assert listed(words.Strategy) <= {*recipes.RECIPES, recipes.MODELS_OWN} and len(listed(words.Strategy)) == 11
    assert listed(words.Optimizer) <= {*memory.OPTIMIZERS} and len(listed(words.Optimizer)) == 6
    assert listed(words.Schedule) <= {"auto", *catalogue.KINDS} and len(listed(words.Schedule)) == 12
