"""Explanations: alternatives are whole plans, their differences add up, and the binding constraint is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.api import entry as api
from autopar.cli.main import main
from autopar.errors import StrategyError
from autopar.planner.explain import explain_plan, runners_up

from .planning import toy


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, width: int = 32):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width), Block(width)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


MACHINE = toy(flops=1e10, memory=1e11, latency=1e-6)


def searched(**options):
    return api.search(
        Net(), "dp=2,tp=2", {"x": torch.randn(64, 32)}, hardware=MACHINE, baselines=False, name="net", **options
    )


@pytest.fixture(scope="module")
def planned():
    return searched()


def test_text(planned, golden):
    explanation = autopar.explain(planned, "blocks.*.up*", alternatives=3)
    golden(str(explanation))
    assert str(autopar.explain(planned, "blocks.*.up*", alternatives=3)) == str(explanation)


def test_what_hides_is_a_column_of_its_own():
    """On a machine that computes while it communicates."""
    planned = api.search(Net(128), "dp=4", {"x": torch.randn(1024, 128)}, hardware="h100", baselines=False)
    explanation = explain_plan(planned, "blocks.0.up.weight", 3, 1)
    assert "= compute  + comm here  + elsewhere  - hidden" in str(explanation)
    assert any(i.hidden_seconds for i in explanation.choices[0].instead)
    for i in explanation.choices[0].instead:
        parts = i.compute_seconds + i.here_seconds + i.elsewhere_seconds - i.hidden_seconds
        assert i.step_seconds - planned.chosen.seconds == pytest.approx(parts, abs=1e-12)


def test_differences_add_up_and_forced_plans_are_not_faster(planned):
    for choice in explain_plan(planned, "blocks.0*").choices:
        for i in choice.instead:
            assert i.fits and i.text != choice.chosen
            parts = i.compute_seconds + i.here_seconds + i.elsewhere_seconds - i.hidden_seconds
            assert i.step_seconds - planned.chosen.seconds == pytest.approx(parts, abs=1e-12)
            assert i.step_seconds >= planned.chosen.seconds * (1 - 2e-3)


def test_a_forced_strategy_is_what_a_pin_gives(planned):
    (choice,) = explain_plan(planned, "blocks.0.up.weight", alternatives=20).choices
    assert choice.copies == 1 and choice.left_out == 0 and "test_explain.py:" in choice.source
    sharded = next(i for i in choice.instead if i.text == "tp:S(0)")
    pinned = searched(pin={"blocks.0.up.weight": "tp:S(0)"}, forbid={"blocks.0.up.weight": ["dp:S(0)", "dp:S(1)"]})
    assert sharded.step_seconds == pytest.approx(pinned.evaluation.seconds, rel=5e-3)


def test_bounds_of_the_next_best_layouts(planned):
    second = runners_up(planned)
    assert set(second) >= {"blocks.0.up.weight", "blocks.1.down.weight", "x"}
    for name in ("blocks.0.up.weight", "blocks.1.down.weight"):
        (choice,) = explain_plan(planned, name, 20).choices
        least = min(i.step_seconds for i in choice.instead) - planned.chosen.seconds
        text, seconds = second[name]
        assert text in {i.text for i in choice.instead}
        assert 0 <= seconds <= least + 2e-3 * planned.chosen.seconds


def test_the_finished_search_stays_as_it_was(planned):
    before = len(planned.chosen.found), planned.plan.hash
    explain_plan(planned, "*.bias", alternatives=1)
    assert (len(planned.chosen.found), planned.plan.hash) == before


def test_what_binds():
    pinned = searched(pin={"*.up.weight": "tp:S(0)"})
    choice = explain_plan(pinned, "*.up.weight", 20, 1).choices[0]
    assert choice.binding == "pinned by *.up.weight=tp:S(0)" and "R" in {i.text for i in choice.instead}
    ddp = searched(strategy="ddp")
    assert explain_plan(ddp, "*.up.weight", 1).choices[0].binding == "strategy ddp"


def test_a_memory_limit_binds_where_the_plan_without_it_chooses_otherwise(planned, monkeypatch):
    replicated = planned.solver.baseline("ddp")
    monkeypatch.setattr("autopar.planner.explain._Explainer._without_limit", lambda self: replicated)
    (choice,) = explain_plan(planned, "blocks.1.up.weight", 1).choices
    assert choice.binding == "memory limit, without it R"


def test_a_limit_of_choices_and_of_alternatives(planned):
    explanation = explain_plan(planned, "*", alternatives=1, choices=2)
    assert (
        len(explanation.choices) == 2
        and explanation.left_out > 2
        and f"{explanation.left_out} more match" in str(explanation)
    )
    assert all(len(c.instead) == 1 and c.left_out > 0 for c in explanation.choices)


def test_bad_patterns_and_the_command(planned, capsys):
    with pytest.raises(StrategyError, match="matches no parameter") as error:
        explain_plan(planned, "blocks.0.upp.weight")
    assert "blocks.0.up.weight" in error.value.fix
    with pytest.raises(StrategyError, match=r"whole names: write '\*up\*'"):
        explain_plan(planned, "up")
    with pytest.raises(StrategyError, match="names are such as blocks.0.up.weight"):
        explain_plan(planned, "attention")
    words = ["--model", "mlp-tiny:layers=1", "--mesh", "dp=2", "--batch", "4", "--seq", "4", "--hardware", "cpu-gloo"]
    assert main(["explain", "*.up.weight", *words, "--alternatives", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[2] == "parameter blocks.0.up.weight (256, 64)"
    assert main(["explain", "*.upp.weight", *words]) == 2
    assert "matches no parameter" in capsys.readouterr().err
