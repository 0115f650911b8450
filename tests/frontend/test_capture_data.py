"""A capture that another process takes over is the one that it would have traced, or it is not taken."""

from __future__ import annotations

import copy
import types

import pytest
import torch
from torch import nn

from autopar import compiler
from autopar.codegen.graph_text import graph_text
from autopar.frontend.call_signature import CallSignature, split_example
from autopar.frontend.capture_data import capture_data, captured_from
from autopar.frontend.fake_parameters import forms_of
from autopar.ir.graph import fingerprint
from autopar.utils.plain_data import NotPortable, decode, encode
from tests.frontend.test_unroll import build

scale = 2.0


class Setting:
    """An object of the user's that a forward reads."""

    def __init__(self):
        self.power, self.names = 1.0, ["up"]


class Model(nn.Module):
    """Reads attributes, a global, a closure, an object and a constant tensor; leaves a tensor and counts its calls."""

    def __init__(self, offset: float = 0.5):
        super().__init__()
        self.up, self.act = nn.Linear(4, 4), torch.relu
        self.setting, self.also = Setting(), None
        self.table, self.calls, self.last = {"shift": 0.25, "steps": [1, 2]}, 0, None
        self.shift = lambda y: y + offset
        self.constants = [torch.arange(4.0)]

    def forward(self, x, flag=True):
        self.calls += 1
        y = self.act(self.up(x)) * scale + self.table["shift"] * len(self.table["steps"])
        y = self.shift(y) * self.setting.power + self.constants[0][: len(self.setting.names)].sum()
        self.last = y.detach().mean()
        return {"y": y, "loss": y.square().mean(), "flag": flag}


def signature_of(inputs) -> CallSignature:
    return CallSignature.of(*split_example(inputs))[0]


def taken(captured, model, inputs):
    data = capture_data(captured, forms_of(captured.guards.seen.model))
    return captured_from(*data, model, None, forms_of(model), signature_of(inputs))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["mlp:hidden=16,layers=2", "gpt2", "bert", "moe-tiny", "resnet-tiny"])
def test_the_same_capture_as_traced(name):
    model, inputs = build(name)
    captured = compiler.trace(model, inputs)
    other = copy.deepcopy(model)
    found = taken(captured, other, inputs)
    assert graph_text(found.graph_module) == graph_text(captured.graph_module)
    assert fingerprint(found.graph) == fingerprint(captured.graph) and found.ties == captured.ties
    assert str(found.returns.template) == str(captured.returns.template)
    assert [r.path for r in found.guards.reads] == [r.path for r in captured.guards.reads] and found.guards.hold()
    traced = compiler.trace(other, inputs)
    assert fingerprint(traced.graph) == fingerprint(found.graph)
    for mine, theirs in zip(captured.graph.nodes, found.graph.nodes):
        assert mine.name == theirs.name and mine.meta.get("role") == theirs.meta.get("role")
        assert mine.meta["phase"] == theirs.meta["phase"] if mine.op != "output" else True


def test_guards_are_about_the_model_that_took_it():
    inputs = {"x": torch.randn(3, 4)}
    other = Model()
    found = taken(compiler.trace(Model(), inputs), other, inputs)
    assert found.guards.hold()
    other.table["shift"] = 0.5
    assert [words for _, words in found.guards.changed()] and not found.guards.hold()
    other.table["shift"] = 0.25
    other.setting.power = 3.0
    assert not found.guards.hold()
    other.setting.power = 1.0
    other.constants[0].add_(1)
    assert not found.guards.hold()


def test_effects_are_left_in_the_model_that_took_it():
    inputs = {"x": torch.randn(3, 4)}
    other = Model()
    found = taken(compiler.trace(Model(), inputs), other, inputs)
    outputs = [torch.full((), float(i)) for i in range(found.returns.count)]
    output = found.returns.rebuild(outputs)
    assert output["flag"] is True and output["loss"] is outputs[1]
    assert other.calls == 1 and other.last is outputs[2]


def one_attribute(model):
    model.table["steps"].append(3)


def another_object(model):
    model.also = model.setting
    model.setting = types.SimpleNamespace(power=1.0, names=["up"])


def of_an_object(model):
    model.setting.power = 2.0


def a_function(model):
    model.act = torch.tanh


def a_constant(model):
    model.constants[0][0] = 7.0


def a_layer(model):
    model.up = nn.Sequential(nn.Linear(4, 4))


def a_mode(model):
    model.up.eval()


def what_trains(model):
    model.up.bias.requires_grad_(False)


def a_hook(model):
    model.up.register_forward_hook(lambda module, args, output: output * 2)


@pytest.mark.parametrize("change", [
    one_attribute, another_object, of_an_object, a_function, a_constant, a_layer, a_hook, a_mode, what_trains,
])  # fmt: skip
def test_another_model_is_not_taken_for_the_same(change):
    inputs = {"x": torch.randn(3, 4)}
    captured, other = compiler.trace(Model(), inputs), Model()
    taken(captured, other, inputs)
    change(other)
    with pytest.raises(NotPortable):
        taken(captured, other, inputs)


def test_another_closure_or_global_is_not_taken_for_the_same(monkeypatch):
    inputs = {"x": torch.randn(3, 4)}
    captured = compiler.trace(Model(0.5), inputs)
    with pytest.raises(NotPortable):
        taken(captured, Model(0.75), inputs)
    monkeypatch.setattr(f"{__name__}.scale", 3.0)
    with pytest.raises(NotPortable):
        taken(captured, Model(), inputs)


def test_another_call_is_not_taken_for_the_same():
    captured = compiler.trace(Model(), {"x": torch.randn(3, 4)})
    for inputs in (
        {"x": torch.randn(2, 4)},
        {"x": torch.randn(3, 4), "flag": False},
        {"x": torch.randn(3, 4).double()},
    ):
        with pytest.raises(NotPortable, match="call"):
            taken(captured, Model(), inputs)


def test_a_forward_that_asks_for_its_process_is_not_portable():
    class Ranked(nn.Module):
        def forward(self, x):
            import os

            return x * float(os.environ.get("RANK", 0))

    with pytest.raises(NotPortable, match="environ"):
        capture_data(compiler.trace(Ranked(), {"x": torch.randn(3, 4, requires_grad=True)}), forms_of(Ranked()))


PLAIN = [
    None, True, 3, -0.0, 1.5, float("inf"), 1 + 2j, "text", b"bytes", [1, (2, "x")], {"a": {1: None}},
    slice(1, None, 2), range(1, 9, 2), torch.float32, torch.channels_last, torch.strided, torch.device("cpu"),
    torch.Size([2, 3]), ...,
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_data_is_what_it_was(value):
    import json

    again = decode(json.loads(json.dumps(encode(value))))
    assert again == value and type(again) is type(value) and repr(again) == repr(value)


@pytest.mark.parametrize("data", [{"torch": "load"}, {"enum": ["os", "system", "x"]}, {"a": 1, "b": 2}, {"call": "x"}])
def test_data_that_says_nothing_is_refused(data):
    with pytest.raises((NotPortable, TypeError)):
        decode(data)
