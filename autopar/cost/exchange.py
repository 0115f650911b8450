"""Price rows on their way to their experts and back, if experts get equal numbers of them.

With r rows of d bytes over P devices, each of which holds r / P of them, a device sends r d / P (P - 1) / P; the counts
of rows that go first wait for the link once. Rows that every device has are picked without a message.
"""

from __future__ import annotations

import math

from torch import fx

from ..hardware.schema import Hardware
from ..ir.graph import bytes_of
from ..ir.layout import fraction
from ..ir.mesh import Mesh
from ..ops import autopar
from ..rules import Strategy

WAYS = (autopar.dispatch.default, autopar.combine.default)


def moves_rows(node: fx.Node, strategy: Strategy) -> bool:
    """Return whether an op does anything: neither a dispatch nor a combine that leaves rows where they are."""
    return node.target not in WAYS or bool(_owned(node, strategy))


def exchange_axes(node: fx.Node, strategy: Strategy, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes over which an op sends rows, none if it sends nothing."""
    if node.target not in WAYS:
        return ()
    sent = {*_owned(node, strategy)} & {*strategy.inputs[1].sharding_axes}
    return tuple(axis for axis in mesh.names if axis in sent and mesh.size(axis) > 1)


def exchange_bytes(node: fx.Node, strategy: Strategy, mesh: Mesh) -> float:
    """Return the bytes that a device sends."""
    ways = math.prod(mesh.size(axis) for axis in exchange_axes(node, strategy, mesh))
    return bytes_of(node.meta["val"]) * fraction(strategy.outputs[0], mesh) * (ways - 1) / ways


def exchange_seconds(node: fx.Node, strategy: Strategy, mesh: Mesh, hardware: Hardware) -> float:
    """Return the seconds of an exchange of rows; that of the rows' experts comes after one of counts."""
    axes = exchange_axes(node, strategy, mesh)
    if not axes:
        return 0.0
    links = [hardware.links_for(mesh)[axis] for axis in axes]
    speed = min(link.all_to_all_bytes_per_second or link.bytes_per_second for link in links)
    messages = 1 if node.meta["val"].dim() > 1 else 2
    return messages * max(l.latency_seconds for l in links) + exchange_bytes(node, strategy, mesh) / speed


def _owned(node: fx.Node, strategy: Strategy) -> tuple[str, ...]:
    is_way_back = node.target is autopar.combine.default
    return (strategy.inputs[0] if is_way_back else strategy.outputs[0]).owned_axes
