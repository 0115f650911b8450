"""Forwards whose way is drawn: refused with the line that asks, while random numbers that are computed with stay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar import compiler
from autopar.errors import CaptureError


class Layers(nn.Module):
    """Three layers; `skips()` says whether one is left out."""

    def __init__(self, skips):
        super().__init__()
        self.layers, self.skips = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), skips

    def forward(self, x):
        for layer in self.layers:
            if self.training and self.skips(x):
                continue
            x = layer(x)
        return x


DRAWN = {
    "rand of no dims": lambda x: torch.rand([]) < 0.1,
    "item": lambda x: torch.rand(1).item() < 0.1,
    "bernoulli": lambda x: torch.bernoulli(torch.tensor(0.1)),
    "in place": lambda x: x.new_empty(()).uniform_() < 0.1,
    "one of several": lambda x: torch.randint(0, 9, (3,))[1] == 0,
    "as an int": lambda x: int(torch.randint(0, 2, ())) == 0,
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_way_that_is_drawn_is_refused(name):
    with pytest.raises(CaptureError, match="as a random number says") as caught:
        compiler.trace(Layers(DRAWN[name]), (torch.randn(2, 4),))
    assert "test_random_branches.py" in caught.value.source and "layerdrop" in caught.value.fix


def test_without_training_nothing_is_drawn():
    captured = compiler.trace(Layers(DRAWN["item"]).eval(), (torch.randn(2, 4),))
    products = [n for n in captured.graph.nodes if n.target is torch.ops.autopar.linear.default]
    assert len(products) == 3


def test_values_that_are_not_drawn_have_their_own_reason():
    with pytest.raises(CaptureError, match="could not be traced") as caught:
        compiler.trace(Layers(lambda x: x.sum() > 0), (torch.randn(2, 4),))
    assert "values of a tensor" in caught.value.fix


def test_masks_are_computed_with():
    class Masked(nn.Linear):
        def forward(self, x):
            mask = (torch.rand(x.shape[0], 1) < 0.9) / 0.9
            return super().forward(x * mask)

    compiler.trace(Masked(4, 4), (torch.randn(2, 4),))
