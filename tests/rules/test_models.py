"""Every op of the joint graphs of real models has a rule, and every distinct instance of it is right numerically."""

from __future__ import annotations

import pytest

from autopar.ir.graph import is_op, tensor_arguments
from autopar.rules import factor_parts, propagate_parts, rule_of
from autopar.rules.numeric_check import check

from .joint_graphs import joint_graph
from .rule_check import MESHES

MODELS = [(name, canonical) for name in ("mlp", "fused", "gpt2", "llama", "bert") for canonical in (True, False)]
CHECKS_ONLY = ("aten._assert_tensor_metadata.default",)  # has no output


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name, canonical", MODELS)
def test_joint_graph(name, canonical):
    graph = joint_graph(name, canonical)
    nodes = [node for node in graph.nodes if is_op(node) and str(node.target) not in CHECKS_ONLY]
    assert not {str(node.target) for node in nodes if rule_of(node) is None}
    candidates, seen, wrong = propagate_parts(graph), set(), []
    for node in nodes:
        inputs, rule = [a.meta["val"] for a in tensor_arguments(node)], rule_of(node)
        parts = factor_parts(node, rule, candidates)
        constants = [a for a in (*node.args, *node.kwargs.values()) if not hasattr(a, "meta")]
        key = str((node.target, [(t.shape, t.dtype) for t in inputs], constants, parts, rule.linear))
        if key not in seen:
            seen.add(key)
            for mesh in ("x=2", "x=2,y=2") if name == "fused" else ("x=2",):
                _, bad = check(node, inputs, MESHES[mesh], rule, parts)
                wrong += [f"{node.name} {node.target}: {b}" for b in bad]
    assert not wrong, "\n".join(wrong[:20])
