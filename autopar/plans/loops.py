"""Say in a plan's text which collectives go round beside products."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ..utils.format import ms, size

if TYPE_CHECKING:
    from .plan import Plan

SUFFIX = "_loop"  # of the kinds of their messages among a plan's collectives


def loop_lines(plan: Plan) -> list[str]:
    """Return a line on the collectives that go round beside products, none if there are none."""
    kinds = Counter(one.kind for one in plan.sharding.loops)
    if not kinds:
        return []
    seconds = sum(c.seconds for c in plan.collectives if c.kind.endswith(SUFFIX))
    what = " and ".join(f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in sorted(kinds.items()))
    verb = "goes" if sum(kinds.values()) == 1 else "go"
    return [
        f"{what} {verb} round beside products, a block of rows at a time: {size(overlapped_bytes(plan))} of the "
        f"{size(sent_bytes(plan))} that a device sends, {ms(plan.beside_seconds)} of their {ms(seconds)} hidden"
    ]


def overlapped_bytes(plan: Plan) -> float:
    """Return the bytes that a device sends in loops."""
    return sum(c.wire_bytes for c in plan.collectives if c.kind.endswith(SUFFIX))


def sent_bytes(plan: Plan) -> float:
    """Return the bytes that a device sends in a step."""
    return sum(c.wire_bytes for c in plan.collectives)
