"""Parameters: what the compiled model holds, and what is left of the source's."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import InputError, MemoryInfeasibleError, MovedParameterError, StrategyError
from autopar.ir.layout import Layout, local_part
from autopar.ir.mesh import Mesh
from tests.helpers import gloo

from . import tiny
from .parity import assert_close, assert_same_gradients, assert_same_values, device_mesh, full, pair, planned


def _train(rank, mesh_text, model, inputs, plan, steps=3):
    """Values, gradients, clipping and AdamW; returns this rank's local shapes by name."""
    parallel, reference = pair(model, device_mesh(mesh_text), inputs, plan=plan)
    assert_same_values(parallel, reference, tolerance=0.0)
    for name, parameter in parallel.named_parameters():
        mesh, text = plan.mesh, plan.layouts[name]
        whole, layout = dict(reference.named_parameters())[name], Layout.parse(text, parameter.dim())
        expected = local_part(whole, layout, mesh, mesh.coordinate(rank))
        assert torch.equal(parameter.to_local(), expected), f"{name}: {text}"
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (parallel, reference)]
    for _ in range(steps):
        for m in (parallel, reference):
            m(**inputs).loss.backward()
        assert_same_gradients(parallel, reference, 1e-4)
        norm = parallel.clip_grad_norm_(0.1)
        assert_close(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1), "norm", 1e-4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(parallel, reference, 1e-4)
    return {name: tuple(p.to_local().shape) for name, p in parallel.named_parameters()}


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("ranks", [2, 3])
def test_uneven_shards(ranks):
    """A hidden size of 31 over 2 and 3."""
    model, (x, y) = tiny.Regressor(hidden=31, loss=True), tiny.Regressor.batch()
    inputs = dict(x=x, target=y)
    pins = {"up.*": "tp:S(0)", "down.weight": "tp:S(1)", "down.bias": "R"}
    plan = planned(model, f"tp={ranks}", inputs, pin=pins)
    shapes = gloo.run(ranks, _train, f"tp={ranks}", model, inputs, plan)
    assert [s["up.weight"][0] for s in shapes] == {2: [16, 15], 3: [11, 11, 9]}[ranks]
    assert [s["down.weight"][1] for s in shapes] == [s["up.weight"][0] for s in shapes]


@pytest.mark.slow
@pytest.mark.gloo
def test_a_fused_weight_is_sharded_inside_its_parts():
    """GPT-2's c_attn holds queries, keys and values side by side in its output dim, (i, o) as a Conv1D weight."""
    model, inputs = tiny.gpt2(n_layer=1)
    pins = {"*.c_attn.weight": "tp:S(1/3)", "*.c_attn.bias": "tp:S(0/3)"}
    plan = planned(model, "tp=2", inputs, pin=pins)
    assert plan.layouts["transformer.h.0.attn.c_attn.weight"] == "tp:S(1/3)"
    shapes = gloo.run(2, _train, "tp=2", model, inputs, plan)
    assert all(s["transformer.h.0.attn.c_attn.weight"] == (24, 36) for s in shapes)


class Partly(nn.Module):
    """A frozen layer, a trained one, one that the call does not use, and two biases that get the same gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(6, 8).requires_grad_(False)
        self.trained = nn.Linear(8, 4)
        self.bias = nn.Parameter(torch.zeros(4))
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return (self.trained(torch.relu(self.frozen(x))) + self.bias).sum()


def test_frozen_unused_and_equal_gradients(alone):
    x, _ = tiny.Regressor.batch()
    parallel, reference = pair(Partly(), alone, (x,))
    for m in (parallel, reference):
        m(x).backward()
    assert_same_gradients(parallel, reference)
    assert parallel.frozen.weight.grad is None and parallel.unused.weight.grad is None
    assert not parallel.frozen.weight.requires_grad and parallel.unused.weight.requires_grad
    for m in (parallel, reference):
        m.bias.grad.mul_(3)  # in its own memory
        torch.optim.AdamW(m.parameters(), lr=0.1).step()
    assert_same_gradients(parallel, reference)
    assert_same_values(parallel, reference)
    for m in (parallel, reference):
        m.zero_grad()
        m.frozen.requires_grad_(True)
        m.bias.requires_grad_(False)
        m(x).backward()
    assert_same_gradients(parallel, reference)


@pytest.mark.slow
def test_nothing_to_train(alone):
    x, _ = tiny.Regressor.batch()
    model, inputs = tiny.gpt2(n_layer=1)
    for source, arguments in ((tiny.Regressor(), dict(x=x)), (model, inputs)):
        parallel, reference = pair(source.requires_grad_(False), alone, arguments)
        expected, found = reference(**arguments), parallel(**arguments)
        with torch.no_grad():
            again = parallel(**arguments)
        for output in (found, again):
            output, whole = (output, expected) if torch.is_tensor(expected) else (output.logits, expected.logits)
            assert not output.requires_grad
            assert_close(output, whole)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6, bias=False)
        self.b = nn.Linear(6, 6, bias=False)
        self.b.weight = self.a.weight
        self.twice = self.a  # a module under two names
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("lost", torch.ones(2), persistent=False)
        self.register_buffer("also_kept", self.kept)

    def forward(self, x):
        return self.twice(self.b(self.a(x))).square().mean() * self.kept.sum()


def test_names_and_ties(alone):
    x, _ = tiny.Regressor.batch()
    parallel, reference = pair(Tied(), alone, (x,))
    assert [n for n, _ in parallel.named_parameters()] == ["a.weight"]
    assert list(parallel.state_dict()) == list(reference.state_dict())
    assert [n for n, _ in parallel.named_buffers()] == [n for n, _ in reference.named_buffers()]
    assert parallel.b.weight is parallel.a.weight is parallel.twice.weight and parallel.kept is parallel.also_kept
    for m in (parallel, reference):
        m(x).backward()
    assert_same_gradients(parallel, reference)


def test_parameters_stay_in_place(alone):
    x, _ = tiny.Regressor.batch()
    parallel, reference = pair(tiny.Regressor(), alone, (x,))
    assert parallel.to("cpu") is parallel and parallel.float() is parallel
    with pytest.raises(StrategyError, match="stays on its devices and in its dtype"):
        parallel.half()
    doubled = {name: p.detach() * 2 for name, p in parallel.state_dict().items()}
    for p in reference.parameters():
        p.data *= 2
    parallel.load_state_dict(doubled, assign=True)  # the same layout: other objects
    assert_close(parallel(x), reference(x))
    parallel.up.weight = nn.Parameter(reference.up.weight.detach().double())
    with pytest.raises(InputError, match="up.weight was replaced"):
        parallel(x)


# the source afterwards
# -------------------------------------------------------------------------------------------------


def test_the_source_is_emptied(alone, new_garbage):
    x, _ = tiny.Regressor.batch()
    source = tiny.Regressor(hidden=64)
    storages = [weakref.ref(p.untyped_storage()) for p in source.parameters()]
    originals = list(source.parameters())
    parallel = autopar.compile(source, alone, (x,))
    gc.collect()
    assert all(p.untyped_storage().nbytes() == 0 for p in originals)
    assert not any(s() is not None and s().nbytes() for s in storages)
    assert sum(full(p).numel() for p in parallel.parameters()) == 64 * 6 + 64 + 4 * 64 + 4


def test_using_the_source_is_an_error(alone, capsys, new_garbage):
    x, _ = tiny.Regressor.batch()
    source = tiny.Regressor()
    source.several = nn.ParameterList([nn.Parameter(torch.ones(2))])
    optimizers = [
        make(source.parameters()) for make in (torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    ]
    originals = list(source.parameters())
    parallel = autopar.compile(source, alone, (x,))
    uses = [
        lambda: source(x), lambda: originals[0] + 1,
        lambda: originals[0].grad, lambda: torch.nn.utils.clip_grad_norm_(originals, 1.0),
        *(o.step for o in optimizers), *(o.zero_grad for o in optimizers),
        lambda: autopar.compile(source, alone, (x,)), lambda: autopar.plan(source, "dp=1", (x,)),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(MovedParameterError, match="taken over by .*autopar.compile"):
            use()
    print(originals, [p.dtype for p in originals])
    assert "taken over" in capsys.readouterr().out
    assert len({*originals}) == 5
    torch.testing.assert_close(source.up(x), parallel.up(x))  # a layer runs as a part of the compiled model
    assert source.up is parallel.up and source.up.weight is parallel.up.weight
    source = optimizers = uses = originals = None
    gc.collect()
    parallel(x).sum().backward()


def test_a_failed_compile_leaves_the_source(alone):
    x, _ = tiny.Regressor.batch()
    source = tiny.Regressor()
    before = [p.clone() for p in source.parameters()]
    with pytest.raises(MemoryInfeasibleError):
        autopar.compile(source, alone, (x,), memory=10)
    assert all(torch.equal(a, b) for a, b in zip(before, source.parameters()))
    with pytest.raises(InputError, match="up.weight is on the meta device"):
        autopar.compile(tiny.Regressor().to("meta"), alone, (x,))
    with pytest.raises(InputError, match="up.weight is a DTensor already"):
        autopar.compile(autopar.compile(source, alone, (x,)), alone, (x,))
    assert Mesh.of(alone) == Mesh.parse("dp=1,tp=1")
