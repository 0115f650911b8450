"""The tail of a step: what needs all samples runs once, between forwards and backwards, in a graph of its own."""

from __future__ import annotations

from functools import cache
from random import Random

import pytest
import torch
from torch import nn

from autopar import compiler
from autopar.codegen.graph_text import graph_text
from autopar.errors import MicroBatchError
from autopar.ir.graph import is_op, output_node, outputs_of
from autopar.passes.pipeline.micro_batch import few_blocks, micro_batch
from autopar.passes.pipeline.stages import cut
from autopar.passes.pipeline.tail import check_waits
from autopar.schedule import KINDS
from autopar.schedule.catalogue import make
from tests.families import FAMILIES
from tests.helpers import staged, whole_batch


def check(case: staged.Case, count: int, note: object, seed: int = 0) -> None:
    """A step in so many micro-batches through three stages, cut anywhere, is one device's on the whole batch."""
    micro = micro_batch(case.captured, count)
    assert micro.tail is not None
    cuts = staged.random_cuts(micro.captured, 3, seed)
    step = staged.play_stages(micro, cut(micro.captured.graph_module, cuts), case.values, cuts)
    case.check(step, f"{note} in {count} micro-batches, cut at {cuts}")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("samples", [6, 7])
@pytest.mark.parametrize("loss", whole_batch.LOSSES)
def test_losses_of_all_samples(loss, samples):
    case = staged.Case.of(whole_batch.Pairs(loss), whole_batch.pairs(samples))
    for seed, count in enumerate((2, 3, 5, samples)):
        print(f"seed {seed}")
        check(case, count, loss, seed)


@pytest.mark.slow  # a mask is the harder case; simulate/test_tail.py has Mixtral on ranks
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe", "phimoe"])
def test_balance_of_experts(name):
    model, inputs = whole_batch.balanced(name, 5)
    case = staged.Case.of(model, staged.ragged(inputs))
    alone = staged.Case.of(model, {**staged.ragged(inputs), "output_router_logits": False})
    gates = [n for n in case.wanted.gradients if "gate.weight" in n or "router.weight" in n]
    assert any(staged.relative_error(alone.wanted.gradients[n], case.wanted.gradients[n]) > 1e-2 for n in gates)
    for seed, count in enumerate((2, 3, 5)):
        check(case, count, name, seed)


def test_padding_counts_for_the_whole_batch():
    """Shares of tokens are of those that the mask lets in, of which micro-batches have different numbers."""
    model, inputs = whole_batch.balanced("mixtral", 4)
    mask = torch.ones_like(inputs["input_ids"])
    for i in range(4):
        mask[i, 2 * i + 1 :] = 0
    case = staged.Case.of(model, {**inputs, "attention_mask": mask})
    for count in (2, 3, 4):
        check(case, count, "padded")


def test_a_balance_in_every_layer():
    case = staged.Case.of(whole_batch.Layered(3), (torch.randn(6, 5, 6),))
    for count in (2, 4, 6):
        check(case, count, "layered")
    tail = micro_batch(case.captured, 2).tail
    assert {len(tail.cotangents), len(tail.joined)} == {3, 7}


@pytest.mark.slow
def test_a_balance_of_all_layers_is_added_up_by_stages():
    case = staged.Case.of(whole_batch.Gathered(9), (torch.randn(6, 5, 6), torch.rand(6, 5)))
    assert case.captured.compact is not None
    check(case, 3, "gathered")


def test_the_tail_of_experts_is_small_and_reads(golden):
    """It has the shares and the mean probabilities of the experts, and the loss without them."""
    torch.manual_seed(0)
    model, inputs = FAMILIES["mixtral"](4, 8)
    captured = compiler.trace(model, {**inputs, "output_router_logits": True})
    tail = micro_batch(captured, 2).tail
    ops = [n for n in tail.graph_module.graph.nodes if is_op(n)]
    assert max(n.meta["val"].numel() for n in ops) == 4 and len(ops) < 15
    golden(graph_text(tail.graph_module))


def test_the_tail_of_pairs_reads(golden):
    """It has the logits, and ends with the gradients of the embeddings."""
    captured = compiler.trace(whole_batch.Pairs("clip"), whole_batch.pairs(6))
    micro = micro_batch(captured, 2)
    assert [micro.joins[str(i)] for i in range(3)] == ["same", "same", 0]
    golden(graph_text(micro.tail.graph_module))


def test_joined_values_and_cotangents_are_in_the_last_stage():
    captured = compiler.trace(whole_batch.Pairs("siglip"), whole_batch.pairs(6))
    micro = micro_batch(captured, 3)
    for seed in range(8):
        print(f"seed {seed}")
        *others, last = cut(micro.captured.graph_module, staged.random_cuts(micro.captured, 4, seed))
        roles = [r.kind for stage in others for _, r in outputs_of(stage.joint.graph)]
        leaves = [n.meta["role"].kind for s in others for n in s.joint.graph.find_nodes(op="placeholder")]
        assert "joined" not in roles and "cotangent" not in leaves
        assert {r.name for _, r in outputs_of(last.joint.graph) if r.kind == "joined"} == {*micro.tail.joined}


class Largest(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        y = self.layer(x)
        return dict(loss=y.square().mean(), largest=y.detach().amax(0))


def test_the_largest_of_the_batch_is_an_output_of_the_tail():
    check(staged.Case.of(Largest(), (torch.randn(8, 6),)), 2, "largest")


def test_no_tail_where_none_is_needed():
    micro = micro_batch(staged.family("gpt2").captured, 2)
    assert micro.tail is None and "joined" not in {r.kind for r in output_node(micro.captured.graph).meta["roles"]}


def test_few_blocks_of_a_deep_model_have_it_too():
    torch.manual_seed(0)
    captured = compiler.trace(whole_batch.Layered(12), (torch.randn(6, 5, 6),))
    few = few_blocks(captured, 2)
    assert sum(r.kind == "joined" for r in output_node(few.captured.graph).meta["roles"]) > 2


class Normed(nn.Module):
    """Samples less their mean, in the middle of a model."""

    def __init__(self, middle: nn.Module):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), middle, nn.Linear(6, 6)

    def forward(self, x):
        return self.last(self.middle(self.first(x))).square().mean()


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Dropped(nn.Module):
    """A loss of all pairs whose logits are dropped at random."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)

    def forward(self, x):
        y = self.first(x)
        return nn.functional.dropout(y @ y.t(), 0.1).logsumexp(-1).mean()


@pytest.mark.parametrize("model", [Normed(nn.BatchNorm1d(6)), Normed(Centred()), Dropped()])
def test_weights_and_random_numbers_are_not_in_a_tail(model):
    captured = compiler.trace(model, (torch.randn(4, 6),))
    with pytest.raises(MicroBatchError, match="all samples") as caught:
        micro_batch(captured, 2)
    assert caught.value.fix == "use one micro-batch"


@cache
def tail_of_pairs(count: int):
    captured = compiler.trace(whole_batch.Pairs("clip"), whole_batch.pairs(6))
    return micro_batch(captured, count).tail


@pytest.mark.parametrize("schedule", KINDS)
def test_schedules_that_end_their_forwards_first(schedule):
    orders = make(schedule, 2, 4)
    assert orders.ends_forwards_first == (schedule == "gpipe") and make(schedule, 2, 1).ends_forwards_first
    tail = tail_of_pairs(4 if schedule != "gpipe" else 2)
    if schedule == "gpipe":
        check_waits(tail, orders)
        return
    with pytest.raises(MicroBatchError) as caught:
        check_waits(tail, orders)
    assert schedule in caught.value.message and "gpipe" in caught.value.fix and "whole_batch.py" in caught.value.source


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(12))
def test_random_losses(seed):
    """Sums, maxima and pairs of what two layers make, put together at random."""
    random = Random(seed)
    print(f"seed {seed}")
    samples = random.choice([4, 5, 6])
    case = staged.Case.of(Mixed(seed), (torch.randn(samples, 3, 6, generator=torch.Generator().manual_seed(seed)),))
    for count in {2, random.randint(2, samples)}:
        check(case, count, f"seed {seed}", seed)


TERMS = {
    "pairs": lambda a, b: (a.mean(1) @ b.mean(1).t()).logsumexp(-1).mean(),
    "all tokens": lambda a, b: (a.flatten(0, 1) @ b.flatten(0, 1).t()).tanh().square().mean(),
    "ratio": lambda a, b: (a * b).sum() / (1 + b.square().sum()),
    "product of sums": lambda a, b: a.sum((0, 1)) @ b.mean((0, 1)),
    "variance": lambda a, b: a.flatten(0, 1).var(0).log().mean(),
    "square of a mean": lambda a, b: b.exp().mean().square(),
    "ranks": lambda a, b: (a.mean((1, 2))[:, None] - b.mean((1, 2))[None]).sigmoid().mean(),
}


class Mixed(nn.Module):
    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.third = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(6, 2)
        self.terms = Random(seed).sample(sorted(TERMS), 2)

    def forward(self, x):
        a, b = self.first(x).tanh(), self.second(x)
        first, second = (TERMS[name](a, b) for name in self.terms)
        return dict(loss=first * second + first + self.third(x).square().mean(), a=a, second=second)


@pytest.mark.parametrize("samples", [pytest.param(6, marks=pytest.mark.slow), 7])  # 7: two sizes of micro-batches
def test_blocks_of_a_deep_model_stand_for_those_of_its_micro_batch(samples):
    """Blocks have what they hand to the tail and get of it, in smaller micro-batches too."""
    torch.manual_seed(0)
    micro = micro_batch(compiler.trace(whole_batch.Layered(12), (torch.randn(samples, 5, 6),)), 2)
    for captured in (micro.captured, micro.smaller) if samples == 7 else (micro.captured,):
        compact = captured.compact
        whole = {node for node in captured.graph.nodes if node.op != "output"}
        small = [node for node in compact.graph.nodes if node.op != "output"]
        assert len(small) < len(whole)
        for first in (1, compact.most - 1):
            stood = [node for n in small for node in compact.nodes(n, first)]
            assert len(stood) == len(whole) and {*stood} == whole
        joined = [node for node in small if node.name.startswith("j_")]
        assert {compact.block(node) for node in joined} >= {*range(1, 7)}
