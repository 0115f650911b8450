"""The runner sees what is wrong: differences of every kind, bare exceptions, programs that hang."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.errors import InputError

from .nets import Net
from .processes import run_all
from .program import Program, one
from .runner import AT_CALL, AT_COMPILE, BARE, DIFFERENT, EQUAL, HANG, Outcome, TooLate, compared, limited, merged, play


class Wrapped(nn.Module):
    """Stands in for a compiled model: a Net that `after(net, y)` spoils after each call."""

    def __init__(self, net, after):
        super().__init__()
        self.up, self.down, self.steps = net.up, net.down, net.steps
        self.register_buffer("seen", net.seen)
        object.__setattr__(self, "_net", net)
        self._after = after

    def forward(self, x):
        y = self._net(x)
        self.steps, self.seen = self._net.steps, self._net.seen
        return self._after(self, y)


class Counted(Net):
    def __init__(self):
        super().__init__()
        self.steps = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        self.seen = self.seen + 1
        return super().forward(x)


def _outcome(after, raises=False) -> Outcome:
    program = Program("here", lambda: (Counted(), one(5, 6)), raises=raises)
    eager = play(program, lambda model, example: model)
    return compared(program, eager, play(program, lambda model, example: Wrapped(model, after)), program.tolerance)


def _set(**values):
    def after(m, y):
        for name, value in values.items():
            setattr(m, name, value)
        return y

    return after


def _raise(error):
    def after(m, y):
        raise error

    return after


def _gradient(m, y):
    y.register_hook(lambda g: 1.01 * g)
    return y


def _weight(m, y):
    m.up.weight.data[0, 0] += 1e-2
    return y


WRONG = {
    "value": (lambda m, y: y + 1e-3, "output: off by"),
    "type": (lambda m, y: y.double(), "output: torch.float64"),
    "structure": (lambda m, y: (y,), "output: nothing instead of"),
    "no gradient": (lambda m, y: y.detach(), "requires_grad: False"),
    "gradient": (_gradient, "gradient of"),
    "parameter": (_weight, "parameter up.weight"),
    "buffer": (_set(seen=torch.tensor(7.0)), "buffer seen"),
    "attribute": (_set(steps=9), "attribute steps"),
}


@pytest.mark.parametrize("name", WRONG)
def test_difference_is_seen(name):
    after, words = WRONG[name]
    outcome = _outcome(after)
    assert outcome.kind == DIFFERENT and words in outcome.detail, outcome


def test_the_same_is_equal():
    assert _outcome(lambda m, y: y).kind == EQUAL


def test_errors_are_told_apart():
    assert _outcome(_raise(InputError("no"))).kind == AT_CALL
    assert _outcome(_raise(KeyError("no"))).kind == BARE
    program = Program("here", lambda: (Net(), one(5, 6)), refused="no")
    outcome = compared(
        program,
        play(program, lambda m, e: m),
        play(program, lambda m, e: _raise(InputError("No.", source="here.py:3"))(m, e)),
        0,
    )
    assert outcome.kind == AT_COMPILE and outcome.holds(program)
    assert not outcome.holds(replace(program, refused=None)) and not outcome.holds(replace(program, refused="yes"))


def test_what_eager_refuses_must_be_refused():
    def script(run):
        run(1)
        if isinstance(run.model, Counted):
            raise ValueError("eager only")

    program = Program("here", lambda: (Counted(), one(5, 6), script), raises=True)
    eager = play(program, lambda model, example: model)
    outcome = compared(program, eager, play(program, lambda m, e: Wrapped(m, lambda m, y: y)), 1e-5)
    assert outcome.kind == DIFFERENT and "raises ValueError" in outcome.detail


def test_time_is_limited():
    with pytest.raises(TooLate), limited(0.2):
        time.sleep(5)


def test_ranks_that_disagree():
    outcome = merged([Outcome(EQUAL), Outcome(AT_CALL, "no", "InputError")])
    assert outcome.kind == DIFFERENT and "ranks disagree" in outcome.detail


def _sleep_on_rank_one(job):
    if job == "sleep" and torch.distributed.get_rank() == 1:
        time.sleep(60)
    return Outcome(EQUAL, job)


@pytest.mark.gloo
def test_a_hang_costs_only_its_own_program():
    jobs = ["first", "sleep", "last"]
    found = [outcome.kind for _, outcome in run_all(2, _sleep_on_rank_one, jobs, seconds=2)]
    assert found[0] == found[2] == EQUAL and found[1] == HANG
