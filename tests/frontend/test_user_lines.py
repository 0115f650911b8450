"""Errors name the user's line: the op's, that of a definition, else the call's."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.frontend.user_lines import line_now, line_of_definition, line_of_error
from tests.helpers import gloo

HERE = "test_user_lines.py"


def _line_of(text: str) -> int:
    """The number of the one line of this file that ends so."""
    (found,) = [n for n, line in enumerate(open(__file__), 1) if line.rstrip().endswith("# " + text)]
    return found


class Net(nn.Module):
    def __init__(self, change=lambda self, h: h):
        super().__init__()
        self.layer, self.change = nn.Linear(4, 4), change

    def forward(self, x):  # the forward
        return self.change(self, self.layer(x))


def _keep_number(model, h):
    model.last = h.sum().item()  # the write
    return h


def _draw(model, h):
    return h * random.random()


def _hook(module, gradients, outputs):  # the hook
    return None


def test_line_now_is_the_callers():
    assert line_now() == f"{HERE}:{_line_of('now')}"  # now


def test_line_of_a_definition():
    assert line_of_definition(_hook) == f"{HERE}:{_line_of('the hook')}, _hook"
    assert line_of_definition(Net(None).forward) == f"{HERE}:{_line_of('the forward')}, Net.forward"
    assert line_of_definition(nn.Linear.forward) is None and line_of_definition(len) is None


def test_line_of_an_error():
    try:
        torch.ones(2) @ torch.ones(3)  # the error
    except RuntimeError as error:
        assert f"{HERE}:{_line_of('the error')}: torch.ones(2)" in line_of_error(error)


@pytest.mark.parametrize("change, line", [(_keep_number, "the write"), (_draw, "the forward")])
def test_of_what_the_forward_does(change, line):
    with pytest.raises(autopar.AutoparError) as caught:
        autopar.plan(Net(change), "dp=2", (torch.ones(4, 4),))
    assert caught.value.source.startswith(f"{HERE}:{_line_of(line)}")


def test_of_a_hook():
    model = Net()
    model.layer.register_full_backward_hook(_hook)
    with pytest.raises(autopar.AutoparError) as caught:
        autopar.plan(model, "dp=2", (torch.ones(4, 4),))
    assert caught.value.source == f"{HERE}:{_line_of('the hook')}, _hook"


def test_of_bad_arguments():
    with pytest.raises(autopar.AutoparError) as caught:
        autopar.plan(Net(), "dp=2", ())  # the plan
    assert caught.value.source == f"{HERE}:{_line_of('the plan')}"


@pytest.mark.gloo
def test_of_a_call_and_of_its_backward():
    at_call, at_backward = gloo.run(1, _sources)[0]
    assert at_call == f"{HERE}:{_line_of('the call')}" and at_backward == f"{HERE}:{_line_of('the backward')}"


def _sources(rank: int) -> tuple[str | None, str | None]:
    model = autopar.compile(Net(), init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), (torch.ones(4, 4),))
    with pytest.raises(autopar.AutoparError) as call:
        model(torch.ones(0, 4))  # the call
    y = model(torch.ones(4, 4)).sum()
    with pytest.raises(autopar.AutoparError) as backward:
        y.backward(create_graph=True)  # the backward
    return call.value.source, backward.value.source
