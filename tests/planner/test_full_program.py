"""`solver="ilp"`: the full integer program by OR-tools finds what the search finds, and proves no less."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from pathlib import Path

import pytest

import autopar
from autopar.cli.main import main
from autopar.errors import StrategyError
from autopar.models import registry
from autopar.planner import problem
from autopar.planner.solver.minimize import ILP, Search

from .planning import make, toy

GAP = Search().gap
MLP = "mlp:hidden=32,layers=2"
GPT = "gpt:hidden=32,layers=2,heads=4,vocab=64,seq=16"
LLAMA = "llama:hidden=32,layers=1,heads=4,kv_heads=2,ffn=64,vocab=64,seq=16"
MACHINE = replace(toy(flops=1e11, memory=1e10, latency=1e-6, bucket=1 << 16), overlap_slowdown=1.1)
PROGRAM = Search(solver=ILP)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("model", "mesh", "options"), [
    (MLP, "a=4", {}), (MLP, "a=2,b=2", {}), (GPT, "a=2", {}), (GPT, "a=4", {"strategy": "fsdp"}),
    (GPT, "dp=2,tp=2", {"strategy": "megatron_sp"}), (LLAMA, "a=4", {"micro_batches": 2}), (LLAMA, "a=2,b=2", {}),
])  # fmt: skip
def test_plans_agree(model, mesh, options):
    """The search's plan takes no more than its gap above the program's, its bound is no higher; the program's plan
    takes what the program says."""
    found = make(model, mesh, MACHINE, **options)
    exact = make(model, mesh, MACHINE, search=PROGRAM, **options)
    assert exact.gap <= 1e-3
    assert exact.step_seconds <= found.step_seconds * (1 + 1e-4)
    assert found.step_seconds <= exact.step_seconds * (1 + GAP)
    assert found.bound <= exact.step_seconds * (1 + 1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("model", "mesh", "share"), [(MLP, "a=2", 0.75), (GPT, "a=2", 0.8)])
def test_plans_agree_where_memory_binds(model, mesh, share):
    """Both fit, neither's bound is above the other's plan, and the plans are as near as the search's gap says."""
    free = make(model, mesh, MACHINE, batch=64)
    limit = share * free.peak_bytes
    found, exact = (make(model, mesh, MACHINE, batch=64, memory_bytes=limit, search=s) for s in (Search(), PROGRAM))
    assert max(found.peak_bytes, exact.peak_bytes) <= limit
    assert free.step_seconds * (1 - GAP) <= min(found.step_seconds, exact.step_seconds)
    assert max(found.bound, exact.bound) <= min(found.step_seconds, exact.step_seconds) * (1 + 1e-6)
    assert found.step_seconds == pytest.approx(exact.step_seconds, rel=0.05)


def test_of_stages_the_program_knows_nothing():
    model, inputs = registry.build(GPT, batch=8, seq=16, device="meta")
    for mesh in ("pp=2,dp=2", 4):
        with pytest.raises(StrategyError, match="without stages"):
            autopar.plan(model, mesh, inputs, solver=ILP)
    with pytest.raises(StrategyError, match="no solver"):
        autopar.plan(model, "dp=2", inputs, solver="simplex")


def test_the_command_line_has_it_too(capsys):
    arguments = ["plan", "--model", MLP, "--mesh", "dp=2", "--batch", "8", "--seq", "16", "--no-baselines"]
    texts = []
    for solver in ("dual", "ilp"):
        assert main([*arguments, "--solver", solver]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0].splitlines()[0] == texts[1].splitlines()[0]


def test_the_statement_names_what_is_there():
    """Every function and file that the statement of the program names (autopar/planner/problem/__init__.py)."""
    modules = {"Program": "solver.ilp:Program", "full_program": "solver.full_program", "recipes": "problem.recipes",
             "vertices": "problem.vertices"}  # fmt: skip
    named = re.findall(rf"\b({'|'.join(modules)})\.(?!py)(\w+)", problem.__doc__)
    assert len(named) >= 10
    for owner, name in named:
        module, _, inside = modules[owner].partition(":")
        module = importlib.import_module(f"autopar.planner.{module}")
        assert hasattr(getattr(module, inside) if inside else module, name), f"{owner}.{name}"
    folder = Path(problem.__file__).parent
    for file in re.findall(r"[\w/]+\.py", problem.__doc__):
        assert (folder / file).exists() or (folder.parent / file).exists(), file
