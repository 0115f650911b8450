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


def is_sentence(text: str) -> bool:
    """Whether a function's docstring says what it does, not half of it: `Of a rank.`, `What a stage holds.`"""
    halves = ("As", "By", "How", "Of", "The", "What", "Whether")
    return text[:1].isupper() and text.partition(" ")[0] not in halves and text.endswith((".", ")", ":", '"', "`"))


def test_docstrings_are_sentences():
    wrong = []
    for file in FILES:
        for place, node in public(ast.parse(file.read_text()), str(file.relative_to(ROOT))):
            text = ast.get_docstring(node) or ""
            if not (is_sentence(text) if isinstance(node, ast.FunctionDef) else text):
                wrong.append(f"{place}: {text[:60]!r}")
    assert not wrong, "\n".join(wrong)
