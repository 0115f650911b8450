"""Say beside an out-of-memory error what the plan had counted with."""

from __future__ import annotations

from ..utils.format import size
from .plan import Plan
from .text import in_order

MOST = 4  # kinds that are named


def note(plan: Plan) -> str:
    """Return what a plan has of memory, its biggest items first, and what would take less."""
    at_peak = sorted(in_order(plan.at_peak).items(), key=lambda item: -item[1])
    items = ", ".join(f"{size(bytes_)} {kind}" for kind, bytes_ in at_peak[:MOST] if bytes_)
    return (
        f"autopar: the plan has {size(plan.peak_bytes)} a device at its peak, of a limit of "
        f"{size(plan.memory_limit_bytes)}: {items}. Tensors of the program's own and other processes on the device are "
        f'not in it. fix: compile with a lower limit (memory="{size(0.9 * plan.peak_bytes).replace(" ", "")}" plans '
        'less), offload="auto", more micro_batches= or a smaller batch'
    )
