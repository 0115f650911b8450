import io
import sys

import pytest

from autopar.utils import format as text
from autopar.utils.format import byte_column, column, fit, ms, percent, size, table, text_width


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0.000 ms"),
        (3.2e-6, "0.003 ms"),
        (7.926e-3, "7.93 ms"),
        (0.2806, "280.6 ms"),
        (9.5, "9500.0 ms"),
        (61.5, "61.50 s"),
    ],
)
def test_ms(seconds, text):
    assert ms(seconds) == text


@pytest.mark.parametrize(
    "bytes_, text", [(0, "0 B"), (512, "512 B"), (1536, "1.50 KiB"), (80e9, "74.51 GiB"), (3e12, "2.73 TiB")]
)
def test_size(bytes_, text):
    assert size(bytes_) == text


def test_percent():
    assert [percent(p, 1000) for p in (0, 0.1, 22, 1000)] == ["0.0%", "<0.1%", "2.2%", "100.0%"]
    assert percent(1, 0) == "0.0%"


def test_a_column_has_one_number_of_decimals_and_no_noise():
    assert column([12.345, 1.0, 0.001, 0.0, None]) == ["12.35", "1.00", "<0.01", "-", "-"]
    assert column([]) == []


def test_a_byte_column_has_the_unit_of_its_largest():
    assert byte_column([2**30, 2**29, 1.0, 0.0]) == ("GiB", ["1.00", "0.50", "<0.01", "-"])
    assert byte_column([4.0, 0.0]) == ("B", ["4", "-"])
    assert byte_column([2**30, 2**19], 2**19) == ("MiB", ["1024.0", "0.5"])


def test_table():
    assert table(["a", "n"], [["long", "1"], ["x", "200"]]) == ["a       n", "long    1", "x     200"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns, width", [("40", 80), ("100", 100), ("300", 300)])
def test_text_is_as_wide_as_the_terminal_but_80_at_least(columns, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert text_width() == 120 and fit("word " * 60 + "\n") == "word " * 60 + "\n"  # no terminal
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert fit(f"{'x ' * (width // 2)}\n") == f"{'x ' * (width // 2)}\n"  # fits
    lines = fit("short\n" + "word " * 80 + "\n").splitlines()
    assert text_width() == width and lines[0] == "short" and all(line.startswith("  word") for line in lines[2:])
    assert width - 7 <= max(map(len, lines)) <= width and " ".join(" ".join(lines[1:]).split()) == "word " * 79 + "word"


def test_a_table_that_is_too_wide_goes_on_below(monkeypatch):
    """Text is broken first, then headers, names last and at their dots; nothing is lost, and no word is cut."""
    header, row = ["module", "what", "step ms"], ["layers.attention.query", "one two three", "1.0"]
    expected = {
        46: ["module                  what           step ms", "layers.attention.query  one two three      1.0"],
        36: ["module                  what    step", "                                  ms",
             "layers.attention.query  one      1.0", "                        two", "                        three"],
        24: ["module       what   step", "                      ms", "layers.      one     1.0", "attention.   two",
             "query        three"],
    }  # fmt: skip
    for width, lines in expected.items():
        monkeypatch.setattr(text, "text_width", lambda width=width: width)
        assert table(header, [row], left=2) == lines
        assert table(header, [["x", "", "1"]], left=2, indent="  ")[0] == "  module  what  step ms"
