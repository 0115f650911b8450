"""A trace with open sizes says what the user's code takes for granted of them."""

from __future__ import annotations

import torch
from torch import nn

from autopar.frontend.export import open_sizes


class Branches(nn.Module):
    """Takes one of several ways by the length."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, mode: str):
        length = x.shape[1]
        if mode == "threshold" and length > 12:
            x = x * 2
        if mode == "parity" and length % 2:
            x = x + 1
        if mode == "fixed":
            x = x + torch.arange(10, dtype=x.dtype)[:, None]
        if mode == "loop":
            for _ in range(length):
                x = x * 1.1
        return self.linear(x)


def _holds(mode: str) -> list[int]:
    x = torch.randn(2, 10, 4)
    holds = open_sizes(Branches(), dict(x=x, mode=mode), {"x": {1: 0}}, False).holds
    return [size for size in range(1, 30) if holds([size])]


def test_sizes_that_take_the_same_way():
    assert _holds("none")[-1] == 29 and {2, 10, 28} <= {*_holds("none")}
    assert _holds("threshold")[-1] == 12
    assert {size % 2 for size in _holds("parity")} == {0} and len(_holds("parity")) > 10
    assert _holds("fixed") == [10]
    assert _holds("loop") == [10]


def test_two_tensors_of_one_size():
    class Pair(nn.Module):
        def forward(self, a, b):
            return (a[:, None] * b[None]).sum(), a + b

    call = dict(a=torch.randn(6), b=torch.randn(6))
    holds = open_sizes(Pair(), call, {"a": {0: 0}, "b": {0: 0}}, False).holds
    assert all(holds([size]) for size in range(2, 20))
