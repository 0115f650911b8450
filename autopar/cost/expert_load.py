"""The load of the device whose experts get most rows, over that of a device on average.

Which rows an expert gets is known at run time. A plan assumes a load: the device that the others wait for multiplies,
receives and holds so many times the rows that it would under balanced routing, never more than all of them.
"""

from __future__ import annotations

import math

from torch import fx

from ..ir.layout import Layout
from ..ir.mesh import Mesh
from ..ops import autopar
from ..rules import Strategy

GROUPED = {autopar.grouped_mm.default, autopar.grouped_mm_dw.default}
BY_EXPERT = ("g", "e")  # the factors of a grouped product that cut experts


def load_of(node: fx.Node, strategy: Strategy, mesh: Mesh, assumed: float) -> float:
    """Return how many times the balanced work of an op the busiest device has, if a load is `assumed`."""
    by_expert = [axis for axis, choice in zip(mesh.names, strategy.choice) if choice in BY_EXPERT]
    axes = by_expert if node.target in GROUPED else []
    for layout in (*strategy.inputs, *strategy.outputs):
        axes = axes or list(layout.owned_axes)
    return _at_most_all(axes, mesh, assumed)


def load_of_rows(layout: Layout, mesh: Mesh, assumed: float) -> float:
    """Return how many times its balanced bytes a tensor takes on the device that holds most of it."""
    return _at_most_all(layout.owned_axes, mesh, assumed)


def _at_most_all(axes, mesh: Mesh, assumed: float) -> float:
    return min(assumed, float(math.prod(map(mesh.size, axes)))) if axes else 1.0
