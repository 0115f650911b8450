"""The report is one page: well formed, without references to anything outside, escaped, and with the plan's numbers in it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from autopar import api
from autopar.cli import main
from autopar.models import build
from autopar.planner.timeline import simulate
from autopar.units import ms, size
from autopar.view.html import VOID, Html, joined, tag
from autopar.view.report import report_page


class Page(HTMLParser):
    """Text, elements and attributes of a page whose elements all close."""

    def __init__(self, page: str):
        super().__init__()
        self.open, self.texts, self.elements = [], [], []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, text):
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(text)


@pytest.fixture(scope="module")
def planned():
    model, inputs = build("gpt2-tiny:layers=2", batch=8, seq=16)
    return api.search(model, "dp=2,tp=2", inputs, hardware="cpu-gloo", name="gpt <2>", strategy="megatron", baselines=True)


def test_the_page_is_whole_and_stands_alone(planned):
    text = report_page(planned)
    page = Page(text)
    assert text == report_page(planned) and text.startswith("<!doctype html>")
    assert not re.search(r"https?://|//cdn|@import|url\(", text)
    assert not [a for _, a in page.elements if a.keys() & {"src", "href", "srcset", "data"}]
    assert {"svg", "details", "table", "script", "style"} <= {name for name, _ in page.elements}
    assert "gpt <2> on mesh dp=2,tp=2" in page.texts and "<2>" not in text


def test_the_numbers_of_the_plan_are_in_it(planned):
    plan, page = planned.plan, Page(report_page(planned))
    said = " ".join(page.texts)
    for seconds in (plan.step_seconds, plan.simulated_seconds, plan.exposed_seconds, plan.compute_seconds,
                    plan.communication_seconds, plan.bound):  # fmt: skip
        assert ms(seconds) in said
    for bytes_ in (plan.peak_bytes, plan.memory_limit_bytes, planned.live_bytes.peak_bytes):
        assert size(bytes_) in said
    for name in (*plan.memory, *(a.name for a in plan.alternatives), *(c.kind for c in plan.collectives)):
        assert name in said
    for name, layout in plan.layouts.items():
        assert re.sub(r"(?<=\.)\d+(?=\.)", "*", name) in said and layout in said
    for region in plan.regions:
        assert region.name.rpartition(".")[2] in said
    bars = [a for name, a in page.elements if name == "rect"]
    assert len(bars) == sum(len(e.streams) for e in planned.timeline.events)


def test_another_timeline(planned):
    slower = simulate(planned.problem, planned.evaluation, 1.5)
    assert ms(slower.seconds) in report_page(planned, slower)


def test_the_command(tmp_path, capsys):
    words = ["--model", "mlp-tiny:layers=1", "--mesh", "dp=2", "--batch", "4", "--seq", "4", "--hardware", "cpu-gloo"]
    out = tmp_path / "report.html"
    assert main(["report", *words, "--no-baselines", "--slowdown", "1.1", "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: ") and Page(out.read_text())
    assert main(["report", *words, "--slowdown", "0.5", "--out", str(out)]) == 2
    assert "0.5 is not 1 or more" in capsys.readouterr().err
    assert main(["report", *words, "--no-baselines", "--out", str(tmp_path / "no" / "folder")]) == 2


def test_text_is_escaped():
    assert tag("td", "a<b", Html("<i>c</i>"), class_='x"y', data_zoom=2, open=True, hidden=None) == (
        '<td class="x&quot;y" data-zoom="2" open>a&lt;b<i>c</i></td>')  # fmt: skip
    assert tag("meta", x=1) == '<meta x="1">' and joined(["&", tag("b")]) == "&amp;<b></b>"
