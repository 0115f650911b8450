"""Check that state which is loaded, replaced, moved away or cleared between two steps of an optimizer counts in the
second, though its local parts are kept meanwhile, and that nothing is held that the user let go."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
from torch.optim import SGD, AdamW

from autopar import _torch
from tests.helpers import gloo

from . import tiny
from .parity import assert_same_values, device_mesh, pair

X, Y = tiny.Regressor.batch()
CALL = dict(x=X, target=Y)


former = []  # what the user still has of the state, though the optimizer has it no longer


def _halved(optimizer) -> None:
    for state in optimizer.state.values():
        former.append(state["exp_avg"])
        state["exp_avg"] = state["exp_avg"] * 0.5


def _exchanged(optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg"].abs(), state["exp_avg"].clone().abs()


def _loaded(optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _written_in_place(optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.25)
        state["step"].zero_()


def _cleared(optimizer) -> None:
    optimizer.state.clear()


def _cut_short(optimizer) -> None:
    optimizer.param_groups[0]["params"].pop()


def _with_notes(optimizer) -> None:
    optimizer.state["run"] = 7


BETWEEN = [None, _halved, _exchanged, _loaded, _written_in_place, _cleared, _with_notes, _cut_short, None]


def _same_as_torch(pairs) -> None:
    optimizers = [AdamW(m.parameters(), lr=1e-2, fused=True) for m in pairs]
    for number, change in enumerate(BETWEEN):
        for model, optimizer in zip(pairs, optimizers):
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            model(**CALL).loss.backward()
            if number == 2:
                next(iter(model.parameters())).grad = None  # has state, and no gradient in this step
            optimizer.step()
            if change is not None:
                change(optimizer)
        assert_same_values(*pairs, tolerance=1e-4)


def _nothing_held(model) -> None:
    optimizer = AdamW(model.parameters(), lr=1e-2)
    first = next(iter(model.parameters()))

    def step(optimizer) -> None:
        model(**CALL).loss.backward()
        optimizer.step()

    step(optimizer)
    step(optimizer)
    gradient = weakref.ref(_torch.local_of(first.grad))
    optimizer.zero_grad()
    gc.collect()
    assert gradient() is None
    average = weakref.ref(_torch.local_of(optimizer.state[first]["exp_avg"]))
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].clone()  # as offloading to another device does
    gc.collect()
    assert average() is None
    step(optimizer)
    average = weakref.ref(_torch.local_of(optimizer.state[first]["exp_avg"]))
    optimizer.state.clear()
    gc.collect()
    assert average() is None
    step(optimizer)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


def _stateless_and_former_values(pairs) -> None:
    optimizers = [SGD(m.parameters(), lr=0.1) for m in pairs]
    for _ in range(3):
        for model, optimizer in zip(pairs, optimizers):
            optimizer.zero_grad()
            model(**CALL).loss.backward()
            optimizer.step()
        assert_same_values(*pairs, tolerance=1e-4)
    parameter = next(p for p in pairs[0].parameters() if p.grad is not None)
    before = parameter._version
    for optimizer in optimizers:
        optimizer.step()
    assert parameter._version > before  # what was saved for a backward is known to be out of date


def _check(rank: int) -> bool:
    pairs = pair(tiny.Regressor(hidden=7, loss=True), device_mesh("dp=2"), CALL, strategy="fsdp")
    _stateless_and_former_values(pairs)
    _same_as_torch(pairs)
    _nothing_held(pairs[0])
    return True


@pytest.mark.gloo
def test_what_is_kept_between_steps_is_what_the_optimizer_has():
    assert gloo.run(2, _check) == [True] * 2
