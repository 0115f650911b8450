"""A pipeline's plan explained, reported and traced; its measured schedule beside the predicted one; two plans
compared."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autopar.api import entry as api
from autopar.cli.main import main
from autopar.errors import StrategyError
from autopar.models import build
from autopar.planner.explain_pipeline import explain_pipeline
from autopar.plans.compare import side_by_side
from autopar.plans.diff import diff_text
from autopar.plans.pipeline import Pipeline
from autopar.schedule import KINDS, make, overlay, play, save
from autopar.utils.format import ms
from autopar.view.pipeline_report import pipeline_page
from autopar.view.pipeline_trace import pipeline_trace_of

from .test_report import Page, widest_of

MODEL = "gpt:hidden=32,layers=2,heads=4,vocab=64,seq=16"


@pytest.fixture(scope="module")
def planned():
    model, inputs = build(MODEL, batch=8, seq=16)
    options = dict(hardware="cpu-gloo", name="gpt <2>", schedule="1f1b", micro_batches=4, baselines=False)
    return api.search(model, "pp=2,dp=2", inputs, **options)


@pytest.fixture(scope="module")
def explained(planned):
    return explain_pipeline(planned, "h.0.mlp.c_fc.weight")


def test_parts_of_a_step_add_up(planned, explained):
    for priced in (explained.micro_batches, explained.schedules, explained.cuts):
        assert sum(one.chosen for one in priced) == 1
        for one in (one for one in priced if not one.note):
            assert one.works_seconds + one.reduces_seconds + one.waits_seconds == pytest.approx(one.step_seconds)
            assert one.step_seconds == pytest.approx(planned.plan.step_seconds) or not one.chosen
    for rank in explained.ranks:
        seconds = rank.forward_seconds + rank.backward_seconds + rank.reduces_seconds + rank.waits_seconds
        assert seconds == pytest.approx(planned.plan.step_seconds)
    assert max(rank.peak_bytes for rank in explained.ranks) == pytest.approx(planned.plan.peak_bytes)


def test_alternatives_are_those_that_there_are(planned, explained):
    assert [one.text for one in explained.micro_batches] == ["2 of 4 samples", "4 of 2 samples", "8 of 1 sample"]
    assert {one.text.partition(",")[0] for one in explained.schedules} == set(KINDS)
    slowest = max(explained.schedules, key=lambda one: one.step_seconds)
    assert slowest.text == "naive" and slowest.works_seconds < slowest.waits_seconds
    said = str(explained)
    assert "* 1f1b" in said and "h.0.mlp.c_fc.weight" in said and "inside of the stages" in said
    assert str(explain_pipeline(planned)) in said


def test_a_pattern_is_for_plans_without_a_pipeline():
    model, inputs = build("mlp-tiny:layers=1", batch=4, seq=4)
    with pytest.raises(StrategyError, match="nothing to explain"):
        api.explain(model, mesh="dp=2", example_inputs=inputs, hardware="cpu-gloo")


def test_the_report(planned, explained):
    text = pipeline_page(planned, explained)
    page, plan = Page(text), planned.plan
    said = " ".join(page.texts)
    assert "gpt <2> on mesh pp=2,dp=2" in page.texts and "<2>" not in text
    assert ms(plan.step_seconds) in said and all(c.name in said for c in plan.pipeline.costs)
    assert all(kind in said for held in planned.staged.evaluated.memory for kind in held)
    titles = [t for t in page.texts if t.startswith(("0F", "1F", "0B", "1B"))]
    assert len(titles) == sum(map(len, plan.pipeline.orders.orders))
    assert page.texts.count(ms(plan.step_seconds)) >= 1 and "the rank waits" in page.texts  # of the legend
    assert widest_of(text) < 1148
    assert "Other micro-batches" in said and "Other micro-batches" not in pipeline_page(planned)


def test_the_trace(planned):
    events, evaluated = json.loads(json.dumps(pipeline_trace_of(planned)))["traceEvents"], planned.staged.evaluated
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == [f"rank {r} of gpt <2> on mesh pp=2,dp=2, predicted" for r in range(2)]
    work = [e for e in events if e["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in work) == pytest.approx(evaluated.step_seconds * 1e6, rel=1e-3)
    sends = [e for e in work if e["cat"] == "send"]
    assert len(sends) == 2 * evaluated.pipeline.micro_batches and all(e["tid"] == 1 for e in sends)
    for rank in range(2):  # the counter's highest is what the plan charges
        held = [sum(e["args"].values()) for e in events if e["ph"] == "C" and e["pid"] == rank]
        assert max(held) == pytest.approx(sum(evaluated.memory[rank].values()), abs=10)


def test_plans_are_compared(planned):
    flat = replace(planned.plan, pipeline=Pipeline())
    rows = {
        line.split("  ")[0]: line.split()[-2:] for line in side_by_side([planned.plan, flat], ["a", "b"]).splitlines()
    }
    assert rows["schedule"] == ["1f1b", "-"] and rows["micro-batches"] == ["4", "1"]
    said = diff_text(planned.plan, flat)
    assert "  schedule: 1f1b -> none" in said and "  stage 1: " in said and diff_text(planned.plan, planned.plan) == ""


def test_measured_beside_predicted(tmp_path):
    predicted, measured = (
        play(make("zb_h1", 2, 4), 1e-3, 1e-3, 1e-3),
        play(make("zb_h1", 2, 4), 2e-3, [1e-3, 3e-3], 1e-3),
    )
    rows = [line.split() for line in overlay(predicted, measured).splitlines()]
    assert ["stage", "0,", "rank", "0", "forward", "1.00", "2.00", "2.00"] in rows
    assert ["backward", "2.00", "4.00", "2.00"] in rows
    runs = {"predicted": predicted, "measured": measured}
    for form in ("svg", "html", "txt", "json"):
        save(tmp_path / f"x.{form}", runs)
        assert (
            "predicted" in (tmp_path / f"x.{form}").read_text() and "measured" in (tmp_path / f"x.{form}").read_text()
        )
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        "predicted rank 0", "predicted rank 1", "measured rank 0", "measured rank 1"]  # fmt: skip


@pytest.mark.slow
def test_commands(capsys, tmp_path):
    words = [
        "--model",
        "mlp-tiny:layers=3",
        "--mesh",
        "pp=2,dp=2",
        "--batch",
        "8",
        "--seq",
        "4",
        "--hardware",
        "cpu-gloo",
    ]
    one = ["--schedule", "1f1b", "--micro-batches", "2"]
    assert main(["explain", *words, *one]) == 0 and "cuts into stages" in capsys.readouterr().out
    assert main(["report", *words, *one, "--no-baselines", "--out", str(tmp_path / "r.html")]) == 0
    assert main(["trace", *words, *one, "--out", str(tmp_path / "t.json")]) == 0
    assert "8 actions of 2 ranks" in capsys.readouterr().out
    assert main(["trace", *words, "--slowdown", "1.5", "--out", str(tmp_path / "t.json")]) == 2
    assert main(["verify", *words]) == 0 and " 0 forward" not in (out := capsys.readouterr().out)
    assert "sent between stages" in out
    assert main(["graph", *words, "--rank", "2"]) == 0 and "\nstage 1 of 2: " in capsys.readouterr().out
    assert main(["graph", *words[:3], "dp=2", *words[4:], "--after", "cut"]) == 2
    assert main(["train", *words[:3], "dp=2", *words[4:-2], "--trace", str(tmp_path / "x.svg")]) == 2
