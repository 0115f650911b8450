"""Numbers for people: ms, GiB and tables appear only when printing."""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return the lines of a table whose first `left` columns are aligned left, the others right."""
    cells = [header, *rows]
    widths = [max(len(row[c]) for row in cells) for c in range(len(header))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(x.ljust(w) if c < left else x.rjust(w) for c, (x, w) in enumerate(zip(row, widths))).rstrip()

    return [line(header), *(line(row) for row in rows)]
