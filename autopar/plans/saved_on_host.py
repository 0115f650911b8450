"""Say in a plan which values that the backward reads wait for it on the host."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SavedOnHost:
    """Values of the forward that are copied to the host and back, as (name of the op, which of its outputs), in order.
    `bytes_`: of a device, that the host holds at once, which is what one pass of a step copies each way; in stages of
    all micro-batches in flight, of the rank that has most. Of a step: `seconds` of the link both ways, in stages of
    the mean rank, and `exposed_seconds` of them that no compute hides."""

    values: tuple[tuple[str, int], ...]
    bytes_: float
    seconds: float
    exposed_seconds: float
