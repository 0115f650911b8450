"""Hold the stages that ops belong to, and what flows where, against a slower reading of the same graph."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from autopar import compiler
from autopar.errors import StageError
from autopar.ir.graph import is_op, tensor_of
from autopar.ir.stage_placement import StagePlacement, first_of, is_sum
from autopar.passes.pipeline.micro_batch import micro_batch
from tests.helpers import staged

CASES = ["gpt2", "t5", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "vit"))]
SEEDS = range(8)


def stages_of(mask: int) -> set[int]:
    return {s for s in range(mask.bit_length()) if mask >> s & 1}


@pytest.fixture(scope="module", params=CASES)
def captured(request):
    case = staged.family(request.param)
    return micro_batch(case.captured, case.samples).captured


def placed(captured, seed: int) -> StagePlacement:
    return StagePlacement(captured.graph, staged.random_cuts(captured, 1 + seed % 6, seed))


def test_forward_ops_stand_in_the_order_of_the_graph(captured):
    for seed in SEEDS:
        cuts = staged.random_cuts(captured, 1 + seed % 6, seed)
        placement, stage = StagePlacement(captured.graph, cuts), 0
        for name in staged.forward_ops(captured):
            node = next(n for n in placement.nodes if n.name == name)
            stage += name in cuts
            if node in placement.of_parameters:  # a weight that is computed: where it is first read
                readers = [placement.stage[u] for u in node.users if u in placement.stage]
                assert placement.stage[node] == min(readers, default=placement.stage[node]) >= stage, (
                    f"seed {seed}: {name}"
                )
            else:
                assert node in placement.free or placement.stage[node] == stage, f"seed {seed}: {name}"


def test_everything_is_somewhere_once(captured):
    """Every op has one stage, or is computed where it is read, or is a term of a sum."""
    for seed in SEEDS:
        placement = placed(captured, seed)
        for node in placement.nodes:
            if is_op(node):
                assert (node in placement.stage) + (node in placement.free) + (node in placement.terms) == 1, (
                    f"seed {seed}: {node}"
                )
        assert set(placement.stage.values()) <= set(range(placement.count))


def test_values_flow_forward_and_gradients_back(captured):
    for seed in SEEDS:
        placement = placed(captured, seed)
        for node, stage in placement.stage.items():
            for argument in node.all_input_nodes:
                if argument in placement.stage and tensor_of(node)[0] is not argument:
                    back = argument.meta["phase"] == "backward"
                    ahead = placement.stage[argument] < stage
                    assert not (back and ahead), f"seed {seed}: {node} reads a gradient of an earlier stage, {argument}"
                    if node.meta["phase"] == "forward":
                        assert placement.stage[argument] <= stage, (
                            f"seed {seed}: {node} reads {argument} of a later stage"
                        )


def _leaves(node: fx.Node, placed_nodes) -> set[fx.Node]:
    """The placeholders and placed values that a stage needs to compute a node."""
    if node in placed_nodes or node.op == "placeholder":
        return {node}
    return set().union(*(_leaves(a, placed_nodes) for a in node.all_input_nodes)) if node.all_input_nodes else set()


def test_parameters_are_where_they_are_read(captured):
    for seed in SEEDS:
        placement = placed(captured, seed)
        read: dict[fx.Node, set[int]] = {}
        for node, stage in placement.stage.items():
            for argument in node.all_input_nodes:
                for leaf in _leaves(argument, placement.stage):
                    read.setdefault(leaf, set()).add(stage)
        for parameter, mask in placement.parameters.items():
            assert stages_of(mask) == read.get(parameter, set()), f"seed {seed}: {parameter}"
            forward = {placement.stage[n] for n in placement.stage if n.meta["phase"] == "forward"
                       and any(parameter in _leaves(a, placement.stage) for a in n.all_input_nodes)}  # fmt: skip
            assert stages_of(mask) == forward, f"seed {seed}: the backward alone brings {parameter} to a stage"


def test_a_chain_of_layers_sends_one_value_each_way():
    """Layer i's ops of both phases are on stage i, and its weight's gradient is made there."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)], nn.Linear(4, 1))
    captured = compiler.trace(model, (torch.randn(4, 4),), lambda output: output.square().mean())
    modules = {n.name: n.meta["module"] for n in captured.graph.nodes}
    ops = staged.forward_ops(captured)
    cuts = [next(name for name in ops if modules[name].split(".")[0] == str(i)) for i in range(1, 6)]
    placement = StagePlacement(captured.graph, cuts)
    for node, stage in placement.stage.items():
        block = node.meta["module"].split(".")[0]
        assert not block or stage == int(block), node
    assert all(stages_of(mask) == {int(n.meta["role"].name[0])} for n, mask in placement.parameters.items())
    assert not placement.terms


def test_a_tied_weight_is_on_the_stages_of_its_uses_and_its_terms_on_none():
    captured = staged.family("gpt2").captured
    placement = StagePlacement(captured.graph, staged.even_cuts(captured, 4))
    tied = next(n for n in placement.parameters if n.meta["role"].name == "transformer.wte.weight")
    assert stages_of(placement.parameters[tied]) == {0, 3}
    assert placement.terms and set(placement.terms.values()) == {tied} and all(map(is_sum, placement.terms))
    assert not set(placement.terms) & set(placement.stage)


@pytest.mark.parametrize("name", CASES)
def test_what_counts_as_a_sum_is_linear(name):
    """f(a x + b y) = a f(x) + b f(y) in all arguments together."""
    torch.manual_seed(0)
    case, seen = staged.family(name), set()
    for node in case.captured.graph.nodes:
        values = [a.meta["val"] for a in node.all_input_nodes] if is_op(node) else []
        if not is_op(node) or node.target in seen or not is_sum(node) or not all(v.is_floating_point() for v in values):
            continue
        seen.add(node.target)

        def run(inputs, node=node):
            of = dict(zip(node.all_input_nodes, inputs))
            args, kwargs = fx.map_arg((node.args, node.kwargs), of.__getitem__)
            return node.target(*args, **kwargs)

        x, y = ([torch.randn(v.shape, dtype=v.dtype) for v in values] for _ in range(2))
        mixed = run([2 * a - 3 * b for a, b in zip(x, y)])
        assert torch.allclose(mixed, 2 * run(x) - 3 * run(y)), node
    assert seen


@pytest.mark.parametrize("pick", [
    lambda ops: [ops[5], ops[3]], lambda ops: [ops[3], ops[3]], lambda ops: ["nowhere"],
    lambda ops: [ops[2], "p_transformer_wte_weight"],
])  # fmt: skip
def test_wrong_cuts(pick):
    captured = staged.family("gpt2").captured
    cuts = pick(staged.forward_ops(captured))
    with pytest.raises(StageError, match="stages cannot begin at") as caught:
        StagePlacement(captured.graph, cuts)
    assert any(name in str(caught.value) for name in cuts) and caught.value.fix


def test_a_backward_op_begins_no_stage():
    captured = staged.family("gpt2").captured
    op = next(n.name for n in captured.graph.nodes if is_op(n) and n.meta["phase"] == "backward")
    with pytest.raises(StageError, match=op):
        StagePlacement(captured.graph, [op])


def test_a_parameter_that_only_an_output_reads_is_on_the_last_stage():
    captured = compiler.trace(staged.Apart(), (torch.randn(4, 6),))
    placement = StagePlacement(captured.graph, staged.even_cuts(captured, 2))
    apart = next(n for n in placement.parameters if n.meta["role"].name == "apart")
    assert stages_of(placement.parameters[apart]) == {1}


def test_first_of():
    assert [first_of(mask, 7) for mask in (0, 1, 2, 6, 12, 1 << 40)] == [7, 0, 1, 1, 2, 40]
