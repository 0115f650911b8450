"""Tests of what a trace holds for: the Python values that a forward reads, and what it leaves behind."""

from __future__ import annotations

import collections
import functools
import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from autopar import compiler
from autopar.errors import CaptureError
from autopar.frontend.snapshot import Snapshot

SCALE = 1.0
TABLE = {"gain": 1.0, "unread": 5}


@dataclass
class Config:
    temperature: float = 1.0
    names: list = field(default_factory=lambda: ["a", "b"])
    unread: int = 0


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.0)


def scaled(x):
    return x * SCALE


class Reads(Base):
    kind = 1.0

    def __init__(self, inner: float = 1.0):
        super().__init__()
        self.temperature, self.config, self.unread, self.optional = 1.0, Config(), 3, None
        self.function = functools.partial(torch.mul, other=1.0)
        self.closed = lambda x: x * inner

    @property
    def cold(self) -> bool:
        return self.temperature < 0.5

    def forward(self, x):
        y = scaled(self.drop(self.linear(x))) * self.temperature * self.kind * self.config.temperature * TABLE["gain"]
        if self.cold or getattr(self, "extra", None) is not None:
            y = y + 1
        return self.closed(self.function(y)) * len(self.config.names)


def traced(model: nn.Module):
    return compiler.trace(model, (torch.randn(2, 4),))


def set_global(model):
    global SCALE
    SCALE = 2.0


def set_item(model):
    TABLE["gain"] = 2.0


CHANGES = {
    "attribute": lambda m: setattr(m, "temperature", 2.0),
    "type": lambda m: setattr(m, "temperature", 1),
    "class": lambda m: setattr(m, "kind", 3.0),
    "config": lambda m: setattr(m.config, "temperature", 2.0),
    "another config": lambda m: setattr(m, "config", Config()),
    "list": lambda m: m.config.names.append("c"),
    "dropout": lambda m: setattr(m.drop, "p", 0.5),
    "what was not there": lambda m: setattr(m, "extra", 1),
    "function": lambda m: setattr(m, "function", torch.sin),
    "closure": lambda m: setattr(m.closed.__closure__[0], "cell_contents", 2.0),
    "global": set_global,
    "global table": set_item,
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_read_is_guarded(name, monkeypatch):
    """A change of what the forward read makes the capture another one, and the capture serves again when it is back."""
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    monkeypatch.setitem(TABLE, "gain", 1.0)
    model = Reads()
    guards = traced(model).guards
    assert guards.hold() and not guards.changed()
    CHANGES[name](model)
    assert not guards.hold() and len(guards.changed()) == 1
    with guards.installed():
        assert guards.hold()
    assert not guards.hold()


def test_what_is_not_read_is_not_guarded():
    model = Reads()
    guards = traced(model).guards
    model.unread, model.config.unread, TABLE["unread"], model.never = 4, 5, 5, "new"
    model.temperature = float("1.0")  # an equal number, another object
    assert guards.hold()


class Writes(Base):
    def __init__(self, write):
        super().__init__()
        self.write, self.steps, self.history, self.seen, self.cache = write, 3, [], {}, None
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x):
        y = self.linear(x)
        self.write(self, y)
        return y


WRITES = {
    "counter": lambda m, y: setattr(m, "steps", m.steps + 1),
    "constant": lambda m, y: setattr(m, "cache", "full"),
    "tensor": lambda m, y: setattr(m, "cache", y.mean()),
    "nest": lambda m, y: setattr(m, "cache", {"a": [y, 1], "b": (y.sum(),)}),
    "buffer": lambda m, y: setattr(m, "last", y.detach().mean(0)),
    "buffer of another form": lambda m, y: setattr(m, "last", y.detach()),
    "new buffer": lambda m, y: m.register_buffer("fresh", y.detach()),
    "list": lambda m, y: m.history.append(y.detach()),
    "dict": lambda m, y: m.seen.update(n=y.detach()),
    "container": lambda m, y: setattr(m, "history", [*m.history, 1]),
}


@pytest.mark.parametrize("name", WRITES)
def test_tracing_leaves_no_trace(name):
    """After a trace all attributes, buffers and containers are the objects that they were, with the same content."""
    model = Writes(WRITES[name])
    before = {
        k: (v, list(v) if isinstance(v, (list, dict)) else v) for k, v in vars(model).items() if not k.startswith("_")
    }
    last = model.last
    captured = traced(model)
    assert vars(model).keys() >= before.keys() and not {*vars(model)} - {*before} - {
        k for k in vars(model) if k.startswith("_")
    }
    assert all(
        vars(model)[k] is v and (list(v) if isinstance(v, (list, dict)) else v) == c for k, (v, c) in before.items()
    )
    assert model.last is last and list(model._buffers) == ["last"] and captured.guards.hold()
    assert captured.returns.effects or captured.returns.buffers


def step(model: Writes, y) -> None:
    model.steps += 1


def read_step(model: Writes, y) -> None:
    model.steps += 1
    y.mul_(model.steps)


def test_counters():
    """A number that is only counted on is no guard; one that is read as well is."""
    (effect,) = traced(Writes(step)).returns.effects
    assert (effect.name, effect.step) == ("steps", 1)
    model = Writes(read_step)
    captured = traced(model)
    assert captured.returns.effects[0].step == 0 and captured.returns.effects[0].value == 4
    model.steps = 4
    assert not captured.guards.hold()


class Refused(Base):
    def __init__(self, act):
        super().__init__()
        self.act, self.other = act, Base()

    def forward(self, x):
        y = self.linear(x)
        return y if (z := self.act(self, y)) is None else z


REFUSED = {
    "random": (lambda m, y: y * random.random(), "Python's random"),
    "seed": (lambda m, y: torch.manual_seed(3) and None, "torch.manual_seed"),
    "object": (lambda m, y: setattr(m, "thing", collections.Counter(a=1)), "model.thing"),
    "module": (lambda m, y: setattr(m, "other", nn.Linear(4, 4)), "replaces the module"),
    "parameter": (lambda m, y: setattr(m.linear, "bias", nn.Parameter(torch.zeros(4))), "replaces the parameter"),
    "hook": (lambda m, y: y.register_hook(lambda g: g) and None, "hook of a tensor"),
    "generator": (lambda m, y: y + torch.randn(4, generator=torch.Generator()), "generator of its own"),
    "derivative": (lambda m, y: torch.autograd.grad(y.sum(), y)[0], "torch.autograd.grad"),
    "frozen for good": (lambda m, y: m.linear.requires_grad_(False) and None, "freezes linear.weight"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_cannot_do_is_refused(name):
    """With the attribute's name, and the model as it was."""
    act, words = REFUSED[name]
    model, state = Refused(act), random.getstate()
    linear, other = model.linear.bias, model.other
    with pytest.raises(CaptureError, match=words):
        traced(model)
    assert (
        model.linear.bias is linear
        and model.other is other
        and not hasattr(model, "thing")
        and random.getstate() == state
    )
    assert all(p.requires_grad for p in model.parameters())


class Freezing(Base):
    """Computes with a layer that is frozen for as long as it is used."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(4, 4)

    def forward(self, x):
        self.frozen.requires_grad_(False)
        y = self.frozen(self.linear(x))
        self.frozen.requires_grad_(True)
        return y


def test_a_layer_that_is_frozen_for_a_while_gets_no_gradient():
    captured = traced(Freezing())
    gradients = {
        r.name for r in next(n for n in captured.graph.nodes if n.op == "output").meta["roles"] if r.kind == "gradient"
    }
    assert gradients == {"linear.weight", "linear.bias"}


def test_snapshots_compare_types_and_tell_tensors_apart():
    values = [1, 1.0, True, "1", None, (1,), [1], {1: 1}, {1}, torch.ones(1)]
    for i, a in enumerate(values):
        for j, b in enumerate(values):
            assert Snapshot(a).is_now(b) == (i == j), (a, b)
    tensor = torch.ones(2)
    snapshot = Snapshot([tensor, {"a": tensor}])
    assert snapshot.is_now(snapshot.value) and not snapshot.is_now([tensor, {"a": tensor.clone()}])
    tensor.add_(1)
    assert not snapshot.is_now(snapshot.value)
    snapshot.forget_values(())
    assert snapshot.is_now([torch.zeros(2), {"a": torch.zeros(2)}]) and not snapshot.is_now(
        [torch.zeros(3), {"a": tensor}]
    )
