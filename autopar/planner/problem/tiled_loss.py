"""The problem of a graph whose last linear layers and losses are computed in blocks, without logits.

It has the vertices of the graph itself, at other prices: logits and their gradient take no memory and are never
redistributed, both products of the backward read all of what a row of logits is made of, what the blocks need is taken
while these two run, and the backward also makes the logits again (passes/distribute/tile_loss.py is what then runs).
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
from ...plans.tiled import TiledLoss
from ...rules import Strategy
from ...rules.loss_regions import LossRegion, loss_regions, unmade_outputs
from .multipliers import Prices
from .problem import Problem

if TYPE_CHECKING:
    from ..objective.evaluate import Evaluation

AUTO, NONE, LOSS = TILINGS = ("auto", "none", "loss")
NEVER_BYTES = 2**44  # as whose redistribution that of logits is priced: none is made


def with_tiled_losses(problem: Problem, hardware: Hardware, makes_later: bool = True) -> Problem | None:
    """Return the problem with all last layers and losses in blocks, None if there is none. Logits that leave the graph
    as an output are left to be made when they are read; if that cannot be (not `makes_later`), they are made."""
    regions = tuple(
        r
        for r in loss_regions(problem.graph)
        if _stands_alone(problem, r) and (makes_later or not unmade_outputs(problem.graph, [r.linear.name]))
    )
    if not regions:
        return None
    vertex_of = {v.node: v.index for v in problem.vertices if v.kind == "op"}
    classes, tensor_bytes, fits = dict(problem.classes), dict(problem.tensor_bytes), dict(problem.fits)
    price = _Price(problem, hardware)
    for region in regions:
        cls = problem.vertices[vertex_of[region.back]].cls
        options = classes[cls]
        more = np.array([price.seconds(region, s) for s in options.strategies])
        classes[cls] = replace(options, seconds=options.seconds + more)
        for node in (region.dx, region.dw):
            cls = problem.vertices[vertex_of[node]].cls
            mask = np.array([not s.inputs[1].dims[-1] for s in classes[cls].strategies])
            fits[cls] = fits.get(cls, True) & mask
        tensor_bytes |= {(vertex_of[node], 0): NEVER_BYTES for node in region.never_made}
    return replace(problem, classes=classes, tensor_bytes=tensor_bytes, fits=fits, tiled=regions)


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


def tiled_losses(problem: Problem, evaluation: Evaluation, hardware: Hardware) -> tuple[TiledLoss, ...]:
    """Return what a plan says of the losses that it computes in blocks."""
    vertex_of, found, price = {v.node: v.index for v in problem.vertices}, [], _Price(problem, hardware)
    for region in problem.tiled:
        v = vertex_of[region.back]
        strategy = problem.choices(v).strategies[evaluation.choice[v]]
        layer = str(region.linear.meta.get("module", ""))
        found.append(
            TiledLoss(region.linear.name, layer, price.bytes_(region, strategy), price.seconds(region, strategy))
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
        for region in problem.tiled
        for strategy in backs[region.back]
    )


def moves_none(problem: Problem, evaluation: Evaluation) -> bool:
    """Return whether a plan moves no logits between the layer and its loss."""
    never = {v.index for v in problem.vertices for region in problem.tiled if v.node in region.never_made}
    return not any(t.producer in never for t in evaluation.every_transfer)
