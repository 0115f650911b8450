"""Plain Python state: attributes that the forward reads and writes, and that users set between calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from .nets import Net
from .program import Topic, calls, one

attributes = Topic(__name__)
SCALE = 1.0
SETTINGS = {"scale": 1.0}


class Scaled(Net):
    """A Net times what `factor(self)` says."""

    def __init__(self, factor, **values):
        super().__init__()
        self.factor = factor
        for name, value in values.items():
            setattr(self, name, value)

    def forward(self, x):
        return super().forward(x) * self.factor(self)


def _set_between(name: str, value):
    """A script that calls, sets an attribute, calls, sets it back and calls."""

    def script(run):
        before = getattr(run.model, name)
        run(1)
        setattr(run.model, name, value)
        run(2)
        setattr(run.model, name, before)
        run(3)

    return script


CHANGED = {  # attribute: (what the forward multiplies with, its value, another value)
    "temperature": (lambda m: 1 / m.temperature, 1.0, 2.0),
    "int_scale": (lambda m: m.int_scale, 1, 3),
    "flag": (lambda m: 2.0 if m.flag else 1.0, False, True),
    "mode": (lambda m: {"mean": 1.0, "sum": 5.0}[m.mode], "mean", "sum"),
    "nothing": (lambda m: 1.0 if m.nothing is None else m.nothing, None, 4.0),
    "pair": (lambda m: m.pair[0] + m.pair[1], (1.0, 2.0), (0.5, 0.25)),
    "plain_tensor": (lambda m: m.plain_tensor, torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 0.0, 1.0])),
    "function": (lambda m: m.function(torch.tensor(2.0)), torch.sin, torch.cos),
    "dtype": (lambda m: torch.full((3,), 1 / 3, dtype=m.dtype).float(), torch.float32, torch.bfloat16),
}  # fmt: skip
for name, (factor, value, other) in CHANGED.items():
    attributes.add(
        f"set_{name}",
        lambda name=name, factor=factor, value=value, other=other: (
            Scaled(factor, **{name: value}), one(4, 6), _set_between(name, other)
        ),
    )  # fmt: skip


@attributes()
def list_attribute_changed_inside():
    """An element of a list attribute is set between calls."""

    def script(run):
        run(1)
        run.model.weights[1] = 0.1
        run(2)
        run.model.weights.append(2.0)
        run(3)

    return Scaled(lambda m: sum(m.weights), weights=[1.0, 2.0]), one(5, 6), script


@attributes()
def dict_attribute_changed_inside():
    """A dict of settings changes between calls."""

    def script(run):
        run(1)
        run.model.settings["scale"] = 3.0
        run(2)

    return Scaled(lambda m: m.settings["scale"], settings={"scale": 1.0}), one(5, 6), script


@attributes()
def tensor_attribute_written_between():
    """A plain tensor attribute is written in place between calls."""

    def script(run):
        run(1)
        run.model.weights.mul_(2)
        run(2)
        run.model.weights[0] = 7.0
        run(3)

    return Scaled(lambda m: m.weights, weights=torch.tensor([1.0, 2.0, 3.0])), one(5, 6), script


@attributes()
def nested_config():
    """A nested configuration object changes between calls."""

    @dataclass
    class Loss:
        weight: float = 1.0
        names: list = field(default_factory=lambda: ["a"])

    def script(run):
        run(1)
        run.model.config.loss.weight = 0.25
        run(2)
        run.model.config.loss = Loss(weight=3.0, names=["a", "b"])
        run(3)

    config = SimpleNamespace(loss=Loss(), name="x")
    return Scaled(lambda m: m.config.loss.weight * len(m.config.loss.names), config=config), one(5, 6), script


@attributes()
def submodule_attribute():
    """An attribute of an inner layer is set through the model."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Net(6, 5, 6), Scaled(lambda m: m.alpha, alpha=1.0)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    def script(run):
        run(1)
        run.model.layers[1].alpha = 0.3
        run(2)

    return Inner(), one(4, 6), script


@attributes()
def module_global():
    """A number of the Python module is changed between calls."""

    def script(run):
        global SCALE
        SCALE = 1.0
        run(1)
        SCALE = 2.5
        run(2)
        SCALE = 1.0
        run(3)

    return Scaled(lambda m: SCALE), one(4, 6), script


@attributes()
def global_dict():
    """A dict of the Python module is changed between calls."""

    def script(run):
        SETTINGS["scale"] = 1.0
        run(1)
        SETTINGS["scale"] = 2.0
        run(2)
        SETTINGS["scale"] = 1.0

    SETTINGS["scale"] = 1.0
    return Scaled(lambda m: SETTINGS["scale"]), one(4, 6), script


@attributes()
def closure_variable():
    """A variable that the forward closes over is changed between calls."""
    beta = 1.0

    class Closing(Net):
        def forward(self, x):
            return super().forward(x) * beta

    def script(run):
        nonlocal beta
        beta = 1.0
        run(1)
        beta = 0.1
        run(2)

    return Closing(), one(4, 6), script


@attributes()
def class_attribute():
    """A value of the class is changed between calls."""

    class Classy(Net):
        scale = 1.0

        def forward(self, x):
            return super().forward(x) * self.scale

    def script(run):
        run(1)
        Classy.scale = 4.0
        run(2)

    return Classy(), one(4, 6), script


@attributes()
def property_of_two():
    """A property computes what the forward reads from what users set."""

    class Annealed(Net):
        def __init__(self):
            super().__init__()
            self.epoch = 0

        @property
        def weight_of_kl(self):
            return min(1.0, self.epoch / 3)

        def forward(self, x):
            y = super().forward(x)
            return F.mse_loss(y, torch.zeros_like(y)) + self.weight_of_kl * y.exp().mean()

    def script(run):
        for epoch in range(5):
            run.model.epoch = epoch
            run(epoch)

    return Annealed(), one(4, 6), script


class Stepping(Net):
    """Counts its calls in a plain attribute; `use(self, y)` reads it."""

    def __init__(self, use):
        super().__init__()
        self.use, self.steps = use, 0

    def forward(self, x):
        self.steps += 1
        return self.use(self, super().forward(x))


@attributes()
def counter_unread():
    """A counter is counted up, and only the user reads it."""
    return Stepping(lambda m, y: y), one(4, 6)


@attributes()
def counter_multiplied():
    """A counter is multiplied into the output."""

    def script(run):
        for seed in range(4):
            run(seed)

    return Stepping(lambda m, y: y * m.steps), one(4, 6), script


@attributes()
def counter_in_an_if():
    """A counter switches a branch from the third call on."""

    def script(run):
        for seed in range(4):
            run(seed)

    return Stepping(lambda m, y: y if m.steps < 3 else y.tanh()), one(4, 6), script


@attributes()
def counter_modulo():
    """Every second call returns something else, with another structure."""

    def script(run):
        for seed in range(4):
            run(seed)

    return Stepping(lambda m, y: (y, y.sum()) if m.steps % 2 else (y, None)), one(4, 6), script


@attributes()
def python_float_average():
    """A Python float follows the call's inputs' size."""

    class Average(Net):
        def __init__(self):
            super().__init__()
            self.average = 0.0

        def forward(self, x):
            self.average = 0.5 * self.average + 0.5 * x.shape[0]
            return super().forward(x) * self.average

    return Average(), one(4, 6), calls((4, 6), (5, 6), (4, 6))


@attributes()
def float_from_item():
    """A Python float is read from the values of a tensor and kept."""

    class Logged(Net):
        def __init__(self):
            super().__init__()
            self.last = 0.0

        def forward(self, x):
            y = super().forward(x)
            self.last = y.abs().mean().item()
            return y

    return Logged(), one(4, 6)


@attributes()
def detached_value_kept():
    """A detached tensor is kept for the user's log."""

    class Logged(Net):
        def forward(self, x):
            h = self.features(x)
            self.last_norm = h.detach().norm()
            return self.down(h)

    return Logged(), one(4, 6)
