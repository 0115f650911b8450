"""Layers of a compiled module that are called by themselves, and methods that call them."""

from __future__ import annotations

import copy
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import AutoparError, MovedParameterError
from tests.helpers import gloo

from .parity import assert_close, assert_same_gradients, device_mesh

pytestmark = pytest.mark.usefixtures("kept")


class Autoencoder(nn.Module):
    """x (B, 6) -> x, with methods for its halves."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
        self.decoder, self.scale = nn.Linear(4, 6), 2.0

    def encode(self, x):
        return F.normalize(self.encoder(x)) * self.scale

    def decode(self, code):
        return self.decoder(code)

    def forward(self, x):
        return self.decode(self.encode(x))


def _pair(mesh, x, **options):
    torch.manual_seed(0)
    plain = Autoencoder()
    return autopar.compile(copy.deepcopy(plain), mesh, (x,), **options), plain


def _layer(model, x):
    return model.encoder(x)


def _inner_layer(model, x):
    return model.encoder[0](x)


def _methods(model, x):
    return model.decode(model.encode(x) + 1)


def _beside_the_model(model, x):
    return model(x).square() + model.decoder(model.encoder(x)).exp()


USES = [_layer, _inner_layer, _methods, _beside_the_model]


def _check(model, plain, use, x, mine=lambda x: x) -> None:
    found = []
    for module, part in ((model, mine(x)), (plain, x)):
        module.zero_grad()
        given = part.clone().requires_grad_()
        out = use(module, given)
        out.square().mean().backward()
        found.append((out * 1, given.grad))
    assert_close(found[0][0], mine(found[1][0]))
    assert_same_gradients(model, plain)
    assert_close(model.encoder[1].running_mean, plain.encoder[1].running_mean)
    if mine(x) is x:
        assert_close(found[0][1], found[1][1])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_equals_the_plain_module(alone, use):
    x = torch.randn(4, 6)
    model, plain = _pair(alone, x)
    _check(model, plain, use, x)
    for module in (model, plain):
        module.eval()
    _check(model, plain, use, x)
    with torch.no_grad():
        assert_close(use(model, x[:3]), use(plain, x[:3]))
        assert not use(model, x).requires_grad
    _check(copy.deepcopy(model), copy.deepcopy(plain), use, x)


def test_an_attribute_that_a_method_reads(alone):
    x = torch.randn(4, 6)
    model, plain = _pair(alone, x)
    for scale in (2.0, 3.0):
        model.scale = plain.scale = scale
        assert_close(model.encode(x), plain.encode(x))
        assert_close(model(x), plain(x))


def test_what_is_a_part_of_a_call_alone_is_refused(alone):
    """Hooks of the whole model, and a loss_fn, belong to calls of the model."""
    x = torch.randn(4, 6)
    model, _ = _pair(alone, x, loss_fn=lambda out: out.sum())
    with pytest.raises(MovedParameterError, match="this Linear was taken over"):
        model.decoder(torch.randn(4, 4))
    model, plain = _pair(alone, x)
    model._source.register_forward_hook(lambda module, inputs, output: output * 2)
    with pytest.raises(MovedParameterError):
        model.decoder(torch.randn(4, 4))


def test_a_compile_that_fails_leaves_the_layers(alone):
    x = torch.randn(4, 6)
    plain = Autoencoder()
    expected = plain.encoder(x)
    with pytest.raises(AutoparError):
        autopar.compile(plain, alone, (x,), memory=1.0)
    assert_close(plain.encoder(x), expected)


class LossAndFeatures(Autoencoder):
    def forward(self, x):
        code = self.encoder(x)
        return {"loss": self.decoder(code).square().mean(), "code": code}


def test_forward_set_between_a_call_and_its_backward(alone):
    """A backward that is compiled when it comes is that of the forward that ran."""
    x = torch.randn(4, 6)
    plain = LossAndFeatures()
    model = autopar.compile(copy.deepcopy(plain), alone, (x,))
    for module in (model, plain):
        out = module(x)
        module.forward = types.MethodType(lambda self, x: self.encoder(x) * 100, module)
        (out["loss"] + out["code"].sum()).backward()
    assert_same_gradients(model, plain)


def _on_two(rank: int, uses: list, inputs: str) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    mesh, part = device_mesh("dp=2"), slice(2 * rank, 2 * rank + 2)
    for use in uses:
        if inputs == "global":
            _check(*_pair(mesh, x, strategy="fsdp"), use, x)
        else:
            _check(*_pair(mesh, x[part], inputs="local"), use, x, lambda whole: whole[part])


@pytest.mark.gloo
@pytest.mark.parametrize("inputs, uses", [
    ("global", [_beside_the_model]), pytest.param("local", USES, marks=pytest.mark.slow),
    pytest.param("global", USES[:-1], marks=pytest.mark.slow),
])  # fmt: skip
def test_on_two_processes(uses, inputs):
    gloo.run(2, _on_two, uses, inputs)


@pytest.mark.gloo
def test_a_pipeline_refuses():
    gloo.run(2, _on_a_pipeline)


def _on_a_pipeline(rank: int) -> None:
    x = torch.randn(4, 6)
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model = autopar.compile(layers, device_mesh("pp=2"), (x,), loss_fn=lambda out: out.sum())
    with pytest.raises(MovedParameterError):
        model[rank](x)
