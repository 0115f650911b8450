"""A plan that does not fit: what is missing, what the smallest one holds, and what would fit at which price."""

from __future__ import annotations

from ..errors import MemoryInfeasibleError
from ..plans.text import in_order
from ..utils.format import byte_column, column, size, table


def refusal_text(error: MemoryInfeasibleError) -> str:
    """Return the message, the memory of the smallest plan, and the changes that were planned, cheapest first, as on the
    command line."""
    sections = [
        [error.message if error.fixes else f"{error.message}; fix: {error.fix}"],
        _smallest(error),
        _fixes(error),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _smallest(error: MemoryInfeasibleError) -> list[str]:
    if not error.breakdown:
        return []
    kinds = in_order(error.breakdown)
    unit, cells = byte_column([*kinds.values(), sum(kinds.values())])
    return table(["memory of a device", unit], list(zip([*kinds, "in all"], cells)))


def _fixes(error: MemoryInfeasibleError) -> list[str]:
    if not error.fixes:
        return []
    unit, bytes_ = byte_column([fix.peak_bytes for fix in error.fixes])
    rows = zip(
        [fix.option for fix in error.fixes],
        [str(fix.devices) for fix in error.fixes],
        column([fix.step_seconds and fix.step_seconds * 1e3 for fix in error.fixes]),
        bytes_,
        ["fits" if fix.fits else f"{size(fix.missing_bytes)} missing" for fix in error.fixes],
    )
    return table(["instead, cheapest first", "devices", "step ms", unit, ""], list(rows))
