"""Tests' side of the numeric check of rules (autopar/rules/numeric_check.py)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table

from autopar.ir.mesh import Mesh
from autopar.rules import rule_of
from autopar.rules.numeric_check import check

# an op that torch has no CPU kernel of, by its decomposition
CPU = torch.library.Library("aten", "IMPL")
CPU.impl("_fused_rms_norm_backward", decomposition_table[torch.ops.aten._fused_rms_norm_backward.default], "CPU")
MESHES = {text: Mesh.parse(text) for text in ("x=2", "x=3", "x=2,y=2", "x=3,y=2")}


def zeros_node(*size: int) -> fx.Node:
    """An argument that the graph shows to be zero."""
    node = fx.Graph().call_function(torch.ops.aten.zeros.default, (list(size),), {"dtype": torch.float64})
    node.meta["val"] = torch.zeros(size, dtype=torch.float64)
    return node


def assert_right(
    nodes: Iterable[tuple[fx.Node, list[Tensor]]], meshes: Iterable[str] = ("x=2", "x=3", "x=2,y=2")
) -> int:
    """All strategies of all nodes on all meshes are right. The number of strategies checked."""
    total, wrong = 0, []
    for node, inputs in nodes:
        for mesh in meshes:
            count, bad = check(node, inputs, MESHES[mesh], rule_of(node))
            total += count
            wrong += [f"{node.target} {[tuple(t.shape) for t in inputs]} {b}" for b in bad]
    assert not wrong, "\n".join(wrong[:20])
    return total
