"""Ops without a rule: replicated and named with what they cost, or all refused in one error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import UnsupportedOpError


class Model(nn.Module):
    """A determinant and a distance matrix, neither of which has a rule."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        return torch.cdist(y, y).sum() + torch.linalg.det(y @ y.t() + torch.eye(4))


def plan(**options):
    return autopar.plan(Model(), "dp=2", (torch.randn(4, 8),), hardware="cpu-gloo", baselines=False, **options)


def test_the_plan_names_them_with_their_cost():
    named = [w.split(" ")[0] for w in plan().warnings]
    assert {"aten._cdist_forward.default", "aten._linalg_det.default"} <= set(named)
    assert all("ops run whole on every device" in w and " ms" in w for w in plan().warnings)


def test_strict_lists_them_all():
    with pytest.raises(UnsupportedOpError) as caught:
        plan(strict=True)
    assert "aten._cdist_forward.default" in caught.value.message and "aten._linalg_det.default" in caught.value.message
    assert "test_strict.py" in caught.value.message
    assert "autopar.register_rule(torch.ops.aten." in caught.value.fix
