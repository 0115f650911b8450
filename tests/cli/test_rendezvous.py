"""Ranks that torchrun starts again meet in a corner of the store of their own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from autopar.cli import rendezvous
from autopar.errors import AutoparError, CollectiveTimeout


@pytest.fixture
def store(monkeypatch):
    """A store that each rank is a client of."""
    found = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def client(url: str, rank: int, world: int):
        return iter([(dist.TCPStore("127.0.0.1", found.port, timeout=timedelta(seconds=8)), rank, world)])

    monkeypatch.setattr(dist, "rendezvous", client)
    return found


def test_without_restarts_it_is_the_store(store, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS", raising=False)
    store.set("here", "")
    assert rendezvous.store_of("env://", 0, 4).check(["here"])


def test_every_start_has_another_corner(store, monkeypatch):
    """Also after one that not all ranks came to, and with other numbers of ranks."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    store.set("rank 0 is at", "an address of the past")
    for rank in (1, 3):  # of a start whose rank 0 never came
        store.set(f"autopar/asks/{rank}", f"the word of a former rank {rank}")
    seen = set()
    for world in (4, 2, 4):
        with ThreadPoolExecutor(world) as pool:
            stores = [*pool.map(lambda rank: rendezvous.store_of("env://", rank, world), range(world))]  # noqa: B023
        assert not any(one.check(["rank 0 is at"]) for one in stores)
        stores[0].set("name", str(len(seen)))
        assert {one.get("name") for one in stores} == {str(len(seen)).encode()}
        seen.add(stores[0].get("name"))
    assert len(seen) == 3


def test_who_does_not_come_is_named(store, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setattr(rendezvous, "MOST_SECONDS", 0.1)
    with pytest.raises(CollectiveTimeout, match="ranks 1, 2 did not come"):
        rendezvous.store_of("env://", 0, 3)


@pytest.mark.skipif(dist.is_initialized(), reason="the tests' own group")
def test_a_network_that_is_none_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(AutoparError, match="rank 0 cannot reach the other processes") as caught:
        rendezvous.join("gloo", f"file://{tmp_path}/store", 0, 1)
    assert "GLOO_SOCKET_IFNAME" in caught.value.fix and not dist.is_initialized()
