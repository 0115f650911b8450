"""Say in a plan how the sequence of each attention is cut, what a device computes of it, and what that sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..utils.format import byte_column, count_text, table

WHOLE = "whole"
SCHEME_OF_ROLE = ("all_gather_kv", "ring", "ulysses")


@dataclass(frozen=True)
class AttentionScheme:
    """An attention, or `copies` equal ones, in module `name`. `scheme`: what cuts it, as strategies are called.
    `pairs`: of a query and a key, head and sample, that the device with most of them computes in one forward;
    `balance`: that over the mean of all devices. `sent_bytes`: of a step, by a device, of all copies together."""

    name: str
    copies: int
    scheme: str
    pairs: float
    balance: float
    sent_bytes: float


def attention_lines(schemes: Sequence[AttentionScheme]) -> list[str]:
    """Return a table of attentions, a line for equal ones; nothing if there are none."""
    header, rows = attention_table(schemes)
    return table(header, [[str(cell) for cell in row] for row in rows], left=2) if rows else []


def attention_table(schemes: Sequence[AttentionScheme]) -> tuple[list[str], list[list[object]]]:
    """Return (header, rows) of attentions."""
    unit, sent = byte_column([one.sent_bytes for one in schemes])
    header = ["attention", "scheme", "pairs of a device", "most / mean", f"{unit} sent a step"]
    return header, [
        [
            one.name if one.copies == 1 else f"{one.name} (x{one.copies})",
            one.scheme,
            count_text(round(one.pairs)),
            f"{one.balance:.2f}",
            bytes_,
        ]
        for one, bytes_ in zip(schemes, sent)
    ]
