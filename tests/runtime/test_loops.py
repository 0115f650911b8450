"""Looped collectives over processes: values and gradients are one device's, bytes are the plan's and those without
loops."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar import models
from tests.helpers import gloo
from tests.helpers.allocations import training_step
from tests.runtime import tiny

from .parity import assert_close, assert_same_gradients, device_mesh, pair

pytestmark = pytest.mark.gloo


class Messages(TorchDispatchMode):
    """Counts the bytes that go to one neighbour of a ring."""

    def __init__(self):
        super().__init__()
        self.sent: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "all_to_all_single" in function.name() and sorted(args[2])[-2:] == [0, 1]:
            self.sent.append(args[0].nbytes)
        return function(*args, **(kwargs or {}))


def check(rank: int, mesh: str, names: tuple[str, ...], seq: int) -> None:
    for name in names:
        model, batch = tiny.own(name, seq=seq)
        options = dict(strategy="megatron_sp", loops="always")
        mine, whole = pair(model.double(), device_mesh(mesh), batch, **options)
        assert len(mine.plan.sharding.loops) >= 6, mine.plan
        with Messages() as messages:
            loss = mine(**batch).loss
            loss.backward()
        wanted = whole(**batch).loss
        wanted.backward()
        assert_close(loss, wanted, name, 1e-10)
        assert_same_gradients(mine, whole, 1e-10)
        loops = [c for c in mine.plan.collectives if c.kind.endswith("_loop")]
        assert len(messages.sent) == sum(c.count for c in loops)
        if seq % device_mesh(mesh)["tp"].size() == 0:
            assert sum(messages.sent) == sum(c.wire_bytes for c in loops)


GPT, LLAMA = "gpt2-tiny:hidden=48,heads=12,layers=1", "llama-tiny:hidden=48,heads=12,kv_heads=12,layers=1"
GROUPED = "llama-tiny:hidden=48,heads=12,kv_heads=6,layers=1"  # fewer heads of keys than of queries
ALL = (GPT, LLAMA, GROUPED)


@pytest.mark.parametrize("mesh, ranks, names, seq", [
    ("tp=2", 2, (GROUPED,), 12),
    pytest.param("tp=2", 2, ALL, 13, marks=pytest.mark.slow),
    pytest.param("tp=3", 3, ALL, 12, marks=pytest.mark.slow),
    pytest.param("tp=3", 3, ALL, 13, marks=pytest.mark.slow),
    pytest.param("tp=4", 4, ALL, 12, marks=pytest.mark.slow),
    pytest.param("tp=4", 4, ALL, 15, marks=pytest.mark.slow),
    pytest.param("dp=2,tp=2", 4, ALL, 12, marks=pytest.mark.slow),
])  # fmt: skip
def test_step(mesh, ranks, names, seq):
    gloo.run(ranks, check, mesh, names, seq)


def compiled(rank: int) -> None:
    model, batch = tiny.own(GROUPED, seq=13)
    mine, whole = pair(model.double(), device_mesh("tp=2"), batch, strategy="megatron_sp", loops="always")
    mine.compile(backend="aot_eager")
    mine(**batch).loss.backward()
    whole(**batch).loss.backward()
    assert_same_gradients(mine, whole, 1e-10)


@pytest.mark.slow
def test_compiled():
    gloo.run(2, compiled)


def memory(rank: int) -> None:
    """Loops hold no more than the plan says, which is what it says without them."""
    model, batch = models.build("llama:hidden=64,layers=3,heads=4,kv_heads=4,vocab=128,seq=128", batch=4, seq=128,
                                device="cpu")  # fmt: skip
    options = dict(strategy="megatron_sp", loops="always", tile="none")
    mine = autopar.compile(model, device_mesh("tp=2"), batch, **options)
    mine(**batch).loss.backward()  # the first one keeps what is saved to its end
    mine.zero_grad()
    seen = training_step(mine, batch, torch.optim.AdamW(mine.parameters()), steps=1)
    assert mine.plan.sharding.loops
    assert seen.peak_bytes <= 1.02 * mine.plan.peak_bytes <= 1.15 * seen.peak_bytes


@pytest.mark.slow
def test_memory():
    gloo.run(2, memory)


def other_lengths(rank: int) -> None:
    """A call of another length follows the numbers of the first, or is lowered anew."""
    model, batch = tiny.own(GROUPED, seq=12)
    mine, whole = pair(model.double(), device_mesh("tp=2"), batch, strategy="megatron_sp", loops="always")
    for length in (12, 10, 7):
        one = {name: x[:, :length] for name, x in batch.items()}
        for m in (mine, whole):
            m.zero_grad()
            m(**one).loss.backward()
        assert_same_gradients(mine, whole, 1e-10)


@pytest.mark.slow
def test_other_lengths():
    gloo.run(2, other_lengths)
