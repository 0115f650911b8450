"""Checks of arguments that need values: which are answered, and which questions stay refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar import compiler
from autopar.errors import CaptureError
from autopar.frontend import value_checks
from autopar.simulate.compare import verify_model

from ..helpers import checking


@pytest.mark.parametrize("check", checking.CHECKS)
def test_answered(check, monkeypatch):
    monkeypatch.setattr(value_checks, "is_library", lambda module: True)

    class Checked(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return check(self.linear(x)).square().mean()

    report = verify_model(Checked(), (torch.randn(6, 4),), "dp=2")
    assert report.match, str(report)


@pytest.mark.parametrize("question", checking.QUESTIONS)
def test_refused(question):
    class Asking(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return question(self.linear(x)).square().mean()

    with pytest.raises(CaptureError, match="could not be traced") as caught:
        compiler.trace(Asking(), (torch.randn(6, 4),))
    assert "values of a tensor" in str(caught.value)


def _raising(h):
    if (h.detach() > 1e6).any():
        raise ValueError("too large")
    return h


def _asserting(h):
    assert not torch.isnan(h).any()
    return h


def test_checks_of_the_users_own_are_not_dropped():
    class Checked(nn.Linear):
        def forward(self, x):
            return self.check(super().forward(x))

    model = Checked(4, 4)
    model.check = _raising
    with pytest.raises(CaptureError, match="raises an error if a value") as caught:
        compiler.trace(model, (torch.randn(6, 4),))
    assert "test_value_checks.py" in caught.value.source and "assert" in caught.value.fix
    model.check = _asserting
    compiler.trace(model, (torch.randn(6, 4),))


def test_the_truth_of_tensors_is_torchs_own_afterwards():
    before = torch.Tensor.__dict__.get("__bool__"), torch.SymBool.__dict__.get("__bool__")
    compiler.trace(nn.Linear(4, 4), (torch.randn(6, 4),))
    assert (torch.Tensor.__dict__.get("__bool__"), torch.SymBool.__dict__.get("__bool__")) == before
    assert bool(torch.tensor(True)) and not torch.zeros(1)
    with pytest.raises(ValueError, match="scale"):
        torch.distributions.Normal(0.0, torch.tensor(-1.0), validate_args=True)
