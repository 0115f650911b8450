"""Joint graphs are recorded below autograd, and equal torch's own trace; that one takes what cannot be recorded."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from autopar import models
from autopar._torch import joint, recording
from autopar.compiler import trace
from autopar.ir.graph import output_node, renumbered
from tests.runtime import tiny

MODELS = {
    "gpt": lambda: models.build("gpt:hidden=16,layers=2,heads=2,vocab=32,seq=8", batch=2, seq=8, device="cpu", seed=0),
    "llama": lambda: models.build("llama-tiny:layers=1", batch=2, seq=4, device="cpu", seed=0),
    "moe": lambda: models.build("moe-tiny:layers=1", batch=2, seq=4, device="cpu", seed=0),
    "resnet": lambda: models.build("resnet-tiny", batch=2, seq=1, device="cpu", seed=0),
    "gpt2": lambda: tiny.gpt2(n_layer=1),
}


def text(captured) -> list[str]:
    """Return what a joint graph says, whatever its nodes are called."""
    copy, lines = renumbered(captured.graph), []
    for node, made in zip(captured.graph.nodes, copy.nodes):
        said = [node.meta.get(key) for key in ("role", "roles", "phase", "module", "source")]
        lines.append(f"{made.format_node()} {form(node.meta.get('val'))} {said}")
    return lines


def form(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad
    return [form(part) for part in value] if isinstance(value, (tuple, list)) else value


def refuse(*args):
    raise recording.NotRecorded


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
def test_a_recorded_graph_is_the_traced_one(name, monkeypatch):
    model, batch = MODELS[name]()
    with monkeypatch.context() as patch:
        patch.setattr(joint, "traced_joint", refuse)
        recorded = text(trace(model, batch))
    monkeypatch.setattr(joint, "recorded_joint", refuse)
    assert text(trace(model, batch)) == recorded


class Writes(nn.Module):
    """Writes to a part of what it computed, or to all of it."""

    def __init__(self, part: bool):
        super().__init__()
        self.weight, self.part = nn.Parameter(torch.randn(6, 4)), part

    def forward(self, x):
        y = x @ self.weight.t()
        (y[:, ::2] if self.part else y).mul_(3.0)
        return (y * y.sin()).sum()


@pytest.mark.parametrize("part", [False, True])
def test_a_write_is_in_the_gradients(part, monkeypatch):
    """A write to what has a view is left to torch's trace, any other is recorded."""
    torch.manual_seed(0)
    model, x = Writes(part), torch.randn(3, 4)
    model(x).backward()
    traced = []
    plain = joint.traced_joint
    monkeypatch.setattr(joint, "traced_joint", lambda *given: (traced.append(given), plain(*given))[1])
    captured = trace(model, (x,))
    assert bool(traced) == part
    loss, gradient = captured.graph_module(model.weight.detach(), x, torch.ones(()))
    torch.testing.assert_close((loss, gradient), (model(x).detach(), model.weight.grad))


class WritesWithoutGradients(nn.Module):
    """Ends where gradients are off, with a write to a part of a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("seen", torch.zeros(3, 4))

    def forward(self, x):
        y = x @ self.weight.t()
        loss = (y * self.seen.clone()).sum() + y.sin().sum()
        with torch.no_grad():
            self.seen[:, ::2] = y[:, ::2]
        return loss


def test_gradients_are_on_again_where_a_recording_ended():
    """A recording that ends inside of `no_grad` leaves torch's trace as it was."""
    torch.manual_seed(0)
    model, x = WritesWithoutGradients(), torch.randn(3, 4)
    captured = trace(model, (x,))
    seen = model.seen.clone()
    model(x).backward()
    given = {"parameter": model.weight.detach(), "buffer": seen, "input": x, "tangent": torch.ones(())}
    leaves = [node.meta["role"].kind for node in captured.graph.nodes if node.op == "placeholder"]
    found = captured.graph_module(*(given[kind] for kind in leaves))
    roles = output_node(captured.graph).meta["roles"]
    gradients = [value for value, role in zip(found, roles) if role.kind == "gradient"]
    torch.testing.assert_close(gradients, [model.weight.grad])


def test_a_recorder_is_freed(monkeypatch, new_garbage):
    """Hooks of autograd know it, and no search for garbage sees those."""
    made, plain = [], recording.Recorder.__init__

    def noted(self, *given):
        plain(self, *given)
        made.append(weakref.ref(self))

    monkeypatch.setattr(recording.Recorder, "__init__", noted)
    trace(*MODELS["gpt"]())
    gc.collect()
    assert [recorder() for recorder in made] == [None]
