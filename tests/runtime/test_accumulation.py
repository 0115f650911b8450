"""Gradients of several backward passes: with and without no_sync, in any order, and what reads them in between."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autopar.errors import InputError
from tests.helpers import gloo

from . import tiny
from .parity import assert_close, assert_same_gradients, assert_same_values, device_mesh, full, pair, planned

X, Y = tiny.Regressor.batch()
CALL = dict(x=X, target=Y)
REDUCTIONS = ("all_reduce", "all_reduce_", "reduce_scatter_tensor", "all_to_all_single")


class Reductions(TorchDispatchMode):
    """Counts what is reduced inside, by the number of elements: a loss is one, gradients are more."""

    def __init__(self):
        super().__init__()
        self.found: Counter = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if getattr(function, "namespace", "") == "_c10d_functional" and function._opname in REDUCTIONS:
            self.found["gradients" if args[0].numel() > 1 else "loss"] += 1
        return function(*args, **(kwargs or {}))


def _micro_steps(rank, plans):
    """Three micro-batches inside of no_sync and one outside are the batch of all of them, for one reduction."""
    mesh, found = device_mesh("dp=2"), {}
    micro = [dict(x=X + i, target=Y - i) for i in range(4)]
    for name, plan in plans.items():
        parallel, reference = pair(tiny.Regressor(loss=True), mesh, CALL, plan=plan)
        for _ in range(2):
            parallel.zero_grad(), reference.zero_grad()
            reference(
                x=torch.cat([m["x"] for m in micro]), target=torch.cat([m["target"] for m in micro])
            ).loss.backward()
            counts = []
            for i, batch in enumerate(micro):
                with parallel.no_sync() if i < 3 else nullcontext(), Reductions() as reductions:
                    (parallel(**batch).loss / 4).backward()
                counts.append(reductions.found["gradients"])
                if i == 2:
                    held = [
                        p.grad.to_local()
                        for p in parallel.parameters()
                        if any(x.is_partial() for x in p.grad.placements)
                    ]
                    assert sum(h.numel() * 4 for h in held) == parallel.unreduced_gradient_bytes
            assert_same_gradients(parallel, reference)
        found[name] = counts, parallel.unreduced_gradient_bytes
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("names", [("fsdp",), pytest.param(("ddp", "zero1"), marks=pytest.mark.slow)])
def test_one_reduction_for_many_micro_steps(names):
    plans = {name: planned(tiny.Regressor(loss=True), "dp=2", CALL, strategy=name) for name in names}
    whole = 4 * sum(p.numel() for p in tiny.Regressor().parameters())
    plans["for four"] = planned(tiny.Regressor(loss=True), "dp=2", CALL, micro_batches=4, strategy="ddp")
    assert plans["for four"].reduces_once
    for found in gloo.run(2, _micro_steps, plans):
        assert found == {name: ([0, 0, 0, 1], whole) for name in plans}


def _loops(rank, plan):
    """Ways to accumulate, on a mix of layouts over two axes; `sync` is what the unsharded model does for no_sync."""
    mesh = device_mesh("dp=2,tp=2")

    def build():
        return pair(tiny.Regressor(loss=True), mesh, CALL, plan=plan)

    def each(models):
        for m in models:
            yield m, m.no_sync if hasattr(m, "no_sync") else nullcontext, m(**CALL).loss

    # over a reduced gradient, for two shapes, two forwards in one backward, nested, left by an exception
    parallel, reference = models = build()
    short = dict(x=X[:5], target=Y[:5])
    for m, no_sync, loss in each(models):
        loss.backward()
        with no_sync():
            with no_sync():
                m(**short).loss.backward()
            (m(**CALL).loss + 2 * m(**short).loss).backward()
        with pytest.raises(ZeroDivisionError), no_sync():
            m(x=-X, target=Y).loss.backward()
            _ = 1 / 0
        m(x=X[:1], target=Y[:1]).loss.backward()
    assert_same_gradients(*models)
    # zero_grad drops what is not reduced, whichever way
    for set_to_none in (True, False):
        for m, no_sync, loss in each(models):
            with no_sync():
                loss.backward()
            torch.optim.SGD(m.parameters()).zero_grad(set_to_none)
            m(x=2 * X, target=Y).loss.backward()
        assert_same_gradients(*models)
    # an optimizer inside, which reads gradients that are not reduced
    for m, no_sync, _ in each(models):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            with no_sync():
                m(**CALL).loss.backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            optimizer.step()
    assert_same_values(*models, 1e-4)
    # gradients that are only returned, and those of some parameters
    parallel, reference = models = build()
    expected = torch.autograd.grad(reference(**CALL).loss, list(reference.parameters()))
    with parallel.no_sync():
        parallel(**CALL).loss.backward()
        inside = torch.autograd.grad(parallel(**CALL).loss, list(parallel.parameters()))
    outside = torch.autograd.grad(parallel(**CALL).loss, list(parallel.parameters()))
    for whole, *found in zip(expected, inside, outside):
        for gradient in found:
            assert_close(gradient, whole)
    reference(**CALL).loss.backward()
    for m in models:
        m(**CALL).loss.backward(inputs=[m.up.weight, m.down.bias])
    assert_same_gradients(*models)
    # recomputation around the module, hooks, a scaler
    parallel, reference = models = build()
    for m in models:
        m.up.weight.register_hook(lambda g: 2 * g)
        checkpoint(lambda x, target, m=m: m(x=x, target=target).loss, X, Y, use_reentrant=False).backward()
        scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=1024.0), torch.optim.AdamW(m.parameters(), lr=1e-2)
        for factor in (1.0, float("inf"), 1.0):
            scaler.scale(m(**CALL).loss * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 512
    assert_same_values(*models, 1e-4)


@pytest.mark.slow
@pytest.mark.gloo
def test_loops_on_a_mix_of_layouts():
    pins = {"up.weight": "dp:S(0) tp:S(1)", "up.bias": "tp:S(0)", "down.weight": "R"}
    gloo.run(4, _loops, planned(tiny.Regressor(loss=True), "dp=2,tp=2", CALL, pin=pins))


def test_second_derivatives(alone):
    parallel, _ = pair(tiny.Regressor(loss=True), alone, CALL)
    with pytest.raises(InputError, match="create_graph=True(.|\n)*fix: leave out create_graph"):
        torch.autograd.grad(parallel(**CALL).loss, list(parallel.parameters()), create_graph=True)
    parallel(**CALL).loss.backward()


def test_random_numbers_are_not_drawn_again(alone):
    """A checkpoint around the module would run the forward a second time, with another dropout mask."""
    parallel, _ = pair(nn.Sequential(tiny.Regressor(), nn.Dropout(0.5)), alone, (X,))
    loss = checkpoint(lambda x: full(parallel(x)).sum(), X, use_reentrant=False)
    with pytest.raises(
        InputError, match="would not draw those of the forward(.|\n)*fix: leave out torch.utils.checkpoint"
    ):
        loss.backward()
    full(parallel(X)).sum().backward()


def _other_size(rank, plan):
    """Gradients wait for their reduction, and the backward that reduces them is of the first call of another size."""
    for size in (4, 12):
        parallel, reference = models = pair(tiny.Regressor(loss=True), device_mesh("dp=2"), CALL, plan=plan)
        inputs = {name: torch.cat([x, x])[:size] for name, x in CALL.items()}
        for m in models:
            with m.no_sync() if m is parallel else nullcontext():
                m(**CALL).loss.backward()
            m(**inputs).loss.backward()
        assert_same_gradients(parallel, reference)


@pytest.mark.gloo
def test_reduced_in_a_call_of_another_size():
    gloo.run(2, _other_size, planned(tiny.Regressor(loss=True), "dp=2", CALL, strategy="fsdp"))
