"""batch_norm in training -> the ops of autopar/ops/batch_norm.py, which may be sharded over the batch, and its new
running statistics written out. In evaluation it stays as it is: every element is then normalized for itself."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import fx

from ...ir.graph import operand
from ...ops import autopar

aten = torch.ops.aten


def batch_norm(graph_module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Return the normalized node in the place of an `aten.batch_norm` that computes statistics, None for one that is
    given them."""
    training, momentum, eps = cast(tuple[bool, float, float], node.args[5:8])
    value = operand(node).meta["val"]
    shape = value.shape
    count = math.prod(shape) // shape[1]
    if not training or count < 2:
        return None
    wide = torch.float64 if value.dtype == torch.float32 else torch.promote_types(value.dtype, torch.float32)
    # as torch's own kernel adds up on a CPU: with few elements a channel, many norms in a row amplify what is rounded
    # here
    tracer = fx.proxy.GraphAppendingTracer(node.graph)
    x, weight, bias, running_mean, running_var = (a and fx.Proxy(a, tracer) for a in node.args[:5])
    seen = aten.detach.default(x)
    mean = aten.sum.dim_IntList(seen, [d for d in range(len(shape)) if d != 1], dtype=wide) / count
    square = autopar.square_deviation.default(seen, mean)
    rstd = aten.rsqrt.default(square / count + eps)
    if running_mean is not None:
        _move_towards(running_mean, mean, momentum)
        _move_towards(running_var, square / (count - 1), momentum)
    return autopar.batch_norm.default(x, mean, rstd, weight, bias, count).node


def _move_towards(running: fx.Proxy, value: fx.Proxy, momentum: float) -> None:
    aten.copy_.default(running, running * (1 - momentum) + value * momentum)
