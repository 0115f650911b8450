"""Rank 0 traces for all, and a rank whose Python is another one traces for itself."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.api import call_compiler
from autopar.errors import DesyncError
from tests.helpers import gloo

from . import tiny
from .parity import assert_close, assert_same_gradients, device_mesh


class Counted:
    """Counts what this process traces."""

    def __init__(self):
        self.count, self.trace = 0, call_compiler.trace
        call_compiler.trace = self

    def __call__(self, *args, **kwargs):
        self.count += 1
        return self.trace(*args, **kwargs)


class Ranked(nn.Module):
    """Has an attribute that is another one on every rank: one that counts for nothing, or scales."""

    def __init__(self, attribute: int, scales: bool):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.attribute, self.scales = nn.Linear(6, 6), attribute, scales

    def forward(self, x):
        y = self.up(x) if self.attribute >= 0 else x
        return y * self.attribute if self.scales else y


ONE_LAYER = {"gpt2": "n_layer", "llama": "num_hidden_layers"}


def _trained(rank, name):
    source, inputs = getattr(tiny, name)(**{ONE_LAYER[name]: 1})
    traced, reference = Counted(), copy.deepcopy(source)
    parallel = autopar.compile(source, device_mesh("dp=2"), inputs)
    other = {key: value[:2, :7] for key, value in inputs.items()}
    for batch in (inputs, other, inputs):
        mine, whole = parallel(**batch), reference(**batch)
        assert_close(mine.loss, whole.loss)
        mine.loss.backward()
        whole.loss.backward()
        assert_same_gradients(parallel, reference)
    source.eval(), reference.eval()
    with torch.no_grad():
        assert_close(parallel(**inputs).logits, reference(**inputs).logits)
    return traced.count


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("name", ONE_LAYER)
def test_one_rank_traces(name):
    assert gloo.run(2, _trained, name) == [3, 0]


def _ranked(rank, scales):
    traced = Counted()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    source = Ranked(rank + 1, scales)
    reference = copy.deepcopy(source)
    parallel = autopar.compile(source, device_mesh("dp=2"), (x,))
    assert_close(parallel(x), reference(x))
    return traced.count


@pytest.mark.gloo
def test_a_rank_with_other_attributes_traces_for_itself():
    assert gloo.run(2, _ranked, False) == [1, 1]


def _refused(rank):
    with pytest.raises(DesyncError, match="traced another graph"):
        _ranked(rank, True)


@pytest.mark.gloo
def test_ranks_that_compute_different_things_are_refused():
    gloo.run(2, _refused)


class Asks(nn.Module):
    def forward(self, x):
        return x * (dist.get_rank() + 1)


def _asks(rank):
    with pytest.raises(DesyncError, match="traced another graph"):
        autopar.compile(Asks(), device_mesh("dp=2"), (torch.randn(4, 6, requires_grad=True),))


@pytest.mark.gloo
def test_a_forward_that_asks_for_its_rank_is_traced_by_each():
    gloo.run(2, _asks)
