"""Inputs of types that the model itself refuses are refused before anything is planned, in torch's words."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar import compiler
from autopar.cli import main
from autopar.errors import AutoparError, CaptureError

functional = nn.functional
TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)


class Model(nn.Module):
    """A layer and a loss of it."""

    def __init__(self, layer: nn.Module, loss=lambda y: y.float().square().mean()):
        super().__init__()
        self.layer, self.loss = layer, loss

    def forward(self, x, *more):
        return self.loss(self.layer(x), *more)


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return x @ self.weight


LAYERS = {
    "linear": (lambda: nn.Linear(4, 4), (8, 4)), "product": (Product, (8, 4)),
    "layer_norm": (lambda: nn.LayerNorm(4), (8, 4)), "rms_norm": (lambda: nn.RMSNorm(4), (8, 4)),
    "batch_norm": (lambda: nn.BatchNorm1d(4), (8, 4)), "group_norm": (lambda: nn.GroupNorm(2, 4), (8, 4)),
    "convolution": (lambda: nn.Conv1d(4, 4, 2), (8, 4, 4)), "embedding": (lambda: nn.Embedding(4, 4), (8, 4)),
    "lstm": (lambda: nn.LSTM(4, 4, batch_first=True), (8, 4, 4)),
}  # fmt: skip


def _runs(model: nn.Module, *inputs) -> bool:
    try:
        model(*inputs)
    except (RuntimeError, ValueError):
        return False
    return True


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(LAYERS)), st.sampled_from(TYPES))
def test_what_eager_refuses_is_refused(name, dtype):
    make, shape = LAYERS[name]
    model = Model(make(), loss=lambda y: (y[0] if isinstance(y, tuple) else y).float().square().mean())
    x = torch.ones(shape).to(dtype)
    if _runs(model, x):
        compiler.trace(model, (x,))
    else:
        with pytest.raises(AutoparError):
            compiler.trace(model, (x,))


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(TYPES), st.booleans())
def test_targets_of_a_loss(dtype, weighted):
    weight = torch.ones(4) if weighted else None
    model = Model(nn.Linear(4, 4), lambda y, target: functional.cross_entropy(y, target, weight))
    x, target = torch.randn(8, 4), torch.ones(8).to(dtype)
    if _runs(model, x, target):
        with (
            contextlib.nullcontext() if dtype is not torch.uint8 else contextlib.suppress(CaptureError)
        ):  # torch cannot trace it
            compiler.trace(model, (x, target))
    else:
        with pytest.raises(AutoparError):
            compiler.trace(model, (x, target))


def test_the_error_has_torchs_words_and_the_line(capfd):
    model = Model(nn.Linear(4, 4))
    for call in (
        lambda x: autopar.plan(model, "dp=2", (x,), hardware="cpu-gloo"),
        lambda x: compiler.trace(model, (x,)),
    ):
        with pytest.raises(
            CaptureError, match="mat1 and mat2 must have the same dtype, but got Double and Float"
        ) as caught:
            call(torch.ones(8, 4, dtype=torch.float64))
        assert "test_dtypes.py:" in caught.value.source and "input float64, weight float32" in caught.value.message
    ids = Model(nn.Embedding(4, 4))
    with pytest.raises(CaptureError, match="scalar types: Long, Int; but got torch.float32") as caught:
        autopar.plan(ids, "dp=2", (torch.ones(8),), hardware="cpu-gloo")
    assert "test_dtypes.py:" in caught.value.source and not capfd.readouterr().err


def test_mixed_precision_casts_what_it_casts():
    model = Model(nn.Linear(4, 4))
    compiler.trace(model, (torch.ones(8, 4),), precision="bf16")


def test_on_the_command_line(tmp_path, capsys):
    file = tmp_path / "doubles.py"
    file.write_text(
        "import torch\nfrom torch import nn\n\nclass Model(nn.Module):\n    def __init__(self):\n        "
        "super().__init__()\n"
        "        self.layer = nn.Linear(4, 4)\n\n    def forward(self, x):\n        return self.layer(x).mean()\n\n"
        "def build():\n    return Model(), dict(x=torch.ones(8, 4, dtype=torch.float64))\n"
    )
    assert main.main(["plan", "--model", f"{file}:build", "--mesh", "dp=2", "--hardware", "cpu-gloo",
                     "--batch", "8", "--seq", "4"]) == 2  # fmt: skip
    out, err = capsys.readouterr()
    assert not out and "got Double and Float" in err and "doubles.py:10" in err
