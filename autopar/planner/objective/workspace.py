"""Bytes that an op allocates inside and frees before it returns, at the sizes that one device gives it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ...ir.graph import tensor_arguments
from ...ir.layout import local_shape
from ...ops.workspace import logits_bytes, workspace_bytes
from ...rules import Strategy
from ..problem.problem import Problem
from ..problem.tiled_queries import Local, bytes_of_piece
from ..problem.vertices import Vertex


def inside_bytes(problem: Problem, vertex: Vertex, strategy: Strategy) -> float:
    """Return the bytes of an op under a strategy; 0 on CPUs, whose kernels are others, but for losses in
    blocks."""
    first = dict.fromkeys(problem.mesh.names, 0)
    if vertex.cls in problem.in_blocks:  # which decides for itself, and is of the planned graph
        vertex = problem.vertices[vertex.cls]
        value = tensor_arguments(vertex.node)[0].meta["val"]
        *rows, columns = local_shape(tuple(value.shape), strategy.inputs[0], problem.mesh, first)
        hidden = next(r for r in problem.tiled_losses if vertex.node in (r.sums, r.dx, r.dw)).hidden
        return float(logits_bytes(math.prod(rows), columns, hidden, value.dtype, vertex.phase == "backward"))
    if vertex.cls in problem.attentions_in_pieces:  # as above
        return float(bytes_of_piece(problem, problem.vertices[vertex.cls].node, strategy))
    if vertex.kind != "op" or not problem.is_for_gpus:
        return 0.0
    layouts = iter(strategy.inputs)

    def local(argument: fx.Node) -> Any:
        value = argument.meta["val"]
        if not isinstance(value, torch.Tensor):
            return argument
        return Local(local_shape(tuple(value.shape), next(layouts), problem.mesh, first), value.dtype)

    args, named = fx.map_arg(vertex.node.args, local), fx.map_arg(dict(vertex.node.kwargs), local)
    return float(workspace_bytes(vertex.node.target, *args, **named))
