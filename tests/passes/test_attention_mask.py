"""Masks of attention become causal and what is left of them, with the same numbers."""

from __future__ import annotations

import random

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from autopar import compiler
from autopar.ops import autopar
from autopar.passes.canonicalize import constant_values
from autopar.rules.reading import bound
from autopar.simulate.compare import verify_model

from ..families import FAMILIES


class Masked(nn.Module):
    """Attention under a mask that is built from arange and from an input, as libraries build it."""

    def __init__(self, kind: str, seq: int = 6):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.qkv = kind, nn.Linear(8, 24)

    def forward(self, x, keep):
        b, s = x.shape[:2]
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        place = torch.arange(s).expand(b, -1)
        row, column = place[:, None, :, None], place[:, None, None, :]
        padding = keep[:, None, None, :]
        mask = {
            "padding": lambda: padding.expand(b, 1, s, s),
            "causal padding": lambda: ((column <= row) & padding).expand(b, -1, s, s),
            "causal": lambda: column <= row,
            "open": lambda: (column >= 0) & (row >= 0),
            "window": lambda: (column <= row) & (column > row - 3),
            "window padding": lambda: (column <= row) & (column > row - 3) & padding,
            "both sides": lambda: (column - row).abs() <= 2,
            "both sides padding": lambda: (
                (row - column < 3) & ((column - row).abs() < 4) & (row > column - 3) & keep[:, None, None]
            ),
            "three in front": lambda: (row - column >= -3) & (column > row - 3),
            "one side": lambda: column > row - 3,
            "one side padding": lambda: (column > row - 3) & padding,
            "query padding": lambda: (column <= row) & keep[:, None, :, None] & (column >= 0),
            "two paddings": lambda: torch.logical_and(padding & (column <= row), keep[:, None, :, None]),
        }[self.kind]()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).square().mean()


def batch(size: int = 4, seq: int = 6) -> dict[str, torch.Tensor]:
    lengths = torch.arange(size) % seq + 1
    x = torch.randn(size, seq, 8, generator=torch.Generator().manual_seed(1))
    return dict(x=x, keep=torch.arange(seq) < lengths[:, None])


FULL = (1, 1, 6, 6)  # a constant of all pairs
FOUND = {
    "padding": ((4, 1, 1, 6), False), "causal padding": ((4, 1, 1, 6), True), "causal": (None, True),
    "open": (None, False), "window": (None, True, 3),
    "window padding": ((4, 1, 1, 6), True, 3),
    "both sides": (None, False, 3), "both sides padding": ((4, 1, 1, 6), False, 3), "three in front": (FULL, False),
    "one side": (FULL, False), "one side padding": ((4, 1, 6, 6), False),
    "query padding": ((4, 1, 6, 1), True), "two paddings": ((4, 1, 6, 6), True),
}  # fmt: skip


KINDS = tuple(FOUND)


def attention_of(captured):
    (node,) = captured.graph.find_nodes(op="call_function", target=autopar.attention.default)
    mask = node.args[3]
    window = bound(node)["window"]
    return None if mask is None else tuple(mask.meta["val"].shape), node.args[4], *([window] if window else [])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left(kind):
    assert attention_of(compiler.trace(Masked(kind), batch())) == FOUND[kind]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_numbers(kind):
    report = verify_model(Masked(kind), batch(), "dp=2,tp=2")
    assert report.match, str(report)


@pytest.mark.parametrize("kind", ["causal", "open", "window"])
def test_a_large_batch_is_computed_as_one_sample(kind, monkeypatch):
    """A limit that a sample keeps and a batch does not; no mask of the whole batch exists meanwhile."""
    monkeypatch.setattr(constant_values, "LARGEST_NUMEL", 40)
    largest = []
    evaluated = constant_values._evaluated

    def seen(node, *rest, **options):
        value = evaluated(node, *rest, **options)
        largest.append(value.untyped_storage().nbytes() if value.dim() == 4 else 0)
        return value

    monkeypatch.setattr(constant_values, "_evaluated", seen)
    assert attention_of(compiler.trace(Masked(kind), batch(16))) == FOUND[kind]
    assert max(largest) <= 6 * 8  # indices of a row of one sample, and its mask


def test_samples_that_are_alike_are_read_as_they_were_traced():
    """Ops that look at strides find those of whole samples; others give what they give of whole ones."""
    aten, graph = torch.ops.aten, fx.Graph()
    rng = random.Random(seed := random.randrange(1 << 30))
    print("seed", seed)
    b, s = rng.randint(2, 5), rng.randint(2, 6)
    places = graph.get_attr("places")
    ones = graph.call_function(aten.ones.default, ([b, s],), {"dtype": torch.int64})
    counts = graph.call_function(aten.cumsum.default, (ones, -1))
    steps = graph.call_function(aten.diff.default, (counts, 1, -1, ones))
    odd = graph.call_function(aten.ne.Scalar, (counts, 2))
    flat = graph.call_function(aten.view.default, (odd, [b * s]))
    read = graph.call_function(aten.index.Tensor, (counts, [None, places]))
    turned = graph.call_function(aten.as_strided.default, (counts, [s, b], [1, s]))
    along_samples = graph.call_function(aten.cumsum.default, (counts, 0))
    held = nn.Module()
    held.register_buffer("places", torch.tensor([rng.randrange(s) for _ in range(3)]))
    module = fx.GraphModule(held, graph)
    values = {}
    for node in graph.nodes:
        args = fx.map_arg(node.args, values.__getitem__)
        values[node] = held.places if node is places else node.target(*args, **node.kwargs)
        node.meta["val"] = values[node]
    for node in (counts, steps, odd, flat, read, turned, along_samples):
        found = constant_values.constant_value(module, node, [])
        assert found.shape == values[node].shape and torch.equal(found, values[node]), node


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family, causal", [("llama", True), ("bert", False), ("gpt2", True)])
def test_padding_of_a_library(family, causal):
    """The all-ones mask of a collator stays a row a sample, beside `causal`."""
    model, inputs = FAMILIES[family](4, 16)
    inputs["attention_mask"] = torch.ones(4, 16, dtype=torch.int64)
    nodes = compiler.trace(model, inputs).graph.find_nodes(op="call_function", target=autopar.attention.default)
    assert nodes
    for node in nodes:
        assert tuple(node.args[3].meta["val"].shape) == (4, 1, 1, 16) and node.args[4] == causal
