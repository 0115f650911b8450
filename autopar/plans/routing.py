"""Say in a plan's text how experts' rows are assumed to be routed, and how they travel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.format import ms, size

if TYPE_CHECKING:
    from .pipeline import Pairs
    from .plan import Plan


def pairs_text(pairs: Pairs) -> str:
    """Return what rows that travel beside another micro-batch save."""
    travel, saved = ms(pairs.beside_seconds), ms(pairs.gained_seconds)
    return f"; a forward runs beside the backward before it: {travel} of their way beside that saves {saved}"


def routing_lines(plan: Plan) -> list[str]:
    """Return lines on how experts' rows are assumed to be routed, what that sends and what the worst would hold; none
    if no rows are sent to experts."""
    if plan.routing is None:
        return []
    r = plan.routing
    beside = f"; {ms(r.beside_seconds)} of their way have products beside them, which saves {ms(r.gained_seconds)}"
    assumed = f"the busiest device is assumed to get {r.load:.2f} times the mean of the rows"
    held = f"; peak {size(plan.peak_bytes)} so, {size(r.worst_peak_bytes)} if one device got all rows of its group"
    if plan.expert_capacity:
        most = f"{plan.expert_capacity:.2f} times the mean of the rows"
        assumed, held = f"a device takes at most {most} at a time, more in further rounds; {assumed}", f"{held} at once"
    return [
        f"experts: {assumed}" + (held if r.worst_peak_bytes else ""),
        f"rows of experts: {size(r.sent_bytes)} sent by a device, {size(r.gathered_bytes)} if all tokens were gathered"
        + (beside if r.beside_seconds else "")
        + (pairs_text(plan.pipeline.pairs) if plan.pipeline.pairs else ""),
    ]
