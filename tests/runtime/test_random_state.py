"""The random state: what a forward takes, and how it goes on."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import CollectiveTimeout
from autopar.runtime.random_state import RandomState
from tests.helpers import gloo

from .parity import device_mesh


def test_offsets_count_forwards():
    state = RandomState(7)
    assert [state.next().tolist() for _ in range(3)] == [[7, 0], [7, 1], [7, 2]]
    assert (state.seed, state.offset) == (7, 3)
    state.seed, state.offset = 11, 40
    assert state.next().tolist() == [11, 40]


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 2**63, 2**64 - 1])
def test_any_seed_is_64_bits(seed):
    value = RandomState(seed).next()
    assert value.dtype == torch.int64 and value[0].item() % 2**64 == seed % 2**64


def test_the_generator_of_torch_is_left_alone():
    before = torch.get_rng_state()
    RandomState(3).next()
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_are_noticed_and_states_that_leave_none_are_not():
    state = RandomState(3)
    torch.rand(700)
    torch.set_rng_state(torch.get_rng_state().clone())
    with torch.random.fork_rng():
        torch.manual_seed(torch.initial_seed())
        assert state.is_seeded
    assert not state.is_seeded
    for seed in (lambda: torch.manual_seed(1), torch.seed, lambda: torch.set_rng_state(torch.Generator().get_state())):
        seed()
        assert state.is_seeded
        state.seed = 5  # a later word
        assert not state.is_seeded
    before = torch.get_rng_state()
    state.next()
    torch.set_rng_state(before)
    assert state.is_seeded


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 2))

    def forward(self, x):
        return self.layer(x).square().mean()


def _reseeded(rank: int, mesh: str) -> list[float]:
    """Losses after seeds that differ between ranks; the last of two equal ones, of which a copy made the second."""
    x = torch.ones(4, 64)
    torch.manual_seed(0)
    model = autopar.compile(Dropped(), device_mesh(mesh), (x,), outputs="everywhere")

    def losses(seed: int) -> list[float]:
        torch.manual_seed(seed + rank)
        torch.rand(rank)  # what ranks draw of their own does not tell them apart
        return [model(x).item() for _ in range(2)]

    first, other, again = losses(1), losses(7), losses(1)
    assert first == again and len({*first, *other}) == 4
    if "pp" not in mesh:
        torch.manual_seed(7 + rank)
        model = copy.deepcopy(model)
        first.append(model(x).item())
        assert first[-1] == other[0]
    if rank == 1:
        torch.manual_seed(5)
        os.environ["AUTOPAR_TIMEOUT_S"] = "0.5"
        with pytest.raises(CollectiveTimeout, match="torch seeded anew(.|\n)*torch.manual_seed on every rank"):
            model(x)
    return first


@pytest.mark.gloo
@pytest.mark.parametrize("mesh", ["dp=2", pytest.param("pp=2", marks=pytest.mark.slow)])
def test_a_seed_of_the_user_restarts_all_ranks(mesh):
    first, second = gloo.run(2, _reseeded, mesh)
    assert first == second
