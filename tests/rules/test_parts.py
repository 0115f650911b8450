"""Fused weights may be sharded inside their parts, with everything that is computed from them or for them."""

from __future__ import annotations

import pytest
import torch

from autopar.ir.graph import tensor_arguments, values_of
from autopar.ir.mesh import Mesh
from autopar.rules import factor_parts, propagate_parts, rule_of, strategies
from autopar.rules.numeric_check import make_node

from .instances import real, whole
from .joint_graphs import joint_graph

aten = torch.ops.aten


@pytest.fixture(scope="module")
def fused():
    graph = joint_graph("fused")
    return graph, propagate_parts(graph)


def test_candidates_of_fused_weights(fused):
    graph, candidates = fused
    by_shape = {tuple(n.meta["val"].shape): candidates[n, 0] for n in graph.find_nodes(op="placeholder")}
    assert by_shape[12, 36] == (frozenset(), frozenset({3}))  # query, key and value
    assert by_shape[36,] == (frozenset({3}),)
    assert by_shape[48, 12] == (frozenset({2}), frozenset())  # gate and up
    assert by_shape[24, 12] == (frozenset(), frozenset())  # the embedding


def test_gradients_may_have_the_layout_of_their_parameters(fused):
    graph, candidates = fused
    output = next(iter(reversed(graph.nodes)))
    names = {role.name: value for value, role in zip(output.args[0], output.meta["roles"]) if role.kind == "gradient"}
    assert candidates[names["c_attn"], 0] == (frozenset(), frozenset({3}))
    assert candidates[names["c_bias"], 0] == (frozenset({3}),)
    assert candidates[names["gate_up"], 0] == (frozenset({2}), frozenset())


def test_fused_linear_is_sharded_inside_its_parts(fused):
    graph, candidates = fused
    node = next(n for n in graph.nodes if n.target is torch.ops.autopar.linear.default)
    rule = rule_of(node)
    shapes = [[t.shape for t in side] for side in ([a.meta["val"] for a in tensor_arguments(node)], values_of(node))]
    found = strategies(rule, *shapes, Mesh.parse("tp=2"), factor_parts(node, rule, candidates))
    assert ["R", "tp:S(0/3)", "tp:S(2/3)"] in [[str(l) for l in (*s.inputs, *s.outputs)] for s in found]


def test_candidates_that_reach_no_input_are_dropped():
    graph = joint_graph("llama")
    candidates = propagate_parts(graph)
    rotary = [n for n in graph.nodes if n.target is aten.cat.default]
    assert rotary and not any(any(candidates[n, 0]) for n in rotary)


def test_counts_above_the_limit_are_dropped(fused):
    graph, _ = fused
    assert not any(any(dims) for dims in propagate_parts(graph, largest=1).values())


def test_vocabulary_is_never_sharded_inside_parts():
    node, _ = make_node(torch.ops.autopar.embedding.default, real(8, 6), whole(8, 4), -1, 0)
    everywhere = {(n, 0): (frozenset({2}),) * n.meta["val"].dim() for n in node.graph.nodes}
    assert "v" not in factor_parts(node, rule_of(node), everywhere)
