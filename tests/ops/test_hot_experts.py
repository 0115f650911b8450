"""Ops of hot experts against what they say, one row and one expert at a time."""

from __future__ import annotations

from random import Random

import pytest
import torch

from autopar.ir.layout import chunk
from autopar.ops import autopar


@pytest.mark.parametrize("seed", range(20))
def test_devices_agree_on_what_goes_where(seed):
    """Rows of any numbers, of no expert too, as in a capacity of a model's own."""
    print(f"seed {seed}")
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    devices = random.choice([1, 2, 3, 4])
    experts = random.choice([n for n in range(devices, 12) if -(-n // devices) * (devices - 1) < n])
    rows, hot = random.choice([0, 1, 5, 40]), random.choice([1, 2, experts, experts + 3])
    blocks = [torch.randint(-1, experts + 1, (rows,), generator=generator) for _ in range(devices)]
    ranges = [chunk(experts, devices, i) for i in range(devices)]
    firsts = [start for start, _ in ranges[1:]]

    every = torch.cat(blocks)
    counts = torch.cat([autopar.expert_counts(block, experts) for block in blocks])
    found = autopar.hot_experts(counts, experts, hot).tolist()
    rank = sorted(range(experts), key=lambda e: (-int((every == e).sum()), e))
    assert found == rank[:hot]

    chosen = torch.tensor(found, dtype=torch.int64)
    routes = [autopar.route(block, experts, firsts, chosen, i) for i, block in enumerate(blocks)]
    known = [autopar.counts_beside_hot(counts, chosen, firsts, i) for i in range(devices)]
    for i, (start, stop) in enumerate(ranges):
        _, received, told = known[i]
        assert received.tolist() == [int(sent[i]) for sent, _, _ in known]
        parts = zip(blocks, routes, known)
        arrived = torch.cat([block[order].split(sent.tolist())[i] for block, (order, _), (sent, _, _) in parts])
        told_of = autopar.groups_received(told, torch.stack([received, received]), -1, 0, torch.int64)
        assert torch.equal(told_of, arrived)
        starts = [rows * j for j in range(1, devices)]
        picked = autopar.own_rows(every, experts, firsts, starts, i, 1, chosen)
        assert torch.equal(every[picked], arrived)
        slots = autopar.slots_of(arrived, chosen, experts, start, stop - start).tolist()
        for expert, slot in zip(arrived.tolist(), slots):
            if expert in found:
                assert slot == stop + found.index(expert)
            elif start <= expert < stop:
                assert slot == expert
            else:
                assert slot < start  # without a matrix here


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_copies_and_their_gradients(dtype):
    """Shares of all devices add up to the matrices, and gradients go to the experts that are a device's own."""
    weight, hot = torch.randn(6, 3, 2, dtype=dtype), torch.tensor([4, 0, 3])
    shares = [autopar.copies_of(weight[start : start + 2], hot, start) for start in (0, 2, 4)]
    assert torch.equal(sum(shares), weight[hot])
    summed = torch.randn(3, 3, 2, dtype=torch.promote_types(dtype, torch.float32))
    for start in (0, 2, 4):
        dw = torch.randn(2 + 3, 3, 2, dtype=dtype)
        wanted = dw[:2].clone()
        for copy, expert in zip(summed, hot.tolist()):
            if start <= expert < start + 2:
                wanted[expert - start] += copy.to(dtype)
        assert torch.equal(autopar.added_to_owners(dw, summed, hot, start), wanted)


def test_infinite_matrices_stay_with_their_experts():
    weight = torch.full((2, 2, 2), float("inf"))
    assert torch.equal(autopar.copies_of(weight, torch.tensor([5]), 0), torch.zeros(1, 2, 2))
    made = autopar.added_to_owners(torch.zeros(3, 2, 2), weight[:1], torch.tensor([5]), 0)
    assert torch.equal(made, torch.zeros(2, 2, 2))
