"""Ops that read by strides: named plainly where they can be, refused elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar import compiler
from autopar.errors import UnsupportedOpError
from autopar.simulate.compare import verify_model


class Pooled(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.layer, self.act = nn.Linear(8, 8), act

    def forward(self, x):
        return self.act(self.layer(x)).square().sum()


def test_strides_in_order_become_views():
    model, x = Pooled(lambda y: nn.functional.adaptive_avg_pool1d(y, 1)), (torch.randn(4, 6, 8),)
    assert not [n for n in compiler.trace(model, x).graph.nodes if "strided" in n.name]
    assert verify_model(model, x, "dp=2", strategy="ddp").match


def test_strides_in_another_order_are_refused():
    model = Pooled(lambda y: torch.as_strided(y, (8, 4), (1, 8)))
    with pytest.raises(UnsupportedOpError, match="by strides"):
        compiler.trace(model, (torch.randn(4, 8),))


def test_cat_ignores_an_empty_list():
    model = Pooled(lambda y: torch.cat([torch.empty(0), y], -1))
    assert verify_model(model, (torch.randn(4, 8),), "dp=2", strategy="ddp").plan.warnings == ()
