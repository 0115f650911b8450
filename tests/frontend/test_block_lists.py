"""Blocks that are a run of a list's modules, or several modules each: found, and unrolled to the whole graph."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from autopar import compiler
from autopar.frontend.block_lists import divided, repeated_blocks_of
from autopar.frontend.block_names import BlockNames, by_block
from autopar.frontend.fake_parameters import forms_of

from .test_unroll import assert_same_capture, traced_in_full


@pytest.mark.parametrize(("kinds", "first", "period", "count"), [
    ("a" * 9, 1, 1, 9), ("ddd" + "m" * 9, 3, 1, 10), ("ab" * 9, 1, 2, 10), ("z" + "aab" * 7, 1, 3, 8),
    ("a" * 9 + "zz", 1, 1, 10), ("a" * 6 + "z" + "a" * 5, None, None, None), ("aab" * 4, None, None, None),
])  # fmt: skip
def test_the_division_that_leaves_out_most(kinds, first, period, count):
    found = divided("h", len(kinds), lambda i, j: kinds[i] == kinds[j])
    assert found == (count and BlockNames("h", count, first, period))
    if kinds.endswith("z"):
        assert divided("h", len(kinds), lambda i, j: kinds[i] == kinds[j], to_the_end=True) is None


def test_numbers_that_count_modules_are_compared_with_the_first():
    group = [i // 2 for i in range(12)]
    assert divided("h", 12, lambda i, j: group[j] - group[i] in (0, j - i)) is None


def test_names_of_blocks():
    names = BlockNames("h", 6, first=3, period=2)
    assert [names.number(f"h.{i}.x") for i in range(13)] == [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert names.number("h.x") is None and names.number("g.1") is None
    assert names.renamed("h.6.x", 4) == "h.10.x" and names.with_count(9).renamed("h.17", 1) == "h.3"
    assert by_block(names, {"h.4.x": 1, "h.6.x": 2, "g.x": 3})[1:3] == [{"h.4.x": 1}, {"h.4.x": 2}]


class Block(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.wide = kind, nn.Linear(8, 16 if kind == "wide" else 8)
        self.narrow = nn.Linear(self.wide.out_features, 8)
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x):
        hidden = self.wide(x)
        return x + self.narrow(hidden.tanh() if self.kind == "odd" else hidden.relu()) + self.shift


class Tower(nn.Module):
    def __init__(self, kinds: list[str]):
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, kinds))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kinds", [
    ["even"] * 9 + ["wide"] * 2, ["wide"] * 2 + ["even"] * 9, ["even", "odd"] * 9,
    ["even", "even", "odd"] * 8 + ["even"],
], ids=["wide ones last", "wide ones first", "in turn", "each third"])  # fmt: skip
def test_unrolled_is_whole(kinds):
    torch.manual_seed(0)
    model, x = Tower(kinds), torch.randn(4, 8)
    whole = traced_in_full(copy.deepcopy(model), (x,))
    found, planned = compiler.trace(model, (x,)), compiler.trace_to_plan(model, (x,), None, forms_of(model))
    for one in (found, planned):
        assert one.compact is not None or kinds[-1] == "wide"
        assert_same_capture(one, whole)
    assert (repeated_blocks_of(model) is None) == (kinds[-1] == "wide")  # an index may tell the last ones another kind
