"""Files are as ruff checks and formats them (pyproject.toml has the rules)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_layers import FILES

ROOT = Path(__file__).parent.parent
# First words of docstrings that have no main clause: `Of a rank.`, `What a stage holds.`, `By case, on this process.`
HALVES = "As By How Of What When Where Whether Which Who Whose Why".split()
MOST = 25  # statements that keep their form and are no tables
MOST_COPIED = 8  # parameters that a class without @dataclass keeps as they are


@pytest.mark.parametrize("words", [("check",), ("format", "--check")], ids=["check", "format"])
def test_ruff(words):
    found = subprocess.run(
        [sys.executable, "-m", "ruff", *words, "--no-cache", "."], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 0, found.stdout + found.stderr


def public(tree: ast.Module | ast.ClassDef, path: str) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """Each public function and class, and the public ones in classes, with the place to name."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            if not any(ast.unparse(decorator).endswith("overload") for decorator in node.decorator_list):
                yield f"{path}:{node.lineno} {node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from public(node, path)


def first_word(text: str) -> str:
    return text.partition(" ")[0].strip(",:;.")


def is_sentence(text: str) -> bool:
    """Return whether a public function's docstring says what it does, not half of it."""
    is_whole = first_word(text) not in HALVES and not text.startswith("The ")
    return text[:1].isupper() and is_whole and text.endswith((".", ")", ":", '"', "`"))


def test_docstrings_are_sentences():
    wrong = []
    for file in FILES:
        for place, node in public(ast.parse(file.read_text()), str(file.relative_to(ROOT))):
            text = ast.get_docstring(node) or ""
            if not (is_sentence(text) if isinstance(node, ast.FunctionDef) else text):
                wrong.append(f"{place}: {text[:60]!r}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", ["autopar", "passes", "models", "tests", "benchmarks", "examples"])
def test_no_docstring_is_half_a_sentence(folder):
    """Private and nested functions, classes and modules are looked at too."""
    kinds, wrong = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef), []
    for file in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            text = (ast.get_docstring(node) or "") if isinstance(node, kinds) else ""
            if first_word(text) in HALVES:
                wrong.append(f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {text[:60]!r}")
    assert not wrong, "\n".join(wrong)


def without_table(source: str) -> int:
    """Count statements with `# fmt: skip` that are no tables: a display of rows, or a call or an operation on one."""
    displays = (ast.Dict, ast.List, ast.Tuple, ast.Set, ast.Subscript)
    lines = [at for at, line in enumerate(source.splitlines(), 1) if line.endswith("# fmt: skip")]
    found = 0
    for at in lines:
        inside = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.stmt) and n.lineno <= at <= n.end_lineno]
        value = getattr(min(inside, key=lambda n: n.end_lineno - n.lineno), "value", None)
        if isinstance(value, ast.Call):
            value = next(iter(value.args), None)
        found += not isinstance(value.right if isinstance(value, ast.BinOp) else value, displays)
    return found


def test_only_tables_keep_their_form():
    """But for what files of nearly 400 lines have no room for: a number that only falls."""
    assert sum(without_table(file.read_text()) for file in FILES) <= MOST


def copied(init: ast.FunctionDef) -> set[str]:
    """Return the parameters of an `__init__` that it only keeps as an attribute."""
    names, found = {a.arg for a in (*init.args.posonlyargs, *init.args.args, *init.args.kwonlyargs)}, set()
    for node in (n for n in ast.walk(init) if isinstance(n, (ast.Assign, ast.AnnAssign)) and n.value is not None):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            is_pairs = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            for one, value in zip(target.elts, node.value.elts) if is_pairs else [(target, node.value)]:
                is_own = isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self"
                found |= {value.id} & names if is_own and isinstance(value, ast.Name) else set()
    return found


def test_what_only_keeps_its_arguments_is_a_dataclass():
    """Eight arguments or more, but in modules of torch and classes that are a list or a dict."""
    found = set()
    for file in FILES:
        for node in (n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ClassDef)):
            inits = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
            is_own = not {ast.unparse(base) for base in node.bases} & {"nn.Module", "torch.nn.Module", "dict", "list"}
            if is_own and any(len(copied(init)) >= MOST_COPIED for init in inits):
                found.add(f"{file.relative_to(ROOT)} {node.name}")
    assert not found, found
