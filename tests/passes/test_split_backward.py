"""B and W of stages: together they are the backward, bit by bit and op by op, and each has only what it must."""

from __future__ import annotations

import pytest
import torch

from autopar.codegen.python_code import is_collective
from autopar.codegen.split_batch import parts_of
from autopar.compiler import lower_pipeline
from autopar.ir.graph import output_node
from autopar.passes.distribute.partition import partition
from autopar.passes.pipeline.micro_batch import micro_batch
from autopar.passes.pipeline.split_backward import split_backward
from autopar.passes.pipeline.stages import cut
from tests.helpers import staged


def backwards(name: str, stages: int, seed: int):
    """The stages of a micro-batch with their parts; the last ones may compute nothing that has a gradient."""
    case = staged.family(name)
    micro = micro_batch(case.captured, 1 if name in ("mixtral", "resnet") else 2)
    found = cut(micro.captured.graph_module, staged.random_cuts(micro.captured, stages, seed))
    return case, micro, [(s, partition(s.joint)) for s in found]


CASES = [("gpt2", 4, 0), ("gpt2", 1, 1), ("t5", 5, 2), ("llama", 3, 3), ("vit", 2, 4), ("mixtral", 3, 5),
         ("bert", 6, 6), ("resnet", 3, 7)]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name, stages, seed", CASES)
def test_the_two_give_what_the_backward_gives(name, stages, seed):
    case, micro, played = backwards(name, stages, seed)
    given, passing, kept = {**case.values, **parts_of(micro, case.values)[0]}, {}, []
    for _, parts in played:
        leaves = [n.name for n in parts.forward.graph.nodes if n.op == "placeholder"]
        results = parts.forward(*((given | passing)[leaf] for leaf in leaves))
        kept.append(results[len(results) - len(parts.saved) :])
        passing = {r.name: v for r, v in zip(roles_of(parts.forward), results) if r and r.kind == "activation"}
    for (stage, parts), saved in reversed(list(zip(played, kept))):
        if parts.backward is None:
            assert not stage.arriving and not stage.returned
            continue
        leaves = [n.name for n in parts.backward.graph.nodes if n.op == "placeholder"][len(saved) :]
        inputs = [*saved, *((given | passing)[leaf] for leaf in leaves)]
        wanted = {(r.kind, r.name): v for r, v in zip(roles_of(parts.backward), parts.backward(*inputs))}
        split = split_backward(parts.backward)
        first = split.input(*inputs)
        count = len(first) - len(split.stash)
        second = split.weight(*(inputs[i] for i in split.weight_inputs), *first[count:])
        mine = [*zip(roles_of(split.input)[:count], first), *zip(roles_of(split.weight), second)]
        assert [r.kind for r, _ in mine] == ["returned"] * count + ["gradient"] * len(second), (name, seed, stage.index)
        assert {(r.kind, r.name) for r, _ in mine} == set(wanted) and len(mine) == len(wanted)
        for role, value in mine:
            assert torch.equal(value, wanted[role.kind, role.name]), (name, seed, stage.index, role)
        passing = {name: value for (kind, name), value in wanted.items() if kind == "returned"}


def roles_of(graph) -> list:
    return output_node(graph.graph).meta["roles"]


def ops_of(graph) -> list[str]:
    return [n.name for n in graph.graph.nodes if n.op == "call_function"]


def needed_for(backward, roles) -> set[str]:
    """Names of the ops that the outputs of these roles follow from."""
    output = output_node(backward.graph)
    stack, found = (
        [v for v, r in zip(output.args[0], output.meta["roles"]) if r in roles and isinstance(v, torch.fx.Node)],
        set(),
    )
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return {n.name for n in found if n.op == "call_function"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name, stages, seed", CASES)
def test_every_op_is_in_one_of_the_two(name, stages, seed):
    """And in W if only one parameter's gradient needs it."""
    for stage, parts in backwards(name, stages, seed)[2]:
        if parts.backward is None:
            continue
        backward, split = parts.backward, split_backward(parts.backward)
        first, second = ops_of(split.input), ops_of(split.weight)
        live = needed_for(backward, roles_of(backward))
        where = (name, seed, stage.index)
        assert len(first) + len(second) == len({*first, *second}) and {*first, *second} == live, where
        gradients = [r for r in roles_of(backward) if r.kind == "gradient"]
        returned = needed_for(backward, [r for r in roles_of(backward) if r.kind == "returned"])
        of_each = [needed_for(backward, [r]) for r in gradients]
        for op in live:
            users = sum(op in mine for mine in of_each)
            assert (op in first) == (op in returned or users > 1), (*where, op, users)


def test_kept_and_stash_are_read():
    for stage, parts in backwards("gpt2", 3, 0)[2]:
        split = split_backward(parts.backward)
        for node in split.weight.graph.nodes:
            assert node.op != "placeholder" or node.users, (stage.index, node)


@pytest.mark.parametrize("name, mesh, strategy", [
    ("gpt2", "pp=2,tp=2", "megatron"),
    pytest.param("llama", "pp=2,dp=2,tp=2", "megatron", marks=pytest.mark.slow),
])  # fmt: skip
def test_the_weight_part_has_no_collective(name, mesh, strategy):
    """Gradients wait unreduced for the end of the step, and partial sums over tp are in the chain between layers."""
    case = staged.family(name)
    micro = micro_batch(case.captured, 2)
    program = lower_pipeline(case.captured, staged.plan_of(micro, mesh, "zb_h1", strategy=strategy), 0, True)
    chain = 0
    for stage in program.stages.values():
        collectives = [n for n in stage.split.weight.graph.nodes if is_collective(n)]
        assert not collectives, collectives
        chain += sum(map(is_collective, stage.split.input.graph.nodes))
    assert chain, "the strategy needs none at all"
