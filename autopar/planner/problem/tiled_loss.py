"""The prices of last linear layers and losses that are computed in blocks, without logits.

Logits and their gradient take no memory. Both products of the backward read all of what a row of logits is made of;
what the blocks need is taken while these two run, and the backward also makes the logits again.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...cost.compute import DTYPE_NAMES
from ...cost.product_seconds import ProductSeconds
from ...hardware.profile import Hardware
from ...ir.layout import Layout, local_shape
from ...ir.mesh import Mesh
from ...ops.linear_loss import summed_bytes
from ...plans.tiled import TiledRegion
from ...rules import Strategy
from ...rules.loss_regions import LossRegion, loss_regions, unmade_outputs
from .multipliers import Prices
from .problem import Problem

if TYPE_CHECKING:
    from ..objective.evaluate import Evaluation


def regions(problem: Problem, makes_later: bool) -> tuple[LossRegion, ...]:
    """Return the last layers and losses of a problem that decide for themselves, those whose logits are an output only
    if that can be made when it is read."""
    return tuple(
        r
        for r in loss_regions(problem.graph)
        if _stands_alone(problem, r) and (makes_later or not unmade_outputs(problem.graph, [r.linear.name]))
    )


def price(problem: Problem, hardware: Hardware) -> None:
    """Add to the seconds of the backwards of a problem's losses what blocks take more, and let both products read all
    of what a row of logits is made of."""
    vertex_of = {v.node: v.index for v in problem.vertices if v.kind == "op"}
    prices = _Price(problem, hardware)
    for region in problem.tiled_losses:
        cls = problem.vertices[vertex_of[region.back]].cls
        options = problem.classes[cls]
        more = np.array([prices.seconds(region, s) for s in options.strategies])
        problem.classes[cls] = replace(options, seconds=options.seconds + more)
        for node in (region.dx, region.dw):
            cls = problem.vertices[vertex_of[node]].cls
            mask = np.array([not s.inputs[1].dims[-1] for s in problem.classes[cls].strategies])
            problem.fits[cls] = problem.fits.get(cls, True) & mask


def _stands_alone(problem: Problem, region: LossRegion) -> bool:
    """Return whether the nodes of a region decide for themselves: no other vertex shares their choice."""
    cls = {v.node: v.cls for v in problem.vertices if v.kind == "op"}
    own = (*region.never_made, region.sums, region.dx, region.dw)
    return all(len(problem.classes[cls[node]].members) == 1 for node in own)


def _largest(value: torch.Tensor, layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of a tensor on the device that holds most of it."""
    return local_shape(tuple(value.shape), layout, mesh, dict.fromkeys(mesh.names, 0))


class _Price:
    """Prices what blocks take more than the whole: a product for the logits, and sums that go through memory."""

    def __init__(self, problem: Problem, hardware: Hardware):
        self.problem, self.hardware, self.products = problem, hardware, ProductSeconds(hardware)

    def bytes_(self, region: LossRegion, strategy: Strategy) -> float:
        """Return the bytes of the largest shard of the logits, which their gradient has too, that are not made."""
        value = region.back.meta["val"]
        return float(math.prod(_largest(value, strategy.outputs[0], self.problem.mesh)) * value.element_size())

    def seconds(self, region: LossRegion, strategy: Strategy) -> float:
        """Return the seconds that a strategy of the logits' gradient takes more."""
        value, hidden = region.back.meta["val"], region.hidden
        *leading, columns = _largest(value, strategy.outputs[0], self.problem.mesh)
        rows, item = math.prod(leading), value.element_size()
        peak = self.hardware.peak_flops_per_second(DTYPE_NAMES.get(value.dtype, "fp32"))
        moved = summed_bytes(rows, columns, hidden, item)
        product = self.products((1, rows, columns, hidden), peak, item, "dense")
        return product + moved / self.hardware.reached_memory_bytes_per_second


def described(problem: Problem, evaluation: Evaluation, hardware: Hardware) -> tuple[TiledRegion, ...]:
    """Return what a plan says of the losses that it computes in blocks."""
    vertex_of, found, price = {v.node: v.index for v in problem.vertices}, [], _Price(problem, hardware)
    for region in problem.tiled_losses:
        v = vertex_of[region.back]
        strategy = problem.choices(v).strategies[evaluation.choice[v]]
        layer = str(region.linear.meta.get("module", ""))
        found.append(
            TiledRegion(region.linear.name, layer, price.bytes_(region, strategy), price.seconds(region, strategy))
        )
    return tuple(found)


def may_save(problem: Problem, hardware: Hardware, prices: Prices) -> bool:
    """Return whether logits that wait for the backward may cost more at these prices than blocks of them do. If not, a
    bound of plans with whole logits is one of plans in blocks too: these cost the same otherwise, or more."""
    if not prices.saved:
        return False
    price, weight = _Price(problem, hardware), prices.compute("backward")
    backs = {v.node: problem.choices(v.index).strategies for v in problem.vertices}
    return any(
        prices.byte_seconds * price.bytes_(region, strategy) > weight * price.seconds(region, strategy)
        for region in problem.tiled_losses
        for strategy in backs[region.back]
    )
