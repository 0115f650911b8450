"""The load of the device whose experts get most rows, over that of a device on average.

Which rows an expert gets is known at run time. A plan assumes a load (autopar/cost/skew.py): the device that the others
wait for multiplies, receives and holds so many times the rows that it would under balanced routing, never more than all
of them.
"""

from __future__ import annotations

import math

from torch import fx

from ..ir.graph import operand
from ..ir.layout import Layout
from ..ir.mesh import Mesh
from ..ops import autopar
from ..rules import Strategy
from .skew import Skew

GROUPED = {autopar.grouped_mm.default, autopar.grouped_mm_dw.default}
BY_EXPERT = ("g", "e")  # the factors of a grouped product that cut experts


def experts_in(graph: fx.Graph) -> set[int]:
    """Return how many experts the layers of a graph have."""
    products = [node for node in graph.nodes if node.target is autopar.grouped_mm.default]
    return {operand(node, 1).meta["val"].shape[0] for node in products}


def load_of(node: fx.Node, strategy: Strategy, mesh: Mesh, assumed: Skew) -> float:
    """Return how many times the balanced work of an op the busiest device has, if a skew is `assumed`."""
    devices = _devices(node, strategy, mesh)
    return assumed.at(devices) if devices else 1.0


def sent_load_of(node: fx.Node, strategy: Strategy, mesh: Mesh, assumed: Skew) -> float:
    """Return how many times the balanced rows the busiest device is sent by an exchange."""
    devices = _devices(node, strategy, mesh)
    return assumed.sent_at(devices) if devices else 1.0


def load_of_rows(layout: Layout, mesh: Mesh, assumed: Skew) -> float:
    """Return how many times its balanced bytes a tensor takes on the device that holds most of it."""
    return assumed.at(_product(layout.owned_axes, mesh)) if layout.owned_axes else 1.0


def _devices(node: fx.Node, strategy: Strategy, mesh: Mesh) -> int:
    """Return over how many devices an op has experts cut, 0 if it has none."""
    by_expert = [axis for axis, choice in zip(mesh.names, strategy.choice) if choice in BY_EXPERT]
    axes = by_expert if node.target in GROUPED else []
    for layout in (*strategy.inputs, *strategy.outputs):
        axes = axes or list(layout.owned_axes)
    return _product(axes, mesh) if axes else 0


def _product(axes, mesh: Mesh) -> int:
    return math.prod(map(mesh.size, axes))
