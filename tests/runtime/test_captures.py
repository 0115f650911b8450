"""One compiled module for many calls: shapes, arguments, modes and no_grad, against the unsharded model."""

from __future__ import annotations

import logging
import os

import pytest
import torch

import autopar
from autopar.errors import CollectiveTimeout, InputError
from autopar.runtime import captures
from tests.helpers import gloo

from . import tiny
from .parity import assert_close, assert_same_gradients, device_mesh, pair, planned
from .test_outputs import Normalized

pytestmark = pytest.mark.usefixtures("kept")

X, Y = tiny.Regressor.batch()


class Optioned(tiny.Regressor):
    def forward(self, x, target=None, scale=1.0):
        y = super().forward(x) * abs(scale)  # which is read: each number is a capture
        return {"y": y} if target is None else {"loss": (y - target).square().mean(), "y": y}


def _assert_same(parallel, reference, **call):
    mine, whole = parallel(**call), reference(**call)
    assert list(mine) == list(whole)
    for name, value in whole.items():
        assert_close(mine[name], value, f"{name} of {list(call)}")
        assert mine[name].requires_grad == value.requires_grad


def test_calls_of_another_form(alone, caplog):
    caplog.set_level(logging.INFO, logger="autopar")
    parallel, reference = pair(Optioned(), alone, dict(x=X, target=Y))
    calls = [
        dict(x=X, target=Y), dict(x=X[:3], target=Y[:3]), dict(x=X), dict(x=X, target=Y, scale=2.0),
        dict(x=X, target=Y, scale=3.0), dict(x=X[None], target=Y[None]),
    ]  # fmt: skip
    for _ in range(2):
        for call in calls:
            _assert_same(parallel, reference, **call)
    for m in (parallel, reference):
        for call in calls[::-1]:
            if "target" in call:
                m(**call)["loss"].backward()
    assert_same_gradients(parallel, reference)
    assert list(parallel.captures)[:3] == [
        "target (8, 4), x (8, 6); train",
        "target (3, 4), x (3, 6); train",
        "x (8, 6); train",
    ]
    assert len(parallel.captures) == len(calls) == len(caplog.messages) + 1
    assert caplog.messages[0].startswith("capture 2: target (3, 4), x (3, 6); train: follows the size")


def test_modes_and_no_grad(alone):
    parallel, reference = pair(Optioned(), alone, dict(x=X, target=Y))
    for m in (parallel, reference):
        m.eval()
    _assert_same(parallel, reference, x=X, target=Y)  # computes the same: no program of its own
    assert list(parallel.captures)[1:] == ["target (8, 4), x (8, 6); eval"]
    assert len({id(plan) for plan in parallel.captures.values()}) == 1
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            _assert_same(parallel, reference, x=X, target=Y)
    trained, *_, evaluated = parallel.captures.values()
    assert list(parallel.captures)[2:] == ["target (8, 4), x (8, 6); eval, no_grad"]
    assert set(evaluated.memory) == {"parameters", "values between ops"} and trained.memory["activations"] > 0
    assert (
        evaluated.memory_limit_bytes
        == trained.memory_limit_bytes - trained.memory["gradients"] - trained.memory["optimizer"]
    )
    assert not any(c.phase == "backward" for c in evaluated.collectives)
    _assert_same(parallel, reference, x=X, target=Y)


def test_too_many_captures(alone):
    """Check that shapes may be as many as there are, and that what changes in every call meets a limit."""
    parallel, reference = pair(Optioned(), alone, dict(x=X))
    parallel.capture_limit = 3
    for size in (8, 7, 6, 5, 4):
        assert_close(parallel(x=X[:size])["y"], reference(x=X[:size])["y"])
    for scale in (2.0, 3.0):
        assert_close(parallel(x=X, scale=scale)["y"], reference(x=X, scale=scale)["y"])
    many = (
        r"called with scale=4.0, x \(8, 6\); train, and is compiled for 3 calls of these shapes already: x \(8, 6\); "
    )
    with pytest.raises(InputError, match=many + r"train \| scale=2.0(.|\n)*fix: pass scale=torch.tensor\(4.0\)"):
        parallel(x=X, scale=4.0)
    parallel.capture_limit = 4
    for scale in (4.0, torch.tensor(5.0), torch.tensor(6.0), torch.tensor(7.0)):  # tensors are one capture
        assert_close(parallel(x=X, scale=scale)["y"], reference(x=X, scale=scale)["y"])


def test_the_capture_that_was_not_used_for_longest_goes(alone, monkeypatch):
    """Check that of many lengths only so many stay in memory, and that one which comes back is compiled anew."""
    monkeypatch.setattr(captures, "MOST", 3)
    parallel, reference = pair(tiny.Regressor(), alone, (X,))
    for size in (7, 6, 7, 5, 8, 4):
        assert_close(parallel(X[:size]), reference(X[:size]))
    assert list(parallel.captures) == [f"args[0] ({size}, 6); train" for size in (8, 5, 4)]
    assert_close(parallel(X[:7]), reference(X[:7]))


def test_a_part_in_another_mode(alone):
    """A frozen BatchNorm, before compiling and afterwards."""
    images, model = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0)), Normalized()
    model.norm.eval()
    parallel, reference = pair(model, alone, (images,))
    for flags in ((True, False), (True, True), (False, True), (False, False)):
        for m in (parallel, reference):
            m.zero_grad()
            m.train(flags[0])
            m.norm.train(flags[1])
            m(images).backward()
        assert_same_gradients(parallel, reference, 1e-4)
        for (name, mine), whole in zip(parallel.named_buffers(), reference.buffers()):
            assert_close(mine, whole, name, 1e-4)
    calls = ("train, norm eval", "train", "eval, norm train", "eval")
    assert list(parallel.captures) == [f"args[0] (4, 3, 6, 6); {text}" for text in calls]


def test_compiled_at_the_first_call(alone):
    """It is the same module afterwards: modes, limits and no_sync, which may be entered before."""
    images = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    reference, parallel = Normalized(), autopar.compile(Normalized(), alone)
    with parallel.no_sync(), parallel.no_sync():
        parallel(images).backward()
        assert parallel._captures.accumulation.is_deferring
    assert not parallel._captures.accumulation.is_deferring
    for m in (parallel, reference):
        m(images).backward()
    reference(images).backward()
    assert_same_gradients(parallel, reference, 1e-4)
    parallel.eval(), reference.eval()
    with torch.no_grad():
        assert_close(parallel(images), reference(images))
    parallel.capture_limit = 2
    with pytest.raises(InputError, match="is compiled for 2 calls of these shapes already"):
        parallel(images)


# on two processes
# ------------------------------------------------------------------------------------------------------


def _epochs(rank, plan):
    """Training with a short last batch and an evaluation after each epoch: pinned layouts, shared parameters and
    buffers."""
    images = torch.randn(11, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    parallel, reference = pair(Normalized(), device_mesh("dp=2"), (images[:4],), plan=plan)
    placements = [p.placements for p in parallel.parameters()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (parallel, reference)]
    for epoch in range(2):
        for batch in images.split(4):  # 4, 4 and 3 over two ranks
            losses = []
            for m, optimizer in zip((parallel.train(), reference.train()), optimizers):
                optimizer.zero_grad()
                losses.append(m(batch))
                losses[-1].backward()
            assert_close(*losses, f"loss of epoch {epoch}", 1e-4)
            assert_same_gradients(parallel, reference, 1e-4)
            for optimizer in optimizers:
                optimizer.step()
        with torch.no_grad():
            assert_close(parallel.eval()(images), reference.eval()(images), f"evaluation {epoch}", 1e-4)
    assert [p.placements for p in parallel.parameters()] == placements
    for (name, mine), whole in zip(parallel.named_buffers(), reference.buffers()):
        assert_close(mine, whole, name, 1e-4)
    return list(parallel.captures), [str(p) for p in placements]


@pytest.mark.slow
@pytest.mark.gloo
def test_training_with_evaluation():
    plan = planned(Normalized(), "dp=2", (torch.randn(4, 3, 6, 6),), strategy="fsdp")
    captures, placements = gloo.run(2, _epochs, plan)[0]
    assert captures == [
        f"args[0] ({n}, 3, 6, 6); {mode}" for n, mode in ((4, "train"), (3, "train"), (11, "eval, no_grad"))
    ]
    assert "(Shard(dim=0),)" in placements


def _apart(rank, plan):
    """Calls that differ between ranks, then one that a rank makes alone."""
    os.environ["AUTOPAR_TIMEOUT_S"] = "2"
    part, errors = slice(4 * rank, 4 * rank + 4), []
    call = dict(x=X[part], target=Y[part])
    parallel, reference = pair(tiny.Regressor(loss=True), device_mesh("dp=2"), call, inputs="local", plan=plan)
    parallel(**call).loss.backward()
    reference(x=X, target=Y).loss.backward()
    assert_same_gradients(parallel, reference)
    short = {name: value[: 3 - rank] for name, value in call.items()}
    for _ in range(2):
        with pytest.raises(InputError) as caught:
            parallel(**short)
        errors.append(str(caught.value))
    equal = {name: value[:3] for name, value in call.items()}  # 3 on each rank: a global batch of 6
    whole = {name: torch.cat([value[:3], value[4:7]]) for name, value in dict(x=X, target=Y).items()}
    for m, batch in ((parallel, equal), (reference, whole)):
        m.zero_grad()
        m(**batch).loss.backward()
    assert_same_gradients(parallel, reference)
    if rank == 1:
        with pytest.raises(CollectiveTimeout, match="rank 0 did not arrive in time at the lengths of the ranks"):
            parallel(**short)
    return errors


@pytest.mark.slow
@pytest.mark.gloo
def test_ranks_that_are_called_apart():
    plan = planned(tiny.Regressor(loss=True), "dp=2", dict(x=X, target=Y), strategy="ddp")
    for rank, errors in enumerate(gloo.run(2, _apart, plan)):
        other = 1 - rank
        for error in errors:
            assert (
                f"rank {other} is called with target ({3 - other}, 4)" in error
                and "drop or pad the last batch" in error
            )
