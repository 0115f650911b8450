"""Tests that little is imported before it is needed: no torch for names, help and refusals; little of it to compile."""

from __future__ import annotations

import ast
import json
import pickle
import subprocess
import sys

import pytest

import autopar
from autopar import hardware
from autopar.cli.main import COMMANDS
from autopar.planner.problem.recipes import RECIPES
from autopar.plans.entries import MeshCandidate
from autopar.schedule import KINDS
from tests.test_layers import FILES

MODEL = ["--model", "gpt2-tiny", "--mesh", "dp=2,tp=2", "--batch", "4", "--seq", "8"]
LARGE = ("ortools", "torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.pipelining")


def fresh(code: str, *words: object) -> object:
    """The JSON that code prints in a process of its own, with `words` in its `sys.argv[1]`."""
    command = [sys.executable, "-c", f"import json, sys\n{code}", json.dumps(words)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def test_names_need_no_torch():
    code = "import autopar; print(json.dumps([dir(autopar), [m for m in ('torch', 'numpy') if m in sys.modules]]))"
    names, loaded = fresh(code)
    assert names == sorted([*autopar.__all__, "__version__"]) and not loaded


def test_type_checkers_see_what_is_imported_when_asked_for():
    [block] = [node for node in ast.parse(open(autopar.__file__).read()).body if isinstance(node, ast.If)]
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == autopar._WITH_TORCH and set(seen) < set(autopar.__all__)


def test_no_other_name_is_made_up():
    with pytest.raises(AttributeError, match="no attribute 'complie'"):
        _ = autopar.complie


def test_pickles_open_in_a_fresh_process_and_load_neither_dynamo_nor_pipelining_nor_ortools():
    made = [autopar.compile, autopar.LoRA, autopar.Mesh.parse("dp=2"), MeshCandidate("dp=2", 1.0, None, None, None)]
    code = """
import pickle
found = pickle.loads(bytes.fromhex(json.loads(sys.argv[1])[0]))
names = [getattr(x, "__qualname__", str(x)) for x in found]
from autopar import *
print(json.dumps([names, compile.__module__, [m for m in sys.modules]]))
"""
    names, module, loaded = fresh(code, pickle.dumps(made).hex())
    assert names == ["compile", "LoRA", *map(str, made[2:])]
    assert module == "autopar.api.entry" and "torch" in loaded
    assert not set(LARGE) & set(loaded)


RUN = """
import contextlib, io
from autopar.cli.main import main
found = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
    found.append([code, out.getvalue() + err.getvalue(), "torch" in sys.modules])
print(json.dumps(found))
"""


def test_help_needs_no_torch():
    commands = [command.__name__.rpartition(".")[2] for command in COMMANDS]
    found = fresh(RUN, ["--help"], ["--version"], *([command, "--help"] for command in commands))
    assert all(code == 0 and not loaded for code, _, loaded in found)
    text = "".join(found[2][1].split())
    assert all(",".join(names) in text for names in (RECIPES, KINDS, hardware.names()))


REFUSED = {
    "COMMAND": [], "'plna'": ["plna"], "--batch": ["plan", "--model", "gpt2"],
    "no model named 'gtp2'": ["plan", *MODEL, "--model", "gtp2"], "'8x8' as a mesh": ["plan", *MODEL, "--mesh", "8x8"],
    "'h1000'": ["plan", *MODEL, "--hardware", "h1000"], "'megatorn'": ["plan", *MODEL, "--strategy", "megatorn"],
    "'weight' as a pin": ["plan", *MODEL, "--pin", "weight"], "axis pp": ["plan", *MODEL, "--schedule", "zbv"],
    "No such file": ["plan", *MODEL, "--json", "/there/is/no/such/folder/plan.json"],
    "--checkpoint": ["train", *MODEL, "--keep", "2"], "PATTERN": ["explain", *MODEL],
    "--zero": ["estimate", *MODEL, "--strategy", "fsdp", "--zero", "1"], "--after": ["graph", *MODEL, "--diff"],
    "'zbw'": ["schedule", "zbw"], "cannot be read as a plan": ["diff", "/no/such/a.json", "/no/such/b.json"],
}  # fmt: skip


def test_refusals_need_no_torch():
    for message, (code, text, loaded) in zip(REFUSED, fresh(RUN, *REFUSED.values())):
        assert code == 2 and message in text and not loaded, text


def test_canonical_ops_are_taken_from_where_they_are_registered():
    """So that any module can be the first that is imported."""
    wrong = [f for f in FILES if f.parent.name != "ops" and "torch.ops.autopar" in f.read_text()]
    assert not wrong, f"from ...ops import autopar: {wrong}"
