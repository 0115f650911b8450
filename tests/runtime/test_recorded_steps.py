"""With mode="reduce-overhead" torch is told what it needs to record forward and backward as CUDA graphs. CPUs record
nothing, so that the same programs run, and what is told of them can be read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch._inductor.compile_fx

from autopar import _torch

from . import tiny
from .parity import assert_same_gradients, pair

X, Y = tiny.Regressor.batch()
CALL = dict(x=X, target=Y)


@pytest.fixture
def told(monkeypatch):
    """Note what Inductor is told of each graph."""
    graphs = []
    original = torch._inductor.compile_fx.compile_fx_inner

    def noted(graph, inputs, **given):
        of_graph = ("static_input_idxs", "is_inference", "is_backward")
        is_on = torch._inductor.config.triton.cudagraphs
        graphs.append([is_on, len(inputs), *(given.get(name) for name in of_graph)])
        return original(graph, inputs, **given)

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx_inner", noted)
    with torch._inductor.config.patch(force_disable_caches=True):
        yield graphs


@pytest.fixture
def begun(monkeypatch):
    """One item for each step that torch is told to begin."""
    begun: list[None] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(None))
    return begun


@pytest.mark.slow
def test_what_torch_is_told(alone, told, begun):
    parallel, reference = pair(tiny.Regressor(loss=True), alone, CALL)
    parallel.compile(mode="reduce-overhead")
    for _ in range(3):
        for module in (parallel, reference):
            module.zero_grad()
            module(**CALL).loss.backward()
        assert_same_gradients(parallel, reference)
    assert len(begun) == 3
    (forward, backward) = told
    count = len(list(reference.parameters()))
    assert forward == [True, count + 2, list(range(count)), False, False]  # parameters come first, then the batch
    is_on, _, fixed, is_inference, is_backward = backward
    assert is_on and is_backward and not is_inference and len(fixed) < count + 1
    with torch.no_grad():
        parallel(**CALL)
    assert len(told) == 3 and not told[-1][0] and told[-1][3]  # a forward by itself is not recorded
    assert len(begun) == 3


def test_steps_begin_when_no_backward_is_to_come(alone, begun):
    parallel, reference = pair(tiny.Regressor(loss=True), alone, CALL)
    parallel.compile(mode="reduce-overhead")
    losses = [(parallel(**CALL).loss, reference(**CALL).loss) for _ in range(2)]
    assert len(begun) == 1
    for pair_of_losses in losses:
        for loss in pair_of_losses:
            loss.backward()
    assert_same_gradients(parallel, reference)
    parallel(**CALL).loss.backward()
    assert len(begun) == 2


def test_what_leaves_a_step_is_copied_out(alone, monkeypatch):
    made: list[list] = []

    def in_a_pool(module, *others):
        def run(values):
            made.append(list(module(*values)))
            return made[-1]

        return SimpleNamespace(run=run)

    monkeypatch.setattr(_torch, "InductorProgram", in_a_pool)
    parallel, _ = pair(tiny.Regressor(loss=True), alone, CALL)
    parallel.compile(mode="reduce-overhead")
    output = parallel(**CALL)
    output.loss.backward()
    pool = {_torch.storage_key(t) for results in made for t in results if isinstance(t, torch.Tensor)}
    for value in (output.loss, *(_torch.local_of(p.grad) for p in parallel.parameters())):
        assert _torch.storage_key(value) not in pool
