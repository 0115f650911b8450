"""Ops that write over what nothing else reads give what they gave before, and leave all else as it is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx

from autopar.codegen.expand_last import expand_last
from autopar.codegen.write_over import IN_PLACE, WRITES_OUT, write_over

from .test_buckets_in_place import Alone, before_and_after, made_up

aten = torch.ops.aten
WRITTEN = {*IN_PLACE.values(), *(op for op, _ in WRITES_OUT.values())}


def written(module: fx.GraphModule) -> list[str]:
    """Return the names of the nodes that write over an argument."""
    return [node.name for node in module.graph.nodes if node.target in WRITTEN]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", ["llama:hidden=16,layers=1,heads=2,vocab=32", "mlp:hidden=16,layers=2"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_results_and_arguments_stay(model, strategy):
    for _, before in before_and_after(model, strategy, 2.0**20):
        after = copy.deepcopy(before)
        expand_last(after)
        write_over(after)
        after.graph.lint()
        assert written(after)
        values = made_up(before.graph)
        kept = [value.clone() for value in values]
        wanted = [x.clone() for x in Alone(before).run(*[v.clone() for v in values]) if isinstance(x, torch.Tensor)]
        got = [x for x in Alone(after).run(*values) if isinstance(x, torch.Tensor)]
        assert len(got) == len(wanted) and all(map(torch.equal, got, wanted))
        assert all(map(torch.equal, values, kept))


def traced(function, *values) -> fx.GraphModule:
    """Return a graph in ATen ops with the values of its nodes."""
    return torch.fx.experimental.proxy_tensor.make_fx(function, tracing_mode="fake")(*values)


X, ROW = torch.ones(4, 3), torch.ones(3)
INDEX = torch.tensor([0, 2])


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda x, row, index: (x * 2 + row) / 3, 2),  # the first may not write over what it was given
        (lambda x, row, index: row + x * 2, 1),  # over the second argument
        (lambda x, row, index: (x * 2, x * 2 + 1), 1),
        (lambda x, row, index: (lambda y: (y, y + 1))(x * 2), 0),  # is returned
        (lambda x, row, index: (lambda y: (y.view(12), y + 1))(x * 2), 0),  # another lies in it
        (lambda x, row, index: (lambda y: (y + 1, y * 3))(x * 2), 1),  # the last that reads it
        (lambda x, row, index: (lambda y: y * y)(x * 2), 0),  # reads it twice
        (lambda x, row, index: row.neg() + x, 0),  # is broadcast
        (lambda x, row, index: (x * 2).to(torch.float64) + 1.0, 1),
        (lambda x, row, index: x * 2 + x.double(), 1),  # the one of the result's type
        (lambda x, row, index: x.new_zeros(4, 3).index_add(0, index, x[:2].clone()), 1),
        (lambda x, row, index: (x * 2).t() + x.t(), 0),  # a view
    ],
)
def test_what_may_be_written_over(function, count):
    before = traced(function, X, ROW, INDEX)
    after = copy.deepcopy(before)
    write_over(after)
    after.recompile()
    assert len(written(after)) == count, after.code
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 3, generator=generator), torch.randn(3, generator=generator), INDEX
    kept = [value.clone() for value in values]
    wanted, got = before(*values), after(*values)
    wanted, got = ([x] if isinstance(x, torch.Tensor) else x for x in (wanted, got))
    assert all(map(torch.equal, got, wanted)) and all(map(torch.equal, values, kept))


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda x, row, index: x * (row.expand(4, 3) / 2), 1),
        (lambda x, row, index: (row.expand(4, 3) / 2).view(12) + 1, 0),  # reads it as it lies
        (lambda x, row, index: x * (row.expand(4, 3) / x), 0),
    ],
)
def test_expand_comes_last(function, count):
    before = traced(function, X, ROW, INDEX)
    after = copy.deepcopy(before)
    expand_last(after)
    after.graph.lint()
    after.recompile()
    found = [n for n in after.graph.nodes if n.target is aten.div.Tensor and n.meta["val"].dim() == 1]
    assert len(found) == count, after.code
    values = torch.randn(4, 3), torch.randn(3), INDEX
    assert torch.equal(before(*values), after(*values))
