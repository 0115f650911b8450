"""Seconds of messages between neighbours that travel while a device computes, of ring attention and of looped
collectives."""

from __future__ import annotations

from collections.abc import Sequence

from ..hardware.schema import Hardware
from ..ir.mesh import Mesh


def message_seconds(axes: Sequence[str], bytes_: float, mesh: Mesh, hardware: Hardware) -> float:
    """Return the seconds of one exchange between neighbours along these axes."""
    if not bytes_:
        return 0.0
    links = [hardware.links_for(mesh)[axis] for axis in axes]
    return max(l.latency_seconds for l in links) + bytes_ / min(l.bytes_per_second for l in links)


def together_seconds(compute: float, message: float, hardware: Hardware) -> float:
    """Return the seconds of a message beside a computation, which gain of each other what the profile says."""
    return compute + message - hardware.overlap_gain * min(compute, message)
