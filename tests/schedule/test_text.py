import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from autopar.schedule import KINDS, Played, make, play
from autopar.schedule.svg import svg
from autopar.schedule.text import grid, summary
from autopar.schedule.trace import trace_of


@pytest.mark.parametrize("name", KINDS)
def test_grid(name, golden):
    p = 2 if KINDS[name].chunks != 1 else 4
    played = play(make(name, p, {"naive": 1, "zb_h2": 8}.get(name, 4)))
    golden(f"{summary(played)}\n{grid(played)}\n")


def test_a_column_is_a_unit_of_time():
    played = play(make("1f1b", 2, 2), 1.0, 1.0, 1.0, 0.5)
    assert grid(played, 0.5).splitlines() == [
        "rank 0: F0 -  F1 -  .  .  .  .  .  .  B0 -  -  -  .  .  B1 -  -  -",
        "rank 1: .  .  .  F0 -  B0 -  -  -  F1 -  B1 -  -  -  .  .  .  .  .",
    ]


@pytest.mark.parametrize("seconds", [(1.0, 1.0, 0.001), (0.0, 1.0, 1.0), (1e-4, 1e-4, 1.0)])
@pytest.mark.parametrize("unit", [None, 0.5, 3.0, 50.0])
def test_every_action_is_there_however_short(seconds, unit):
    played = play(make("zb_h1", 2, 4), *seconds, 0.1)
    for rank, line in enumerate(grid(played, unit).splitlines()):
        found = [cell for cell in re.split(r"[ +]+", line.partition(": ")[2]) if cell not in ".-"]
        assert found == [f"{action.kind}{action.micro_batch}" for action in played.schedule.orders[rank]]
    assert len({len(line) for line in grid(played, unit).splitlines()}) <= 2


def measured():
    """A run on a clock that did not begin at 0."""
    played = play(make("zbv", 2, 3), 0.001, 0.002, 0.0015, 0.0001)
    times = [tuple(tuple(t + 1234.5 for t in row) for row in rows) for rows in (played.starts, played.ends)]
    return played, Played(played.schedule, *times)


def test_measured_times_are_drawn_alike():
    predicted, real = measured()
    assert grid(real) == grid(predicted)
    assert real.bubble == pytest.approx(predicted.bubble) and real.peaks == predicted.peaks
    starts = [[e["ts"] for e in trace_of(one)["traceEvents"] if e["ph"] == "X"] for one in (real, predicted)]
    assert starts[0] == pytest.approx(starts[1], abs=0.01)


def test_the_trace_has_every_action():
    played = play(make("zb_h1", 3, 4), 1e-3, 2e-3, 1e-3)
    trace = json.loads(json.dumps(trace_of(played)))
    boxes = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [(e["pid"], e["name"]) for e in boxes] == [(rank, str(action)) for rank, action, *_ in played]
    assert {e["cat"]: e["dur"] for e in boxes} == {"forward": 1000, "input gradient": 2000, "weight gradient": 1000}
    assert {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"} == {
        "rank 0",
        "rank 1",
        "rank 2",
    }
    held = [e["args"]["in flight"] for e in trace["traceEvents"] if e["ph"] == "C" and e["pid"] == 0]
    assert max(held) == played.peak(0) and held[0] == held[-1] == 0


@pytest.mark.parametrize("name", KINDS)
def test_the_picture(name):
    played = play(make(name, 4, 12))
    root = ElementTree.fromstring(svg(played, "a < b & c"))
    space = "{http://www.w3.org/2000/svg}"
    width = float(root.get("width"))
    boxes = [box for box in root.iter(f"{space}rect") if box.find(f"{space}title") is not None]
    assert [box.find(f"{space}title").text.split(":")[0] for box in boxes] == [str(action) for _, action, *_ in played]
    assert all(0 <= float(box.get("x")) and float(box.get("x")) + float(box.get("width")) <= width for box in boxes)
    assert root.find(f"{space}title").text == "a < b & c"
    legend = [rect for rect in root.iter(f"{space}rect") if rect.find(f"{space}title") is None and rect.get("rx")]
    assert {rect.get("class") for rect in legend} >= {box.get("class").split()[0] for box in boxes} | {"idle"}
    assert any(" odd" in rect.get("class") for rect in legend) == any(" odd" in box.get("class") for box in boxes)
    assert max(float(rect.get("y")) for rect in legend) + 12 < min(float(box.get("y")) for box in boxes)
    words = {text.text: float(text.get("x")) for text in root.iter(f"{space}text")}
    assert words["number: the micro-batch"] + 130 < width and {"the rank waits", "forward"} <= set(words)
    numbers = [text.text for text in root.iter(f"{space}text") if text.get("class") == "number"]
    assert len(numbers) == len(boxes)


def test_a_large_picture_has_a_bounded_width_and_no_links():
    picture = svg(play(make("1f1b", 8, 300)))
    assert float(ElementTree.fromstring(picture).get("width")) < 4200
    assert "prefers-color-scheme: dark" in picture
    assert re.findall(r"https?://\S+", picture) == ['http://www.w3.org/2000/svg"']


def test_a_wide_grid_goes_on_below():
    played = play(make("zbv", 4, 8))
    whole, folded = grid(played).splitlines(), grid(played, width=100).splitlines()
    assert max(map(len, whole)) > 200 and max(map(len, folded)) <= 100
    rows = [" ".join(line.partition(": ")[2] for line in folded[rank::5]) for rank in range(4)]  # an empty line each
    assert [row.split() for row in rows] == [line.partition(": ")[2].split() for line in whole]
