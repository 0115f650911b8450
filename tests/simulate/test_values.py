"""Models whose Python, shapes or checks depend on the values of tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar import compiler
from autopar.errors import CaptureError


class Model(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.layer, self.act = nn.Linear(8, 8), act

    def forward(self, x):
        return self.act(self.layer(x)).sum()


def branches(y):
    return y if y.sum() > 0 else -y


def picks(y):
    return y[y[:, 0] > 0]


def loops(y):
    return sum(y[i] for i in torch.nonzero(y[:, 0]))


def test_the_line_of_a_branch_is_named():
    with pytest.raises(CaptureError) as caught:
        compiler.trace(Model(branches), (torch.randn(4, 8),))
    assert f"test_values.py:{branches.__code__.co_firstlineno + 1}: return y if" in caught.value.source


@pytest.mark.parametrize("act", [branches, picks, loops])
def test_values_are_not_known_when_tracing(act):
    with pytest.raises(CaptureError) as caught:
        compiler.trace(Model(act), (torch.randn(4, 8),))
    assert "test_values.py:" in caught.value.source
    assert "values of a tensor" in caught.value.fix


def test_a_check_of_values_is_left_out():
    def checked(y):
        torch._check(y.sum().item() < 1e9)
        return y

    captured = compiler.trace(Model(checked), (torch.randn(4, 8),))
    assert not [n for n in captured.graph.nodes if "item" in n.name or "assert" in n.name]


def test_a_model_may_take_the_eager_way():
    def act(y):
        return (None if torch.compiler.is_compiling() else y).relu()

    assert [n for n in compiler.trace(Model(act), (torch.randn(4, 8),)).graph.nodes if n.name.startswith("relu")]
