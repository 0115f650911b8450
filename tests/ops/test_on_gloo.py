"""Tests of collectives as gloo does them fastest: the same as torch's own."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from autopar._torch import c10d
from autopar.ops import autopar
from tests.helpers import gloo

WORLD = 3
pytestmark = pytest.mark.gloo


def _compared(rank: int, seed: int) -> None:
    name, rng = dist.group.WORLD.group_name, random.Random(seed)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        rows = rng.randrange(1, 5)
        shards = [(torch.arange(rows * width).view(rows, width) + 100 * rank).to(dtype) for width in (1, 7, 64)]
        wanted = [c10d.wait_tensor(c10d.all_gather_into_tensor(x, WORLD, name)) for x in shards]
        for way in ("broadcasts", "sends"):
            gather = getattr(autopar, f"gather_by_{way}").default
            assert all(torch.equal(gather(x, WORLD, name), y) for x, y in zip(shards, wanted))
            whole = getattr(autopar, f"gather_bucket_by_{way}").default(shards, WORLD, name)
            assert all(map(torch.equal, whole, wanted))
    started = []
    for width in (1, 5, 300_000):  # several at once on one group, some of them without a row for somebody
        sent = [[rng.randrange(3) for _ in range(WORLD)] for _ in range(WORLD)]
        mine, theirs = sent[rank], [row[rank] for row in sent]
        x = torch.rand(sum(mine), width)
        wanted = c10d.wait_tensor(c10d.all_to_all_single(x, theirs, mine, name))
        started.append((autopar.exchange_by_sends(x, theirs, mine, name), wanted))
        autopar.gather_by_sends(x.new_full((2, 3), rank), WORLD, name)
    for found, wanted in reversed(started):
        assert torch.equal(c10d.wait_tensor(found), wanted)


@pytest.mark.parametrize("seed", [0])
def test_the_same_as_torchs(seed):
    print(f"seed {seed}")
    gloo.run(WORLD, _compared, seed)
