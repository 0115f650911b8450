"""Two graphs in one, which take turns at waits for rows of experts."""

from __future__ import annotations

from itertools import pairwise

import torch

from autopar import compiler, plan
from autopar.codegen.rank_program import GraphKey, StageProgram
from autopar.ir.graph import output_node
from autopar.passes.pipeline.side_by_side import BEFORE, results_of_forward, side_by_side, turns

from ..helpers.shared_experts import SharedExperts, gpus, inputs


def program() -> tuple[StageProgram, tuple[str, ...]]:
    model, given = SharedExperts(2), inputs(16)
    found = plan(model, "ep=2", given, hardware=gpus(), strategy="expert", micro_batches=4, baselines=False,
                 precision="fp32")  # fmt: skip
    return compiler.lower_pipeline(compiler.trace(model, given), found, 0).stages[0], found.pipeline.pairs.turns


def called(graph) -> list[str]:
    return [node.name for node in graph.nodes if node.op not in ("placeholder", "output")]


def test_both_keep_their_order_and_take_turns():
    stage, exchanges = program()
    forward, backward = (stage.graph(GraphKey(kind)) for kind in "FB")
    both = side_by_side(forward, backward, exchanges)
    names = called(both.graph)
    assert [name for name in names if not name.startswith(BEFORE)] == called(forward.graph)
    assert [name.removeprefix(BEFORE) for name in names if name.startswith(BEFORE)] == called(backward.graph)
    changes = sum(a.startswith(BEFORE) != b.startswith(BEFORE) for a, b in pairwise(names))
    counts = [len(list(turns(module.graph, exchanges))) for module in (forward, backward)]
    assert changes == 2 * min(counts) - (counts[0] <= counts[1]) and min(counts) > 2
    for of_both, of_each in zip(
        [n.name for n in both.graph.find_nodes(op="placeholder")],
        [n.name for n in forward.graph.find_nodes(op="placeholder")]
        + [BEFORE + n.name for n in backward.graph.find_nodes(op="placeholder")],
        strict=True,
    ):
        assert of_both == of_each


def test_results_are_those_of_both():
    stage, exchanges = program()
    forward, backward = (stage.graph(GraphKey(kind)) for kind in "FB")
    both = side_by_side(forward, backward, exchanges)
    roles = [output_node(module.graph).meta["roles"] for module in (forward, backward, both)]
    assert roles[2] == [*roles[0], *roles[1]]
    assert results_of_forward(both.graph) == len(roles[0]) and results_of_forward(forward.graph) == 0


def test_one_ends_before_the_other():
    """A graph without exchanges comes in one piece, and constants of one name stay apart unless they are the same."""
    graphs = []
    for value in (1.0, 2.0):
        graph = torch.fx.Graph()
        x, w = graph.placeholder("x"), graph.get_attr("w")
        graph.output((graph.call_function(torch.ops.aten.add.Tensor, (x, w)),)).meta["roles"] = [None]
        graphs.append(torch.fx.GraphModule({"w": torch.tensor(value)}, graph))
    both = side_by_side(*graphs, ())
    assert called(both.graph) == ["w", "add_tensor", f"{BEFORE}w", f"{BEFORE}add_tensor"]
    assert both(torch.tensor(1.0), torch.tensor(5.0)) == (2.0, 7.0)
