"""A trace with open sizes says what the user's code takes for granted of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar import _torch
from autopar.errors import CaptureError
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
        if mode == "half":
            x = x * (length // 2)
        if mode == "float":
            x = x * (1.0 / min(length, 12))
        if mode == "padded":
            x = F.pad(x[:, 1:], (0, 0, 0, 1))
        if mode == "written":
            x = x.clone()
            x[:, : length // 3] += 1
        if mode == "again":
            for _ in range(3):
                x = torch.relu(x + 1).mul_(length // 2)
        if mode == "values":
            x = x[:, x[0, :, 0].argsort()]
        return self.linear(x)


def _open(mode: str) -> _torch.OpenSizes:
    return open_sizes(Branches(), dict(x=torch.randn(2, 10, 4), mode=mode), {"x": {1: 0}}, False)


def _holds(mode: str) -> list[int]:
    holds = _open(mode).holds
    return [size for size in range(1, 30) if holds([size])]


@pytest.fixture
def by_export(monkeypatch):
    """Return what makes open_sizes export the model, as it does where a run does not tell enough."""

    def run_open(*given):
        raise CaptureError("a run does not tell")

    return lambda: monkeypatch.setattr(_torch, "run_open", run_open)


@pytest.mark.parametrize(
    "mode", ["none", "threshold", "parity", "fixed", "loop", "half", "padded", "written", "again", "values"]
)
def test_a_run_says_what_an_export_says(mode, by_export):
    run = _open(mode)
    by_export()
    export = _open(mode)
    for size in range(1, 30):
        assert export.holds([size]) or not run.holds([size])
        if size > 3 and export.holds([size]):  # of fewer places a part has none or one
            assert run.holds([size])
            assert {*export.numbers([size])} <= {*run.numbers([size])}, (size, export.expressions, run.expressions)


def test_numbers_of_the_users_code():
    assert {5, 10} <= {*_open("half").numbers([10])} and 14 in _open("half").numbers([29])
    assert _holds("float")[-1] == 12 and 11 in _open("float").numbers([11])


def test_one_of_many_equal_blocks_takes_another_way_at_other_sizes():
    class Block(nn.Module):
        def __init__(self, index: int):
            super().__init__()
            self.linear, self.index = nn.Linear(4, 4), index

        def forward(self, x):
            return self.linear(x * 2 if self.index == 7 and x.shape[1] > 14 else x)

    model, x = nn.Sequential(*map(Block, range(12))), torch.randn(2, 10, 4)
    found = open_sizes(model, (x,), {"args[0]": {1: 0}}, False)
    assert [size for size in range(1, 20) if found.holds([size])] == [*range(2, 15)]


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
