"""Random ops of ATen as formulas: what they draw, what is refused, and attention with dropout against the same masks in
eager."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar import compiler
from autopar.errors import UnsupportedOpError
from autopar.ops.counter_rng import contiguous_strides
from autopar.simulate.oracle import global_values, one_device_step

from ..runtime import tiny

autopar = torch.ops.autopar


class Drawing(nn.Module):
    """Returns what a function of x draws, times a parameter."""

    def __init__(self, function):
        super().__init__()
        self.one, self.function = nn.Parameter(torch.ones(())), function

    def forward(self, x):
        return self.function(x) * self.one


def drawn(function, x=None, training=True):
    x = torch.ones(200, 300) if x is None else x
    model = Drawing(function).train(training)
    captured = compiler.trace(model, (x,))
    outputs, gradients, _ = one_device_step(captured, global_values(captured, model, (x,)))
    return outputs[0].double(), captured


F = nn.functional
MEAN_AND_STD = {
    "bernoulli": (lambda x: torch.bernoulli(x * 0.3), 0.3, 0.458),
    "bernoulli_": (lambda x: x.new_empty(x.shape).bernoulli_(0.8).div_(0.8), 1.0, 0.5),
    "bernoulli_ of a tensor": (lambda x: torch.empty_like(x).bernoulli_(x * 0.25), 0.25, 0.433),
    "rand": (lambda x: torch.rand(x.shape), 0.5, 0.2887),
    "rand_like": (lambda x: (torch.rand_like(x) + 0.7).floor_(), 0.7, 0.458),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(-1, 3), 1.0, 1.1547),
    "randn": (lambda x: torch.randn(x.shape) * 2, 0.0, 2.0),
    "randn_like": (lambda x: x + torch.randn_like(x), 1.0, 1.0),
    "normal_": (lambda x: torch.zeros_like(x).normal_(2, 3), 2.0, 3.0),
    "normal": (lambda x: torch.normal(x, 0.5), 1.0, 0.5),
    "randint": (lambda x: torch.randint(2, 12, x.shape).float(), 6.5, 2.872),
    "gumbel": (lambda x: -torch.empty_like(x).exponential_().log(), 0.5772, 1.2825),
    "dropout": (lambda x: F.dropout(x, 0.2), 1.0, 0.5),
    "inplace dropout": (lambda x: F.dropout(x + 0, 0.2, inplace=True), 1.0, 0.5),
    "dropout1d": (lambda x: F.dropout1d(x.reshape(300, 100, 2), 0.2), 1.0, 0.5),
    "alpha_dropout": (lambda x: F.alpha_dropout(torch.randn_like(x), 0.2, True), 0.0, 1.0),
    "feature_alpha_dropout": (lambda x: F.feature_alpha_dropout(torch.randn(200, 300, 1, 1), 0.2, True), 0.0, 1.0),
}


@pytest.mark.parametrize("name", MEAN_AND_STD)
def test_formulas(name):
    function, mean, std = MEAN_AND_STD[name]
    y, captured = drawn(function)
    assert any(n.op == "placeholder" and n.meta["role"].kind == "random" for n in captured.graph.nodes)
    error = 5 * std / y.numel() ** 0.5
    assert y.mean().item() == pytest.approx(mean, abs=error) and y.std().item() == pytest.approx(std, rel=0.03)


def test_channels_are_dropped_whole():
    y, _ = drawn(lambda x: F.dropout2d(x.reshape(40, 15, 10, 10), 0.5))
    channels = y.flatten(2)
    assert (channels == channels[..., :1]).all() and 0.3 < (channels[..., 0] == 0).double().mean() < 0.7


def test_nothing_is_drawn_in_eval_mode():
    layers = nn.Sequential(nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.Dropout1d(0.5))
    x = torch.randn(4, 5)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.one = layers, nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.layers(x) * self.one

    captured = compiler.trace(Model().eval(), (x,))
    assert {n.meta["role"].kind for n in captured.graph.nodes if n.op == "placeholder"} == {
        "parameter",
        "input",
        "tangent",
    }


def test_what_is_left_is_one_error():
    def function(x):
        with torch.no_grad():
            hidden = torch.randperm(4)
        return x * torch.randperm(300) + torch.multinomial(x, 2).sum() + hidden.sum()

    with pytest.raises(UnsupportedOpError) as caught:
        drawn(function)
    assert all(name in str(caught.value) for name in ("3 random ops", "randperm", "randperm_1", "multinomial"))


def test_attention_with_dropout_against_eager(monkeypatch):
    """GPT-2 with its own attention and torch's dropout replaced by masks of the same streams, in the order of the
    forward."""
    model, inputs = tiny.gpt2(resid_pdrop=0.1, embd_pdrop=0.2, attn_pdrop=0.3)
    model.train()
    captured = compiler.trace(model, inputs)
    values = global_values(captured, model, inputs)
    outputs, gradients, _ = one_device_step(captured, values)
    streams = iter(range(100))

    def dropout(x, p=0.5, training=True, inplace=False):
        return autopar.dropout(x, values["r_state"], p, next(streams), 0, contiguous_strides(x.shape)) if p else x

    monkeypatch.setattr(nn.functional, "dropout", dropout)
    model.set_attn_implementation("eager")
    loss = model(**inputs).loss
    loss.backward()
    assert next(streams) == 1 + 3 * model.config.n_layer
    assert outputs[0].item() == pytest.approx(loss.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        assert (gradients[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm() + 1e-8, name


@pytest.mark.parametrize("grouped", [False, True])
def test_attention_with_a_learned_mask(grouped):
    torch.manual_seed(0)

    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.randn(1, 4, 5, 5))

        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, self.bias, enable_gqa=grouped)

    model, heads = Biased(), 2 if grouped else 4
    inputs = (torch.randn(2, 4, 5, 6), torch.randn(2, heads, 5, 6), torch.randn(2, heads, 5, 6))
    captured = compiler.trace(model, inputs)
    outputs, gradients, _ = one_device_step(captured, global_values(captured, model, inputs))
    expected = model(*inputs)
    expected.sum().backward()
    assert torch.allclose(outputs[0], expected, atol=1e-6) and torch.allclose(
        gradients["bias"], model.bias.grad, atol=1e-5
    )
