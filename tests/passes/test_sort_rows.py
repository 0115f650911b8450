"""Rows of experts that are sorted once for all products change no number, and are gathered where they come and go."""

import operator
from random import Random

import pytest
import torch
from torch import fx, nn

from autopar.ir.graph import output_node
from autopar.ir.mesh import Mesh
from autopar.passes.distribute.localize import localize
from autopar.passes.distribute.sort_rows import sort_rows
from autopar.plans.sharding import Sharding

from .lowering import capture, links

ops, aten = torch.ops.autopar, torch.ops.aten
ONE = Mesh.parse("one=1")
PRODUCTS = (ops.grouped_mm.default, ops.grouped_mm_dw.default)


class Experts(nn.Module):
    """Gated experts whose rows are picked from tokens, multiplied twice, weighted and added up in their tokens."""

    def __init__(self, groups: int, width: int, hidden: int, offset: int, is_gated: bool):
        super().__init__()
        self.up = nn.Parameter(torch.randn(groups, width, hidden * (1 + is_gated)))
        self.down, self.bias = nn.Parameter(torch.randn(groups, hidden, width)), nn.Parameter(torch.randn(9, width))
        self.offset, self.is_gated = offset, is_gated

    def forward(self, x, token, group, weights):
        h = ops.grouped_mm(x[token], self.up, group, self.offset)
        if self.is_gated:
            gate, h = h.chunk(2, -1)
            h = torch.nn.functional.silu(gate) * h
        y = ops.grouped_mm(h.relu(), self.down, group, self.offset) + self.bias[group]
        y = torch.zeros_like(x).index_add(0, token, y * weights)
        return (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum() + h.square().sum()


def lowered(model: nn.Module, *inputs: torch.Tensor) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    joint, values = capture(model, *inputs)
    outputs = output_node(joint.graph).args[0]
    local = localize(joint, Sharding(ONE, links(ONE), 1e11, {}, {}, (None,) * len(outputs)), 0)
    return local, [values[n.name] for n in local.graph.nodes if n.op == "placeholder"]


def rows_of(rng: Random, tokens: int, width: int) -> tuple[torch.Tensor, ...]:
    rows = rng.choice([1, 2, 13, 40])
    token, group = torch.randint(tokens, (rows,)), torch.randint(rng.choice([1, 9]), (rows,))
    return torch.randn(tokens, width), token, group, torch.randn(rows, 1)


@pytest.mark.parametrize("seed", range(16))
def test_numbers_are_the_same(seed):
    """Any rows, some of no group of the device; sizes that torch's kernel takes and others."""
    print(f"seed {seed}")
    rng = Random(seed)
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float64 if seed % 2 else torch.float32)
    try:
        width, hidden = (8, 16) if rng.random() < 0.5 else (5, 3)
        model = Experts(rng.choice([4, 9]), width, hidden, rng.choice([0, 2]), rng.random() < 0.7)
        local, values = lowered(model, *rows_of(rng, rng.choice([1, 7]), width))
        before = local(*values)
        sort_rows(local)
        tolerance = 1e-12 if seed % 2 else 1e-4
        for a, b in zip(before, local(*values), strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    finally:
        torch.set_default_dtype(torch.float32)


def test_rows_are_sorted_once():
    """One sort; rows that are picked, of tokens and of the biases of groups, are picked in the order, the weights come
    into it, and rows leave it where something else than a sum in their tokens reads them: in the loss."""
    torch.manual_seed(0)
    local, _ = lowered(Experts(9, 8, 16, 0, False), *rows_of(Random(0), 7, 8))
    sort_rows(local)
    nodes = [n for n in local.graph.nodes if n.op == "call_function"]
    assert [n.target for n in nodes].count(ops.by_group.default) == 1
    products = [n for n in nodes if n.target in PRODUCTS]
    assert len(products) == 5 and all("ends" in n.kwargs for n in products)  # nobody wants the gradient of x
    forward = [n for n in nodes if n.meta["phase"] == "forward"]
    wide = [n for n in forward if isinstance(n.meta.get("val"), torch.Tensor) and n.meta["val"].shape[1:].numel() > 1]
    gathers = [n for n in wide if n.target is aten.index_select.default]
    picks = [n for n in gathers if n.args[0].op == "placeholder"]
    order, inverse = (n for name in ("_0", "_1") for n in nodes if n.name.endswith(f"by_group{name}"))
    assert [n.args[2].args[2] for n in picks] == [order, order]
    assert {n.args[2] for n in gathers if n not in picks} == {inverse}


def test_weighted_sums_stay_in_the_order():
    """Results that are weighted and added up in their tokens, and the gradients of the weights, are never put
    back: only a number for each row is."""
    torch.manual_seed(0)
    model = Experts(9, 8, 16, 0, True)
    model.forward = lambda x, token, group, weights: _summed(model, x, token, group, weights)
    x, token, group, weights = rows_of(Random(0), 7, 8)
    local, values = lowered(model, x, token, group, nn.Parameter(weights))
    values = [value.detach() for value in values]
    before = local(*values)
    sort_rows(local)
    for a, b in zip(before, local(*values), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    (inverse,) = [n for n in local.graph.nodes if n.target is operator.getitem and n.name.endswith("by_group_1")]
    assert [user.meta["val"].shape[1] for user in inverse.users] == [1]


def _summed(model: Experts, x, token, group, weights):
    gate, h = ops.grouped_mm(x[token], model.up, group, 0).chunk(2, -1)
    y = ops.grouped_mm(torch.nn.functional.silu(gate) * h, model.down, group, 0)
    return torch.zeros_like(x).index_add(0, token, y * weights).square().sum()


def test_one_product_sorts_for_itself():
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.register_buffer("up", torch.randn(3, 4, 4))

        def forward(self, group):
            return (ops.grouped_mm(torch.ones(len(group), 4), self.up, group, 0) * self.scale).sum()

    local, _ = lowered(One(), torch.tensor([2, 0, 1]))
    before = str(local.graph)
    assert "grouped_mm" in before and str(sort_rows(local).graph) == before
