"""Price a collective that goes round beside products, a block of rows at a time (passes/distribute/loop.py).

Of P devices each makes P - 1 exchanges with its neighbours, each beside the products of a block, and one block's
products beside none. A block's products are smaller and so slower than a P-th of the whole (autopar/cost/products.py),
and each exchange has a latency of its own; a message and the products beside it gain of each other what a profile says
of collectives beside compute. What arrives of a sum is added to a block. What is gathered for others than the products
is joined by one copy, as blocks of an all-gather are where they are not of the first dim, which has no price there
either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import fx

from ..hardware.schema import Hardware
from ..ir.graph import tensor_arguments, values_of
from ..ir.layout import local_shape
from ..ir.mesh import Mesh
from ..rules import Strategy
from .compute import DTYPE_NAMES
from .messages import message_seconds, together_seconds
from .product_seconds import ProductSeconds


@dataclass(frozen=True)
class LoopCost:
    """Prices loops over one axis of a mesh. `around`: the mesh on which distances are measured."""

    hardware: Hardware
    mesh: Mesh
    around: Mesh
    launch_seconds: float
    axis: str

    @property
    def is_near(self) -> bool:
        """Return whether the devices of a group are joined by the closest links."""
        return self.hardware.tiers_for(self.around)[self.axis] is self.hardware.links[0]

    @property
    def devices(self) -> int:
        """Return how many devices are along the axis."""
        return self.mesh.size(self.axis)

    def block_seconds(self, node: fx.Node, strategy: Strategy, dim: int) -> float:
        """Return the seconds of a product of rows with a weight, for a block of its rows along `dim`."""
        rows, (output,) = tensor_arguments(node)[0].meta["val"], values_of(node)
        shape = list(self._local(rows.shape, strategy.inputs[0]))
        columns, depth = self._local(output.shape, strategy.outputs[0])[-1], shape[-1]
        stack, high = math.prod(shape[:dim]), -(-shape[dim] // self.devices) * math.prod(shape[dim + 1 : -1])
        peak = self.hardware.peak_flops_per_second(DTYPE_NAMES.get(output.dtype, "fp32"))
        computed = ProductSeconds(self.hardware)((stack, high, columns, depth), peak, output.element_size())
        moved = (stack * high * (columns + depth) + columns * depth) * output.element_size()
        return max(computed, moved / self.hardware.reached_memory_bytes_per_second) + self.launch_seconds

    def copy_seconds(self, bytes_: float) -> float:
        """Return the seconds of a kernel that reads and writes so many bytes."""
        return bytes_ / self.hardware.reached_memory_bytes_per_second + self.launch_seconds

    def seconds(self, block: float, block_bytes: float, is_sum: bool, joined_bytes: float) -> float:
        """Return the seconds of a loop. `block`: of the products of a block; `block_bytes`: of a message; `is_sum`:
        whether each is added to what a device computes; `joined_bytes`: what is joined behind the loop, if anything."""
        message = message_seconds((self.axis,), block_bytes, self.around, self.hardware)
        step = together_seconds(block, message, self.hardware)
        added = self.copy_seconds(3 * block_bytes) if is_sum else 0.0
        joined = self.copy_seconds(2 * joined_bytes) if joined_bytes else 0.0
        return block + (self.devices - 1) * (step + added) + joined

    def _local(self, shape, layout) -> tuple[int, ...]:
        return local_shape(shape, layout, self.mesh, dict.fromkeys(self.mesh.names, 0))
