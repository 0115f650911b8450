"""Count the FLOPs of a step by the model's mathematics, whatever is computed again, for model FLOPs utilization.

Three times the forward's products, attention counted without its causal mask, with the keys of a window, and without
the scores that its backward makes again. For a GPT of L layers, hidden size h and vocabulary V on B sequences of length
s these are the terms of Narayanan et al., arXiv 2104.04473, section 5.1, without recomputation:

    72 B s L h^2 (1 + s / (6 h) + V / (12 L h))
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import fx

from ...cost.attention import Shape
from ...cost.compute import ATTENTION, DTYPE_NAMES, flops_of
from ...hardware.schema import Hardware
from ...ir.graph import is_op, tensor_arguments, values_of
from ...ops import autopar
from ...plans.entries import Flops
from ...rules.reading import bound


def model_flops(node: fx.Node) -> float:
    """Count the FLOPs of one op by the model's mathematics, see above."""
    if node.target not in ATTENTION:
        return flops_of(node)
    is_forward = node.target is autopar.attention.default
    q, _, v = _heads_of(node)
    forward = 2.0 * math.prod(q.shape[:-1]) * float(_shape_of(node).reach) * (q.shape[-1] + v.shape[-1])
    return forward if is_forward else 2.0 * forward


def closed_flops(node: fx.Node) -> float:
    """Count those of `model_flops` that are of pairs of a query and a key which a causal mask or its window closes."""
    if node.target not in ATTENTION:
        return 0.0
    shape = _shape_of(node)
    return model_flops(node) * (1.0 - float(shape.open_share * shape.keys / shape.reach))


def _shape_of(node: fx.Node) -> Shape:
    """Return the shape of an attention of one head and sample."""
    q, k, _ = _heads_of(node)
    given = bound(node)
    tokens = k.shape[2] + int(given["first"])  # of a row, of which a mean chunk of it has as many keys before as behind
    return Shape(1, 1, q.shape[2], tokens, 1, 1, given["causal"], window=given["window"])


def _heads_of(node: fx.Node) -> list[torch.Tensor]:
    """Return the queries, keys and values of an attention, or of its backward."""
    is_forward = node.target is autopar.attention.default
    return [a.meta["val"] for a in tensor_arguments(node)][slice(0, 3) if is_forward else slice(1, 4)]


def flops_of_step(graph: fx.Graph, micro_batches: float, hardware: Hardware) -> Flops:
    """Return the model FLOPs of so many micro-batches of a graph, with the hardware's peak in the type that has most of
    them."""
    by_dtype, closed = defaultdict(float, fp32=0.0), 0.0
    for node in filter(is_op, graph.nodes):
        closed += closed_flops(node)
        by_dtype[DTYPE_NAMES.get(values_of(node)[0].dtype, "fp32")] += model_flops(node)
    dtype = max(by_dtype, key=by_dtype.__getitem__)
    published = hardware.published_utilization.get(dtype, 0.0)
    peak = hardware.peak_flops_per_second(dtype)
    return Flops(micro_batches * sum(by_dtype.values()), dtype, peak, published, micro_batches * closed)
