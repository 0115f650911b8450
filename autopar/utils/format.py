"""Numbers for people: ms, GiB and tables appear only when printing."""

from __future__ import annotations

import itertools
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence

NARROWEST, FIXED = 80, 120  # columns of text: for a terminal, and where there is none
DOTS = re.compile(r"(\s+|(?<=[._]))")  # where a name may be broken
UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def decimals(largest: float) -> int:
    """Return how many digits after the point show a number, and a column whose largest it is, well enough."""
    return next((digits for bound, digits in ((1e4, 0), (100, 1), (1, 2)) if largest >= bound), 3)


def number(value: float) -> str:
    """Format a number with as many decimals as its size asks for."""
    return f"{value:.{decimals(abs(value))}f}"


def ms(seconds: float) -> str:
    """Format seconds as `12.3 ms`, from ten seconds on as `12.3 s`."""
    return f"{number(seconds)} s" if seconds >= 10 else f"{number(seconds * 1e3)} ms"


def byte_unit(largest: float) -> tuple[str, int]:
    """Return the unit in which `largest` bytes is a number of 1 or more."""
    return next(((name, scale) for name, scale in UNITS if largest >= scale), UNITS[-1])


def size(bytes_: float) -> str:
    """Format bytes in the unit that suits them, as `1.50 GiB`."""
    name, scale = byte_unit(bytes_)
    return f"{bytes_:.0f} B" if name == "B" else f"{number(bytes_ / scale)} {name}"


def count_text(number: int) -> str:
    """Return a number as text such as `8.03B`: three digits, and trillions, billions, millions or thousands."""
    rounded = float(f"{number:.3g}")
    name, scale = next(((n, s) for n, s in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)) if rounded >= s), ("", 1))
    return f"{rounded / scale:.3g}{name}"


def percent(part: float, whole: float) -> str:
    """Format a share as `2.2%`, as `<0.1%` if it would round to nothing."""
    share = part / whole if whole else 0.0
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def column(values: Sequence[float | None]) -> list[str]:
    """Format values with the same number of decimals: `-` for nothing, `<0.01` for less than can be shown."""
    digits = decimals(max((v for v in values if v is not None), default=0.0))
    least = 10.0**-digits

    def cell(value: float | None) -> str:
        if not value:
            return "-"
        return f"<{least:.{digits}f}" if 0 < value < least / 2 else f"{value:.{digits}f}"

    return [cell(v) for v in values]


def byte_column(values: Sequence[float | None], suits: float = math.inf) -> tuple[str, list[str]]:
    """Return (unit, cells) of bytes, in the unit that suits the largest, or `suits`, if that is one smaller."""
    largest = max((v for v in values if v is not None), default=0.0)
    name, scale = byte_unit(min(largest, max(suits, largest / 2**10)))
    if name == "B":
        return name, [f"{v:.0f}" if v else "-" for v in values]
    return name, column([None if v is None else v / scale for v in values])


def text_width() -> int:
    """Return how many columns text may have: those of the terminal that stdout is, 80 at least; FIXED elsewhere."""
    is_terminal = getattr(sys.stdout, "isatty", bool)()
    return max(NARROWEST, shutil.get_terminal_size((FIXED, 24)).columns) if is_terminal else FIXED


def fit(text: str) -> str:
    """Return text with its lines broken at the width of the terminal; as it is where stdout is none, because programs
    read whole lines."""
    if not getattr(sys.stdout, "isatty", bool)():
        return text
    width = text_width()
    lines = (line if len(line) <= width else "\n  ".join(_broken(line, width - 2)) for line in text.split("\n"))
    return "\n".join(lines)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, indent: str = "") -> list[str]:
    """Return the lines of a table whose first `left` columns are aligned left, the others right. Where it is wider than
    `text_width`, words of a cell go on in the line below: in columns of text first, then in headers, then in names."""
    cells = [header, *rows]
    widths = _widths(list(zip(*cells)), left, text_width() - len(indent))

    def lines(row: Sequence[str]) -> list[str]:
        broken = [[x] if len(x) <= w else _broken(x, w, c == 0) for c, (x, w) in enumerate(zip(row, widths))]
        return [
            indent
            + "  ".join(x.ljust(w) if c < left else x.rjust(w) for c, (x, w) in enumerate(zip(line, widths))).rstrip()
            for line in itertools.zip_longest(*broken, fillvalue="")
        ]

    return [line for row in cells for line in lines(row)]


def _widths(columns: Sequence[Sequence[str]], left: int, width: int) -> list[int]:
    """Return the widths of a table's columns: those of their longest cells, less where the table would be wider than
    `width`, but no less than their longest words."""
    widths = [max(map(len, column)) for column in columns]
    excess = sum(widths) + 2 * (len(widths) - 1) - width
    if excess <= 0:
        return widths
    least = [max(len(part) for x in column for part in _broken(x, 1, c == 0)) for c, column in enumerate(columns)]
    for group in (range(1, left), range(left, len(widths)), range(1)):
        while excess > 0 and (open_ := [c for c in group if widths[c] > least[c]]):
            widths[max(open_, key=lambda c: widths[c])] -= 1
            excess -= 1
    return widths


def _broken(cell: str, width: int, is_name: bool = False) -> list[str]:
    """Return a cell in lines of at most `width`, words whole; the words of a name end at its dots."""
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=is_name)
    wrapper.wordsep_re = DOTS
    return wrapper.wrap(cell) or [""]
