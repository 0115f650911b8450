"""Attention that is written out becomes the canonical one, with the values and gradients of eager torch, or stays."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.ops import autopar

from ..helpers.written_attention import KINDS, Model, inputs_of
from .against_eager import assert_as_eager

aten = torch.ops.aten
FORMS = [
    (kind, padding)
    for kind, padding in itertools.product(KINDS, ("", "left", "right"))
    if not (padding and kind == "plain") and (kind, padding) != ("filled_inf", "left")  # whose softmax is NaN
]


def counted(captured) -> tuple[int, int]:
    """Return how many attentions and softmaxes are in the forward."""
    nodes = [n.target for n in captured.graph.nodes if n.op == "call_function"]
    return nodes.count(autopar.attention.default), nodes.count(aten._softmax.default)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind, padding", FORMS)
def test_becomes_canonical(kind, padding):
    model = Model(kind, 4, 2, padding, layers=2, length=9)
    captured = assert_as_eager(model, *inputs_of(9, padding).values(), tolerance=1e-10)
    assert counted(captured) == (2, 0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["added", "filled_inf", "softcap", "sinks", "alibi", "bias", "packed"])
def test_a_causal_mask_is_no_tensor(kind):
    captured = assert_as_eager(Model(kind, 4, 4, length=7), *inputs_of(7).values(), tolerance=1e-10)
    (node,) = captured.graph.find_nodes(op="call_function", target=autopar.attention.default)
    assert node.args[4], "it is causal"
    wanted = {"alibi": (2, 4, 1, 7), "bias": (1, 4, 7, 7)}.get(kind)
    assert (None if node.args[3] is None else tuple(node.args[3].meta["val"].shape)) == wanted


class Reading(nn.Module):
    """Attention of which somebody reads more than the output, or that the canonical one does not say."""

    def __init__(self, kind: str):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.qkv = kind, nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) * 0.5
        if self.kind == "softmax of queries":
            return torch.softmax(scores, -2) @ v
        if self.kind == "cap of masked":
            scores = torch.tanh(scores + torch.ones(6, 6, dtype=x.dtype).tril())
        if self.kind == "times a tensor":
            scores = scores * x.mean()
        weights = torch.softmax(scores, -1)
        if self.kind == "weights":
            return weights @ v, weights
        if self.kind == "scores":
            return weights @ v, scores
        if self.kind == "sharpened":
            weights = weights.square()
        return F.dropout(weights, 0.5 if self.kind == "dropout" else 0.0) @ v


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "kind", ["weights", "scores", "sharpened", "softmax of queries", "cap of masked", "times a tensor"]
)
def test_stays(kind):
    captured = assert_as_eager(Reading(kind).double(), torch.randn(2, 6, 8, dtype=torch.float64), tolerance=1e-10)
    assert counted(captured) == (0, 1)


def test_dropout_stays():
    from autopar import compiler

    captured = compiler.trace(Reading("dropout").double(), (torch.randn(2, 6, 8, dtype=torch.float64),))
    assert counted(captured) == (0, 1)
