"""The random state: what a forward takes, and how it goes on."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime.random_state import RandomState


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
