"""Stages cut at any ops give what the whole graph gives, hand on what others read, and hold the parameters that they
read."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from autopar.ir.graph import is_op, output_node
from autopar.ir.stage_placement import StagePlacement
from autopar.passes.pipeline.micro_batch import micro_batch
from autopar.passes.pipeline.stages import cut
from tests.helpers import staged

MICRO_BATCHES = {"mixtral": 1, "resnet": 1}  # of the others: each number that divides the batch
MODELS = {"gpt2": 4, "llama": 2, "t5": 4, "bert": 2, "vit": 2, "mixtral": 3, "resnet": 3}  # cuts of each


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
def test_cut_anywhere(name):
    """A seed gives 1 to 6 stages and where they begin, and the number of micro-batches."""
    case = staged.family(name)
    for seed in range(MODELS[name]):
        micro = micro_batch(case.captured, MICRO_BATCHES.get(name, (4, 2, 1)[seed % 3]))
        cuts = staged.random_cuts(micro.captured, 6 - seed % 6, seed)
        stages = cut(micro.captured.graph_module, cuts)
        case.check(staged.play_stages(micro, stages, case.values), f"{name} cut at {cuts}, seed {seed}")


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("text", [
    "gpt:layers=2,hidden=16,heads=2,vocab=32", "llama:layers=2,hidden=16,heads=2,vocab=32,tied=true",
    "moe:layers=1,hidden=16,heads=2,vocab=32,experts=4",
])  # fmt: skip
def test_own_models(text):
    case = staged.own(text)
    for seed in range(2):
        micro = micro_batch(case.captured, 4)
        stages = cut(micro.captured.graph_module, staged.random_cuts(micro.captured, 5, seed))
        case.check(staged.play_stages(micro, stages, case.values), f"{text}, seed {seed}")


SOME = ["gpt2", "t5", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "mixtral"))]


@pytest.fixture(scope="module", params=SOME)
def joint(request):
    case = staged.family(request.param)
    return micro_batch(case.captured, MICRO_BATCHES.get(request.param, 4)).captured


def cuts_of(joint):
    for seed in range(6):
        yield seed, staged.random_cuts(joint, 1 + seed, seed)


def test_what_is_sent_is_received(joint):
    for seed, cuts in cuts_of(joint):
        stages = cut(joint.graph_module, cuts)
        assert [s.index for s in stages] == list(range(len(cuts) + 1))
        for before, after in zip(stages, stages[1:]):
            assert set(before.sent) == set(after.received), f"seed {seed}"
            assert set(before.arriving) == set(after.returned), f"seed {seed}"
        assert not stages[0].received and not stages[0].returned and not stages[-1].sent and not stages[-1].arriving
        for stage in stages:
            for names in (stage.received, stage.sent, stage.arriving, stage.returned):
                assert len(names) == len(set(names)), f"seed {seed}: a name twice in {names}"
            assert set(stage.tensors) == {*stage.received, *stage.sent, *stage.arriving, *stage.returned}


def test_nothing_is_sent_that_nobody_reads(joint):
    """A stage reads or hands on all that it receives."""
    for seed, cuts in cuts_of(joint):
        for stage in cut(joint.graph_module, cuts):
            for node in stage.joint.graph.nodes:
                if node.op == "placeholder":
                    assert node.users, f"seed {seed}: stage {stage.index} has no use for {node}"


def test_parameters_are_on_the_stages_that_read_them(joint):
    for seed, cuts in cuts_of(joint):
        stages, placement = cut(joint.graph_module, cuts), StagePlacement(joint.graph, cuts)
        for leaf, mask in placement.parameters.items():
            name = leaf.meta["role"].name
            there = sum(1 << s.index for s in stages if name in s.parameters)
            assert there == mask, f"seed {seed}: {name}"
        for stage in stages:
            leaves = [n.meta["role"].name for n in stage.joint.graph.nodes if n.op == "placeholder"
                      and n.meta["role"].kind == "parameter"]  # fmt: skip
            assert tuple(leaves) == stage.parameters
            gradients = [r.name for r in output_node(stage.joint.graph).meta["roles"] if r.kind == "gradient"]
            assert len(gradients) == len(set(gradients)) and set(gradients) <= set(stage.parameters), f"seed {seed}"


def test_every_op_is_in_one_stage(joint):
    """But for what every stage computes that reads it, and for sums of gradients over stages."""
    for seed, cuts in cuts_of(joint):
        placement = StagePlacement(joint.graph, cuts)
        count = Counter(n.name for stage in cut(joint.graph_module, cuts) for n in stage.joint.graph.nodes if is_op(n))
        for node in joint.graph.nodes:
            if is_op(node) and node not in placement.free and node not in placement.terms and node.users:
                assert count[node.name] == 1, f"seed {seed}: {node} runs {count[node.name]} times"
        forward = {n.name for n in placement.nodes if n in placement.stage and n.meta["phase"] == "forward"}
        assert forward <= {*count, *(n.name for n in placement.nodes if not is_op(n))}


def test_outputs_are_given_once(joint):
    for seed, cuts in cuts_of(joint):
        stages, roles = cut(joint.graph_module, cuts), output_node(joint.graph).meta["roles"]
        given = Counter(o for s in stages for o in s.outputs if isinstance(o, int))
        for at, role in enumerate(roles):
            assert given[at] == 1 or role.kind == "gradient" and given[at] >= 1, f"seed {seed}: {role}"
        for stage in stages:
            mine = output_node(stage.joint.graph).meta["roles"]
            assert len(mine) == len(stage.outputs)
            for position, role in zip(stage.outputs, mine):
                assert roles[position] == role if isinstance(position, int) else position == role.name


class Residual(nn.Module):
    """x -> x + tanh(W x) in every block; the first block's input is added at the end once more."""

    def __init__(self, depth: int, skip: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.skip = nn.Linear(4, 4), skip
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))

    def forward(self, x):
        x = start = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return (x + start if self.skip else x).square().mean()


def block_cuts(case, depth: int) -> list[str]:
    ops = {n.name: n.meta["module"] for n in case.captured.graph.nodes if is_op(n) and n.meta["phase"] == "forward"}
    return [next(name for name, module in ops.items() if module == f"blocks.{i}") for i in range(depth)]


@pytest.mark.parametrize("skip", [False, True])
def test_a_crossing_value_is_sent_once_each_way(skip):
    """One activation and one gradient over each cut; with a value that the last stage reads, two and two."""
    case = staged.Case.of(Residual(3, skip), (torch.randn(4, 4),))
    stages = cut(case.captured.graph_module, block_cuts(case, 3))
    crossing = [1, 1 + skip, 1 + skip]
    assert [len(s.sent) for s in stages] == crossing + [0]
    assert [len(s.returned) for s in stages] == [0] + crossing
    assert [s.parameters for s in stages] == [("first.weight", "first.bias"), *(
        (f"blocks.{i}.weight", f"blocks.{i}.bias") for i in range(3))]  # fmt: skip
    case.check(staged.play_stages(micro_batch(case.captured, 1), stages, case.values), f"skip {skip}")


def test_what_follows_from_inputs_is_computed_and_not_sent():
    """Labels, masks and rotary tables."""
    case = staged.family("llama")
    stages = cut(case.captured.graph_module, staged.even_cuts(case.captured, 4))
    for stage in stages:
        for name in stage.received:
            producer = stage.tensors[name][0]
            node = next(n for n in case.captured.graph.nodes if n.name == producer)
            above, found = [node], set()
            while above:
                found.add(above[-1])
                above.extend(a for a in above.pop().all_input_nodes if a not in found)
            assert any(n.op == "placeholder" and n.meta["role"].kind == "parameter" for n in found), name


def test_a_shared_weight_gets_a_part_of_its_gradient_on_each_stage():
    case = staged.family("gpt2")
    stages = cut(case.captured.graph_module, staged.even_cuts(case.captured, 3))
    assert [("transformer.wte.weight" in s.parameters) for s in stages] == [True, False, True]
    step = staged.play_stages(micro_batch(case.captured, 1), stages, case.values)
    case.check(step, "tied embeddings")


def test_the_same_cut_gives_the_same_graphs():
    captured = staged.family("t5").captured
    cuts = staged.random_cuts(captured, 4, 1)
    one, two = (cut(captured.graph_module, cuts) for _ in range(2))
    assert [str(s.joint.graph) for s in one] == [str(s.joint.graph) for s in two]
