"""Attention that is written out becomes the canonical one, with the values and gradients of eager torch, or stays."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar import compiler
from autopar.ops import autopar
from autopar.ops.counter_rng import contiguous_strides
from autopar.simulate.oracle import global_values, one_device_step

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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind, padding", FORMS)
def test_becomes_canonical(kind, padding):
    model = Model(kind, 4, 2, padding, layers=2, length=9)
    captured = assert_as_eager(model, *inputs_of(9, padding).values(), tolerance=1e-10)
    assert counted(captured) == (2, 0)


@pytest.mark.sampled(1)
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
        if self.kind == "dropped twice":
            weights = F.dropout(weights, 0.5)
        return F.dropout(weights, 0.5 if self.kind.startswith("dropped") else 0.0) @ v


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "kind", ["weights", "scores", "sharpened", "softmax of queries", "cap of masked", "times a tensor"]
)
def test_stays(kind):
    captured = assert_as_eager(Reading(kind).double(), torch.randn(2, 6, 8, dtype=torch.float64), tolerance=1e-10)
    assert counted(captured) == (0, 1)


@pytest.mark.parametrize("kind, found", [("dropped", (1, 0)), ("dropped twice", (0, 1))])
def test_dropout_is_of_the_attention(kind, found):
    """Once: two masks are not one."""
    captured = compiler.trace(Reading(kind).double(), (torch.randn(2, 6, 8, dtype=torch.float64),))
    assert counted(captured) == found


class Sinks(nn.Module):
    """Attention with sinks and dropout, before or behind the column of the sinks is left out, as a model would write it
    if torch's dropout drew what autopar does."""

    def __init__(self, is_before: bool, kv_heads: int):
        super().__init__()
        torch.manual_seed(0)
        self.is_before, self.groups = is_before, 4 // kv_heads
        self.qkv, self.sinks = nn.Linear(8, 8 + 4 * kv_heads), nn.Parameter(torch.randn(4))

    def forward(self, x):
        heads = (4, 4 // self.groups, 4 // self.groups)
        q, k, v = (t.unflatten(-1, (-1, 2)).transpose(1, 2) for t in self.qkv(x).split([2 * n for n in heads], -1))
        k, v = (t.repeat_interleave(self.groups, 1) if self.groups > 1 else t for t in (k, v))
        scores = (q @ k.mT).masked_fill(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), -torch.inf)
        column = self.sinks.reshape(1, -1, 1, 1).expand(x.shape[0], -1, x.shape[1], 1)
        weights = torch.softmax(torch.cat([scores, column], -1), -1)
        dropped = F.dropout(weights, 0.3)[..., :-1] if self.is_before else F.dropout(weights[..., :-1], 0.3)
        return (dropped @ v).square()


@pytest.mark.parametrize("is_before, kv_heads", itertools.product((False, True), (4, 2)))
def test_sinks_and_dropout(monkeypatch, is_before, kv_heads):
    model, x = Sinks(is_before, kv_heads).double(), torch.randn(3, 7, 8, dtype=torch.float64)
    captured = compiler.trace(model, (x,))
    assert counted(captured) == (1, 0)
    values = global_values(captured, model, (x,))
    found = one_device_step(captured, values)
    monkeypatch.setattr(F, "dropout", lambda y, p: autopar.dropout(
        y, values["r_state"], p, 0, 0, contiguous_strides(y.shape)))  # fmt: skip
    wanted = model(x)
    wanted.sum().backward()
    torch.testing.assert_close(found.outputs[0], wanted.detach(), rtol=0, atol=1e-10)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.gradients[name], parameter.grad, rtol=0, atol=1e-10)
