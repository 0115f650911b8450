"""Price copies of hot experts' matrices (passes/distribute/hot_experts.py), in seconds and bytes.

With h hot experts of b bytes each over P devices, a product, forward or of the rows' gradients, has the copies made by
an all-reduce of h b, which sends 2 h b (P - 1) / P, and puts them behind the e matrices of its own experts: it reads
and writes h b where it picks its share, and (e + h) b where it puts them together. A gradient of matrices has h of them
summed in fp32 at least, and then added to those of their owners: it reads and writes the former twice and the latter
once. No product runs beside them in the price.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import fx

from ..hardware.profile import Hardware
from ..ir.graph import operand
from ..ir.layout import Layout, largest_local_numel
from ..ir.mesh import Mesh
from ..ops import autopar
from ..rules import Strategy
from .collectives import CollectiveCost
from .expert_load import GROUPED

SUMMED_BYTES = 4  # of an element of a gradient, at least, while it is added up
KERNELS = 4  # to pick, sum, put together and place


@dataclass(frozen=True)
class Copies:
    """Holds what a product has copied: axes over which, bytes of the matrices of a device's own experts, of the
    copies, and of these as they travel."""

    axes: tuple[str, ...]
    own_bytes: float
    copied_bytes: float
    summed_bytes: float

    @property
    def inside_bytes(self) -> float:
        """Return the bytes that are held for them while the product runs, beside its arguments and its result."""
        return self.own_bytes + self.copied_bytes + self.summed_bytes

    def sent_bytes(self, mesh: Mesh) -> float:
        """Return the bytes that a device sends."""
        ways = math.prod(map(mesh.size, self.axes))
        return 2 * self.summed_bytes * (ways - 1) / ways


def copies_of(node: fx.Node, strategy: Strategy, mesh: Mesh, hot: int) -> Copies | None:
    """Return what a product has copied if so many experts of each layer are hot, None if nothing."""
    if not hot or node.target not in GROUPED:
        return None
    axes = tuple(a for a in mesh.names if a in strategy.inputs[0].owned_axes and mesh.size(a) > 1)
    if not axes:
        return None
    is_gradient = node.target is autopar.grouped_mm_dw.default
    value, layout = (
        (node.meta["val"], strategy.outputs[0]) if is_gradient else (operand(node, 1).meta["val"], strategy.inputs[1])
    )
    own = largest_local_numel(tuple(value.shape), layout, mesh)
    here = largest_local_numel(tuple(value.shape[:1]), Layout((layout.dims[0],)), mesh)
    copied = min(hot, value.shape[0]) * own / here
    size = value.element_size()
    summed = max(size, SUMMED_BYTES) if is_gradient else size
    return Copies(axes, own * size, copied * size, copied * summed)


@dataclass(frozen=True, eq=False)
class CopyCost:
    """Prices copies on a mesh. `collectives`: of the links that it has."""

    collectives: CollectiveCost
    hardware: Hardware
    hot: int

    def seconds(self, node: fx.Node, strategy: Strategy, mesh: Mesh) -> float:
        """Return the seconds that copies take beside a product, 0 if it has none."""
        made = copies_of(node, strategy, mesh, self.hot)
        if made is None:
            return 0.0
        if node.target is autopar.grouped_mm_dw.default:
            passed = 2 * made.own_bytes + made.copied_bytes + 3 * made.summed_bytes
        else:
            passed = 2 * made.own_bytes + 5 * made.copied_bytes
        through_memory = passed / self.hardware.reached_memory_bytes_per_second
        return self.all_reduce_seconds(made) + through_memory + KERNELS * self.hardware.launch_seconds

    def all_reduce_seconds(self, made: Copies) -> float:
        """Return the seconds in which devices tell each other copies, or sum gradients of them."""
        return float(self.collectives.seconds("all_reduce", made.axes, made.summed_bytes))
