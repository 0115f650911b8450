"""Tests of ranks that meet at a store: who has come, who is missing, and how much is asked to find out."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest
import torch.distributed as dist

from autopar.processes import meeting
from autopar.processes.meeting import BLOCK, Meeting


class _Counted:
    """A store of one process that counts what is asked of it."""

    def __init__(self):
        self.store, self.asked = dist.HashStore(), 0

    def __getattr__(self, name: str):
        self.asked += 1
        return getattr(self.store, name)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        if not self.store.check(keys):
            raise RuntimeError("wait timeout")


@pytest.fixture
def come(monkeypatch):
    """Return a function that lets a rank come to a meeting of some, and the store."""
    store = _Counted()
    monkeypatch.setattr(meeting._torch, "default_store", lambda: store)

    def come(rank: int, ranks) -> Meeting:
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        return Meeting("key", ranks)

    return come, store


@pytest.mark.parametrize("count", [1, 2, 3, BLOCK, BLOCK + 1, 5 * BLOCK - 1])
def test_who_is_missing(count, come):
    """In any order of coming and leaving, of ranks that are not numbered from zero."""
    come, _ = come
    rng = random.Random(count)
    ranks = tuple(sorted(rng.sample(range(10 * count), count)))
    order, here = rng.sample(ranks, count), {}
    for number, rank in enumerate(order):
        here[rank] = come(rank, ranks)
        if rng.random() < 0.2 and number < count - 1:  # who was the last lets all go on
            here.pop(rank).leave()
            here[rank] = come(rank, ranks)
        away = sorted({*ranks} - {*here})
        if number % 50 == 0 or len(away) < 3:
            found = here[rank].missing()
            assert found == away[: len(found)] and (found == away or len(found) >= BLOCK), (found, away)
            assert here[rank].is_complete(0) == (not away)


def test_one_of_thousands_is_found_by_a_few_questions(come):
    come, store = come
    ranks = range(16 * BLOCK)
    last = [come(rank, ranks) for rank in ranks if rank != 777][-1]
    before = store.asked
    assert last.missing() == [777]
    assert store.asked - before < 40
    come(777, ranks)
    assert last.missing() == [] and last.is_complete(0)
