"""`autopar compare` and `autopar diff`: saved plans next to each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autopar
from autopar.cli.main import main
from autopar.models import build
from autopar.plans.compare import side_by_side
from autopar.plans.diff import diff_text


@pytest.fixture(scope="module")
def plans():
    model, inputs = build("gpt2-tiny", batch=8, seq=64)
    options = dict(hardware="cpu-gloo", name="gpt2-tiny", baselines=False)
    return {name: autopar.plan(model, "dp=2,tp=2", inputs, strategy=name, **options) for name in ("megatron", "fsdp")}


@pytest.fixture
def files(plans, tmp_path):
    for name, plan in plans.items():
        plan.save(tmp_path / f"{name}.json")
    return [str(tmp_path / f"{name}.json") for name in plans]


def test_compare(plans, files, capsys, golden):
    assert main(["compare", *files]) == 0
    out = capsys.readouterr().out
    assert out == side_by_side(list(plans.values()), list(plans))
    golden(out)


def test_compare_names_equal_files_by_their_paths(files, capsys):
    assert main(["compare", files[0], files[0]]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["plan", files[0], files[0]]


def test_diff(files, capsys, golden):
    assert main(["diff", *files]) == 1
    golden(capsys.readouterr().out)


def test_equal_plans_do_not_differ(files, capsys):
    assert main(["diff", files[0], files[0]]) == 0
    assert capsys.readouterr().out == ""


def test_only_what_differs_is_said(plans):
    plan = plans["fsdp"]
    again = replace(plan, recomputed=("h.0", "h.1"), layouts=plan.layouts | {"ln_f.bias": "tp:S(0)"})
    assert diff_text(plan, again).splitlines() == [
        "layouts of parameters and inputs", f"  ln_f.bias: {plan.layouts['ln_f.bias']} -> tp:S(0)", "",
        "recomputed in the backward", "  h.* (x2): none -> all",
    ]  # fmt: skip


@pytest.mark.parametrize("command", ["compare", "diff"])
def test_a_file_that_is_no_plan(command, files, tmp_path, capsys):
    (tmp_path / "old.json").write_text('{"version": 2}')
    for bad in (str(tmp_path / "old.json"), str(tmp_path / "none.json")):
        assert main([command, files[0], bad]) == 2
        err = capsys.readouterr().err
        assert len(err.splitlines()) == 1 and bad in err and "fix: " in err
