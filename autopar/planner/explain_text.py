"""The text of an explanation: every choice with what it beat."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.format import byte_unit, decimals, ms, size, table

if TYPE_CHECKING:
    from .explain import Choice, Explanation


def explain_text(e: Explanation) -> str:
    """Return the text of an explanation: a heading, then a paragraph and a table for each choice."""
    lines = [
        f"{e.pattern} of {e.model} on mesh {e.mesh}: step {ms(e.step_seconds)}, peak {size(e.peak_bytes)} a device",
        *e.routing,
    ]
    for choice in e.choices:
        lines += ["", *_choice(e, choice)]
    if e.schemes:
        lines += ["", *_schemes(e)]
    if e.left_out:
        lines += ["", f"{e.left_out} more match and are left out: name fewer"]
    return "\n".join(lines) + "\n"


def _schemes(e: Explanation) -> list[str]:
    """Say what other schemes would cost in the place of that of the attentions, each planned anew."""
    unit, scale = byte_unit(e.peak_bytes)
    found = [s for s in e.schemes if not s.note]
    more = _signed([1e3 * (s.step_seconds - e.step_seconds) for s in found])
    bytes_ = _signed([(s.bytes_ - e.peak_bytes) / scale for s in found])
    rows = [[s.text, *cells] for s, *cells in zip(found, more, bytes_)]
    without = [f"  {s.text}: {s.note}" for s in e.schemes if s.note]
    lines = table(["other schemes of attention, planned anew", "ms", unit], rows) if rows else []
    return lines + (["no plan:", *without] if without else [])


def _choice(e: Explanation, c: Choice) -> list[str]:
    copies = f" (x{c.copies})" if c.copies > 1 else ""
    module = f", in {c.module}" if c.module and c.kind == "op" else ""
    lines = [f"{c.kind} {c.name}{copies} {c.shape}{module}", f"  chosen: {c.chosen}", f"  binding: {c.binding}"]
    if c.scheme:
        lines.insert(1, f"  scheme: {c.scheme}")
    if c.attends:
        lines.insert(1, f"  attends to {c.attends}")
    if c.source:
        lines.insert(1, f"  at {c.source}" if c.kind == "op" else f"  read at {c.source}")
    if not c.instead:
        return lines
    fitting = [i for i in c.instead if i.fits]
    unit, scale = byte_unit(max((abs(i.bytes_) for i in fitting), default=0.0))
    columns = {
        "ms": [i.step_seconds - e.step_seconds for i in fitting],
        "= compute": [i.compute_seconds for i in fitting],
        "+ comm here": [i.here_seconds for i in fitting],
        "+ elsewhere": [i.elsewhere_seconds for i in fitting],
        "- hidden": [i.hidden_seconds for i in fitting],
    }
    if not any(abs(seconds) > 1e-12 for seconds in columns["- hidden"]):
        del columns["- hidden"]
    cells = _signed([1e3 * seconds for column in columns.values() for seconds in column])
    bytes_ = _signed([i.bytes_ / scale for i in fitting])
    rows = [[i.text, *cells[n :: len(fitting)], bytes_[n]] for n, i in enumerate(fitting)]
    rows += [[i.text, "does not fit", *["-"] * len(columns)] for i in c.instead if not i.fits]
    lines += table(["instead", *columns, unit], rows, indent="  ")
    if c.left_out:
        lines.append(f"  {c.left_out} more by their bound no better")
    return lines


def _signed(values: list[float]) -> list[str]:
    """Format differences with the same number of decimals; `-` stands for none, `<0.001` for one too small to show."""
    digits = decimals(max(map(abs, values), default=0.0))
    least = 10.0**-digits

    def cell(value: float) -> str:
        if abs(value) < 1e-9:
            return "-"
        sign = "-" if value < 0 else "+"
        return f"{sign}<{least:.{digits}f}" if abs(value) < least / 2 else f"{value:+.{digits}f}"

    return [cell(v) for v in values]
