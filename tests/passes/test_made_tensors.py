"""Tensors that a model makes and fills slice by slice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar import compiler

aten = torch.ops.aten


class Filled(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.left, self.right = kind, nn.Linear(8, 4), nn.Linear(8, 1)

    def forward(self, x):
        left, right = self.left(x), self.right(x)
        made = x.new_empty(len(x), 6) if self.kind != "zeros" else x.new_zeros(len(x), 6)
        made[:, 2:] = left
        seen = made[:, 2:].sum() if self.kind == "read" else 0.0
        if self.kind == "changed":
            left.mul_(2.0)
        made[:, : 1 if self.kind == "zeros" else 2] = right  # wider than what is copied there
        if self.kind == "overlapping":
            made[:, 1:3] = left[:, :2]
        return made.square().mean() + seen


@pytest.mark.parametrize("kind", ["filled", "zeros", "overlapping", "read", "changed"])
def test_slices_that_fill_a_tensor_are_joined(kind):
    torch.manual_seed(0)
    model, x = Filled(kind), torch.randn(4, 8)
    targets = {n.target for n in compiler.trace(model, (x,)).graph.nodes if n.meta.get("phase") == "forward"}
    assert (aten.cat.default in targets) == (kind in ("filled", "overlapping"))
    assert (aten.slice_scatter.default in targets) == (kind != "filled")
    assert not {aten.new_empty.default, aten.new_zeros.default} & targets
    assert autopar.verify(model, "dp=2", (x,)).match


class Joined(nn.Module):
    """Fills a tensor with views of a product, as multi-head latent attention does, and uses one of them again."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 12)

    def forward(self, x):
        left, right = self.layer(x).view(len(x), 3, 4).transpose(0, 1).split([1, 3], dim=-1)
        made = x.new_empty(3, len(x), 4)
        made[..., 3:] = left
        made[..., :3] = right
        return made.square().mean() + right.pow(3).mean()


def test_the_backward_follows_the_forward_though_slices_are_joined():
    nodes = [n for n in compiler.trace(Joined(), (torch.randn(5, 8),)).graph.nodes if n.op == "call_function"]
    phases = [n.meta["phase"] for n in nodes]
    assert phases == sorted(phases, reverse=True)  # what is computed again in a block would run too early
