"""The verifier names the node of every broken promise: shapes, layouts, lost partial values, ranks that disagree."""

from dataclasses import replace

import pytest
import torch

from autopar.codegen.verify_graph import check_global, check_local, check_ranks, check_sharding, collectives
from autopar.errors import VerifyError
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.passes.distribute.localize import localize
from autopar.plans.sharding import NodeSharding

from ..passes.lowering import MLP, capture, written

TP = Mesh.parse("tp=2")
LEAVES, OUTPUTS = {"p_up": "tp:S(0)", "p_down": "tp:S(1)"}, ["R", "R", "R", "R"]
ROW = {"linear": "R|tp:S(0)->tp:S(2)", "linear_1": "tp:S(2)|tp:S(1)->tp:P"}


@pytest.fixture
def joint():
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    return capture(MLP(), x, x.clone())[0]


def node(graph_module, name):
    return next(n for n in graph_module.graph.nodes if n.name == name)


def sharding_of(joint, nodes, **changes):
    return replace(written(joint, TP, "R", nodes, LEAVES, OUTPUTS), **changes)


def test_right_graphs_pass(joint):
    sharding = sharding_of(joint, ROW)
    check_global(joint)
    check_sharding(joint, sharding)
    graphs = [localize(joint, sharding, rank) for rank in range(2)]
    for graph in graphs:
        check_local(graph, TP)
    check_ranks(graphs)


@pytest.mark.parametrize("key, name", [("phase", "relu"), ("role", "p_up")])
def test_missing_annotations(joint, key, name):
    del node(joint, name).meta[key]
    with pytest.raises(VerifyError, match=f"{name} has no {key}"):
        check_global(joint)


def test_a_forward_op_that_needs_the_backward(joint):
    node(joint, "relu").meta["phase"] = "backward"
    with pytest.raises(VerifyError, match="linear_1 runs in the forward and needs relu of the backward"):
        check_global(joint)


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("sub", "tp:P|R->R", "sub takes a partial argument over tp and its output does not say so"),
        ("pow_1", "tp:P->tp:P", r"pow_1 takes argument 0 partial over tp and is not linear in it"),
        ("sub", "tp:P|R->tp:P", "sub takes argument 0 partial over tp and is not linear in it"),
        ("sub", "tp:P|tp:S(0)->tp:P", "sub takes some arguments partial and some sharded over tp"),
        ("sub", "R|R->tp:P", "sub claims a partial output over tp and no argument is split over it"),
        ("linear_1", "tp:S(2)|tp:S(1)->R", "linear_1 has an argument sharded over tp and an output that forgets it"),
    ],
)
def test_lost_partial_values(joint, name, text, message):
    with pytest.raises(VerifyError, match=message):
        check_sharding(joint, sharding_of(joint, ROW | {name: text}))


def test_a_partial_output_of_the_graph(joint):
    outputs = (Layout((), (("tp", "sum"),)), *[Layout.replicated(n) for n in (1, 2, 2)])
    with pytest.raises(VerifyError, match="div leaves the graph as tp:P"):
        check_sharding(joint, sharding_of(joint, ROW, outputs=outputs))


def test_a_local_shape_that_is_not_the_layouts(joint):
    local = localize(joint, sharding_of(joint, ROW), 0)
    node(local, "relu").meta["layout"] = Layout.parse("tp:S(2)", 3)
    with pytest.raises(VerifyError, match=r"relu has local shape \(4, 6, 12\), .* tp:S\(2\) implies \(4, 6, 6\)"):
        check_local(local, TP)


def test_an_argument_that_is_not_what_the_op_was_promised(joint):
    local = localize(joint, sharding_of(joint, ROW), 0)
    relu = node(local, "relu")
    wanted = Layout.parse("tp:S(2)", 3)
    relu.meta["sharding"] = NodeSharding((wanted,), (wanted,))
    with pytest.raises(VerifyError, match=r"relu was promised linear_all_gather as tp:S\(2\) and gets it as R"):
        check_local(local, TP)


def test_ranks_that_disagree(joint):
    sharding = sharding_of(joint, ROW)
    graphs = [localize(joint, sharding, rank) for rank in range(2)]
    assert collectives(graphs[0])[:2] == [
        ("tp", "all_gather_into_tensor", "", "float64", (4, 6, 6)),
        ("tp", "all_reduce", "sum", "float64", (4, 6, 8)),
    ]
    start = next(n for n in graphs[1].graph.nodes if "all_reduce" in str(n.target))
    start.args = (start.args[0], "max", "tp")
    with pytest.raises(VerifyError, match="is collective 1 over tp: .*'sum'.* on rank 0 and .*'max'.* on rank 1"):
        check_ranks(graphs)


def test_ranks_with_different_numbers_of_collectives(joint):
    graphs = [localize(joint, sharding_of(joint, nodes), rank) for rank, nodes in enumerate([ROW, {}])]
    with pytest.raises(VerifyError):
        check_ranks(graphs)
