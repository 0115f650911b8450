"""A forward that is set on the compiled module is the one that is compiled, as it is the one that the plain module
runs."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from tests.faithful.nets import Net
from tests.helpers import gloo

from .parity import assert_close, assert_same_gradients, device_mesh

pytestmark = pytest.mark.usefixtures("kept")

SCALE = 1.0


def _with_layers(model):
    """A method of the module that calls its layers, as TRL sets it."""

    @functools.wraps(type(model).forward)
    def forward(self, x, only_features=False):
        return self.features(x) if only_features else self.down(self.features(x)) + self.up.weight.sum()

    model.forward = types.MethodType(forward, model)


def _closure_around_the_former(model):
    before = model.forward
    model.forward = lambda x: before(x * 2) + 1


def _twice(model):
    _closure_around_the_former(model)
    _with_layers_around(model)
    _closure_around_the_former(model)


def _with_layers_around(model):
    before = model.forward

    def forward(self, x):
        return before(x) * self.down.bias.exp()

    model.forward = types.MethodType(forward, model)


def _closure_over_the_module(model):
    model.forward = lambda x: F.relu(model.up(x)) @ model.down.weight.t() + model.features(x).sum()


def _unbound(model):
    """The function of the class, called with the module: Accelerate's mixed precision does so."""
    function = model.forward.__func__
    model.forward = types.MethodType(lambda self, x: function(self, x) * 3, model)


PATCHES = [_with_layers, _closure_around_the_former, _twice, _with_layers_around, _closure_over_the_module, _unbound]


def _check(model, plain, patch, x) -> None:
    for module in (model, plain):
        module.zero_grad()
        patch(module)
    found, wanted = model(x), plain(x)
    assert_close(found, wanted)
    found.square().sum().backward(), wanted.square().sum().backward()
    assert_same_gradients(model, plain)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.__name__)
def test_equals_the_plain_module(alone, patch):
    plain, x = Net(), torch.randn(4, 6)
    model = autopar.compile(copy.deepcopy(plain), alone, (x,))
    _check(model, plain, lambda module: None, x)
    _check(model, plain, patch, x)


def test_keyword_of_the_new_forward(alone):
    plain, x = Net(), torch.randn(4, 6)
    model = autopar.compile(copy.deepcopy(plain), alone, (x,))
    for module in (model, plain):
        _with_layers(module)
    assert_close(model(x, only_features=True), plain(x, only_features=True))
    assert_close(model(x), plain(x))


def test_put_back(alone):
    """Set, put back, deleted, and set by mock for a while: each call is by the forward that is there."""
    plain, x = Net(), torch.randn(4, 6)
    model = autopar.compile(copy.deepcopy(plain), alone, (x,))
    found = []
    for module in (model, plain):
        values = [module(x)]
        before = module.forward
        _closure_around_the_former(module)
        values += [module(x), module.forward(x)]
        second = module.forward
        _closure_around_the_former(module)
        values.append(module(x))
        module.forward = second
        values.append(module(x))
        module.forward = before
        values.append(module(x))
        with mock.patch.object(module, "forward", lambda y: y.sum(-1)):
            values.append(module(x))
        values.append(module(x))
        _closure_around_the_former(module)
        del module.forward
        values.append(module(x))
        with pytest.raises(AttributeError):
            del module.forward
        found.append(values)
    for mine, wanted in zip(*found, strict=True):
        assert_close(mine, wanted)
    assert len(model._captures.table) == 4


def test_set_before_compile_or_before_the_first_call(alone):
    x = torch.randn(4, 6)
    for when in ("before", "first call"):
        plain = Net()
        source = copy.deepcopy(plain)
        _closure_around_the_former(plain)
        if when == "before":
            _closure_around_the_former(source)
        model = autopar.compile(source, alone)
        if when == "first call":
            _closure_around_the_former(model)
        assert_close(model(x), plain(x))
        for module in (model, plain):
            _with_layers_around(module)
        assert_close(model(x), plain(x))


def test_a_global_that_it_reads(alone, monkeypatch):
    plain, x = Net(), torch.randn(4, 6)
    model = autopar.compile(copy.deepcopy(plain), alone, (x,))
    for module in (model, plain):
        before = module.forward
        module.forward = lambda y, before=before: before(y) * SCALE
    assert_close(model(x), plain(x))
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert_close(model(x), plain(x))


def test_a_deep_copy_has_it_too(alone):
    plain, x = Net(), torch.randn(4, 6)
    model = autopar.compile(copy.deepcopy(plain), alone, (x,))
    for module in (model, plain):
        _with_layers(module)
    mine, theirs = copy.deepcopy(model), copy.deepcopy(plain)
    with torch.no_grad():
        mine.down.bias.fill_(2.0), theirs.down.bias.fill_(2.0)
    for a, b in ((mine, theirs), (model, plain)):
        assert_close(a(x), b(x))


def test_containers(alone):
    """model[0], len(model) and a loop over the layers are those of the source."""
    x = torch.randn(4, 6)
    model = autopar.compile(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), alone, (x,))
    assert len(model) == 3 and model[0] is model.get_submodule("0") and [*model] == [*model.children()]
    assert not hasattr(autopar.compile(Net(), alone, (x,)), "__len__")


def _on_two(rank: int) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    for patch in PATCHES:
        torch.manual_seed(0)
        plain = Net()
        model = autopar.compile(copy.deepcopy(plain), device_mesh("dp=2"), (x,), strategy="fsdp")
        _check(model, plain, patch, x)


@pytest.mark.slow
@pytest.mark.gloo
def test_on_parts_of_parameters():
    gloo.run(2, _on_two)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("state", ["eval", "hook", "frozen"])
def test_a_copy_made_in_another_state_than_the_first_call(alone, state):
    """The program of the first call serves a copy as it serves the model: in that call's state alone."""
    x = torch.randn(4, 6)
    plain = nn.Sequential(nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, 2))
    model = autopar.compile(copy.deepcopy(plain), alone, (x,))
    copies = []
    for module in (model, plain):
        if state == "eval":
            module.eval()
        elif state == "hook":
            module.get_submodule("1").register_forward_hook(lambda layer, inputs, output: output * 3)
        else:
            module.get_submodule("0").requires_grad_(False)
        copies.append(copy.deepcopy(module))
    for mine, theirs in (copies, copies):
        found, wanted = mine(x), theirs(x)
        assert_close(found, wanted)
        found.square().sum().backward(), wanted.square().sum().backward()
        assert_same_gradients(mine, theirs)


def test_signature(alone):
    """Libraries choose by the signature of the forward what they pass."""
    model = autopar.compile(Net(), alone, (torch.randn(4, 6),))
    plain = Net()
    for patch in (lambda module: None, _with_layers, lambda module: setattr(module, "forward", lambda a, *, b=1: a)):
        patch(model), patch(plain)
        assert inspect.signature(model.forward) == inspect.signature(plain.forward)
