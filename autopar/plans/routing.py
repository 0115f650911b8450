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
    if plan.hot_experts:
        held = held.replace("if one device got all rows of its group", "if one device got all others of its group")
    return [
        f"experts: {assumed}" + (held if r.worst_peak_bytes else ""),
        *_of_copies(plan),
        f"rows of experts: {size(r.sent_bytes)} sent by a device, {size(r.gathered_bytes)} if all tokens were gathered"
        + (beside if r.beside_seconds else "")
        + (pairs_text(plan.pipeline.pairs) if plan.pipeline.pairs else ""),
    ]


def _of_copies(plan: Plan) -> list[str]:
    """Return a line on hot experts that are copied, if any are."""
    made = plan.expert_copies
    if made is None:
        return []
    most, load = plan.hot_experts, plan.routing.load if plan.routing else 1.0
    which = f"the {most} experts with most rows of each layer are" if most > 1 else "the expert with most rows is"
    return [
        f"hot experts: {which} copied to all devices, {size(made.sent_bytes)} sent by a device in {ms(made.seconds)}, "
        f"{size(made.held_bytes)} held; the busiest device is assumed to get {made.load:.2f} times the mean of the "
        f"rows without, {load:.2f} with"
    ]
