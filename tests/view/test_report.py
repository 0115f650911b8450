"""The report is one page: well formed, without references to anything outside, escaped, and with the plan's numbers in
it."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser

import pytest

from autopar.api import entry as api
from autopar.cli.main import main
from autopar.models import build
from autopar.planner.explain import runners_up
from autopar.plans.file import MEMORY_KINDS
from autopar.plans.text import alternatives_table, memory_table
from autopar.utils.format import byte_unit, count_text, ms, size
from autopar.view.charts import MEMORY_CLASSES
from autopar.view.html import VOID, Html, joined, tag
from autopar.view.report import FOLDER, report_page


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
    return api.search(
        model, "dp=2,tp=2", inputs, hardware="cpu-gloo", name="gpt <2>", strategy="megatron", baselines=True
    )


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
    for seconds in (plan.step_seconds, plan.exposed_seconds, plan.compute_seconds,
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


def cells_of(text: str) -> list[list[str]]:
    """Texts of the cells of every row of every table."""
    rows = re.findall(r"<tr>(.*?)</tr>", text)
    return [
        [unescape(re.sub(r"<[^>]*>", "", cell)) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)]
        for row in rows
    ]


@pytest.mark.parametrize("table_of", [memory_table, alternatives_table])
def test_tables_are_those_of_the_text(planned, table_of):
    header, rows = table_of(planned.plan)
    cells = cells_of(report_page(planned))
    for (name, *numbers), line in zip(rows, cells[next(i for i, c in enumerate(cells) if c[2:] == header) + 1 :]):
        assert line == [name, "", *numbers]


def test_one_number_is_the_headline(planned):
    page, css = Page(report_page(planned)), (FOLDER / "report.css").read_text()
    assert [a["class"] for name, a in page.elements if a.get("class") == "headline"] == ["headline"]
    after = page.texts[page.texts.index(ms(planned.plan.step_seconds)) + 1]
    assert after == " a step of 8 samples, predicted"
    sizes = {float(size): rule for rule, size in re.findall(r"^([^{}\n]+) \{[^}]*font-size: ([\d.]+)rem", css, re.M)}
    assert sizes[max(sizes)] == ".headline b"


def test_no_table_is_cut_off(planned):
    assert widest_of(report_page(planned)) < 1148 and not clipped()


def clipped() -> list[str]:
    """The rules of the style sheet that keep words of tables on one line, but for numbers."""
    rules = re.findall(r"^ *([^{}\n]+) \{([^}]*)\}", (FOLDER / "report.css").read_text(), re.M)
    kept = [name for rule, style in rules if "nowrap" in style for name in rule.split(",")]
    return [name for name in kept if re.search(r"\b(th|td|table|code)\b", name) and "number" not in name]


def widest_of(text: str) -> float:
    """Pixels that the widest table needs at least: of its numbers and longest words, at 8 a letter."""
    needed = []
    for table in re.findall(r"<table>(.*?)</table>", text):
        rows = re.findall(r"<tr>(.*?)</tr>", table)
        cells = [re.findall(r"<(t[dh])( class=\"number\")?[^>]*>(.*?)</t[dh]>", row) for row in rows]
        words = [
            [len(max([x] if kind == "td" and number else x.split() or [""], key=len))
             for kind, number, x in ((k, n, unescape(re.sub(r"<[^>]*>", "", c))) for k, n, c in row)]
            for row in cells
        ]  # fmt: skip
        needed.append(sum(12 + 8 * max(column) for column in zip(*words)))
    return max(needed)


def test_every_colour_is_defined(planned):
    page, css = Page(report_page(planned)), (FOLDER / "report.css").read_text()
    drawn = {a["class"] for name, a in page.elements if name in ("i", "rect", "path") and "class" in a}
    assert len(drawn) > 6
    for class_ in drawn | set(MEMORY_CLASSES.values()) | {"again", "slice", "all_to_all"}:
        colour = re.search(rf"^\.{class_}[ ,].*background: var\((--\w+)\)", css, re.MULTILINE)
        assert colour and f"{colour[1]}: #" in css, class_
    assert set(MEMORY_CLASSES) == set(MEMORY_KINDS)


def test_both_charts_have_units(planned):
    said = re.findall(r"<span style=\"(left|top):[^>]*>[\d.e-]+ (\w+)<", report_page(planned))
    assert {(side, unit) for side, unit in said} == {("left", "ms"), ("top", byte_unit(planned.plan.peak_bytes)[0])}


@pytest.mark.slow
def test_blocks_that_one_stands_for_have_its_runner_up():
    model, inputs = build("gpt2-tiny:layers=12", batch=8, seq=16)
    planned = api.search(model, "dp=2,tp=2", inputs, hardware="cpu-gloo", recompute="selective", baselines=False)
    assert planned.problem.compact
    text = report_page(planned)
    rows = [row for row in cells_of(text) if row[0].startswith("h.*.ln_1.weight")]
    assert sum(int(row[0].partition(" ×")[2] or 1) for row in rows) == 12
    second, chosen = runners_up(planned), planned.plan.layouts
    for small, whole in (("h.0.ln_1.weight", "h.0.ln_1.weight"), ("h.7.ln_1.weight", "h.11.ln_1.weight")):
        layout, seconds = second[small]
        assert any(row[1:3] == [chosen[whole], layout if seconds > 0 else "-"] for row in rows)
    assert "12 recomputed in part" in text and "Recomputed in the backward: " in text


def test_passes():
    model, inputs = build("mlp-tiny:layers=1", batch=4, seq=4)
    planned = api.search(model, "dp=2", inputs, hardware="cpu-gloo", micro_batches=2, baselines=False)
    plan, said = planned.plan, " ".join(Page(report_page(planned)).texts)
    assert plan.step_seconds > 1.5 * planned.timeline.seconds and f"{ms(plan.step_seconds)} played" in said
    assert "One of the step's 2 micro-batches" in said and "2 micro-batches of 2 samples" in said
    slower = planned.played(1.5)
    assert "one of 2 micro-batches, " in " ".join(Page(report_page(planned, slower)).texts)


def test_meshes_and_the_host_are_told():
    model, inputs = build("mlp-tiny:layers=1", batch=4, seq=4)
    planned = api.search(model, 2, inputs, hardware="h100", offload="optimizer", baselines=False)
    said = " ".join(Page(report_page(planned)).texts)
    assert "Meshes tried" in said and all(str(m.mesh) in said for m in planned.plan.meshes)
    assert f"{ms(planned.plan.offloaded.seconds)} offload" in said and "On the host: " in said


@pytest.mark.parametrize(
    "number, text", [(7, "7"), (999_400, "999K"), (999_700, "1M"), (8_030_261_248, "8.03B"), (2e12, "2T")]
)
def test_counts(number, text):
    assert count_text(number) == text


def test_another_timeline(planned):
    slower = planned.played(1.5)
    assert ms(slower.seconds + planned.plan.update_seconds) in report_page(planned, slower)


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
