"""A line to every other rank besides the process groups, open when those are broken.

Each process listens on a port of its own, on a thread that sleeps until somebody asks, so that nothing is sent while
all goes well. Messages are one line of JSON each way. A rank that refuses the connection is gone; one that takes it, as
its operating system does, and says nothing is stopped; one to which there is no way is cut off. That holds of ranks
that could be asked at the start: of others an answer that is missing says nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import secrets
import socket
import threading
import warnings
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch.distributed as dist

from . import last_words, process_groups
from .machines import LOOPBACK, Machine, cores_per_rank, numbered

GONE, SILENT, CUT_OFF, UNKNOWN = "gone", "silent", "cut off", "unknown"  # instead of an answer
LONGEST_BYTES = 1 << 16
MOST_AT_ONCE = 64  # ranks that one asks: where thousands wait for one, it would answer none of them in time
START_SECONDS = 10.0  # for the first answer, of a process that is busy
_random = random.SystemRandom()  # the program's own numbers stay as they are


class Peers:
    """All ranks of the world. Making one is collective: addresses are exchanged, and a word that only these processes
    know. `machines`: by rank, the number of its machine; `cores_per_rank`: the cores of a rank where they are fewest,
    one at most.

    `answer`: what this rank says to a message, both plain data; it is called on the listening thread."""

    def __init__(self, answer: Callable[[dict], dict]):
        self.rank, self.answer = dist.get_rank(), answer
        everyone_is_on = _gather(Machine.of_this_process())
        self.machines, self.cores_per_rank = numbered(everyone_is_on), cores_per_rank(everyone_is_on)
        is_one = not any(self.machines)
        self.listener = socket.create_server((LOOPBACK, 0), backlog=128) if is_one else _for_all_machines()
        address = LOOPBACK if is_one else everyone_is_on[self.rank].address, self.listener.getsockname()[1]
        everyone = _gather((address, secrets.token_hex(16)))
        self.addresses, self.word, self.world = [address for address, _ in everyone], everyone[0][1], len(everyone)
        self.run = hashlib.sha256(self.word.encode()).hexdigest()[:8]  # one name on all ranks, and no secret
        os.register_at_fork(after_in_child=self.close)  # a child that lives on would answer for a dead process
        listen = last_words.signed(self._listen, self.rank, self.world, self.run)
        threading.Thread(target=listen, name="autopar peers", daemon=True).start()
        self.unheard = self._try_ways()

    def ask(self, message: dict, ranks: Collection[int], seconds: float = 1.0) -> dict[int, dict | str]:
        """Ask some ranks at once, MOST_AT_ONCE of them at random if there are more, and return the others' answers:
        plain data, GONE, SILENT, CUT_OFF or UNKNOWN."""
        others = [rank for rank in ranks if rank != self.rank]
        others = _random.sample(others, min(len(others), MOST_AT_ONCE))  # in another order on each rank
        line = json.dumps(message | {"word": self.word}).encode() + b"\n"
        with ThreadPoolExecutor(32) as pool:
            answers = pool.map(lambda rank: _exchange(self.addresses[rank], line, seconds), others)
            return {rank: self._known(rank, answer) for rank, answer in zip(others, answers)}

    def _known(self, rank: int, answer: dict | str) -> dict | str:
        """Return an answer, UNKNOWN where its lack says nothing: a machine is never cut off from itself."""
        is_own = self.machines[rank] == self.machines[self.rank]
        says_nothing = rank in self.unheard or (answer == CUT_OFF and is_own)
        return UNKNOWN if isinstance(answer, str) and says_nothing else answer

    def _try_ways(self) -> frozenset[int]:
        """Return the ranks that cannot be asked, of which rank 0 warns. Each rank asks one, on another machine if there
        is one. Collective."""
        self.unheard = frozenset[int]()
        world, here = self.world, self.machines.count(self.machines[self.rank])
        other = (self.rank + (here if here < world else 1)) % world
        answer = self.ask({}, [other], START_SECONDS)[other]
        unheard = sorted({rank for rank in _gather(None if isinstance(answer, dict) else other) if rank is not None})
        if unheard and self.rank == 0:
            warnings.warn(
                f"ranks {', '.join(map(str, unheard))} cannot be asked where they are, at "
                f"{self.addresses[unheard[0]]}: what is said when a rank fails will be less exact; let processes of "
                "all machines connect to each other",
                stacklevel=2,
            )
        return frozenset(unheard)

    def close(self) -> None:
        """Close the port on which this process listens."""
        self.listener.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError, ValueError, AttributeError):
                connection.settimeout(1.0)
                message = json.loads(_read_line(connection))
                if message.get("word") == self.word:
                    connection.sendall(json.dumps(self.answer(message)).encode() + b"\n")


def _for_all_machines() -> socket.socket:
    """Return a listener on all addresses of this machine."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
    return socket.create_server(("", 0), backlog=128)


def _exchange(address: tuple[str, int], line: bytes, seconds: float) -> dict | str:
    try:
        connection = socket.create_connection(address, timeout=seconds)
    except ConnectionError:
        return GONE
    except OSError:  # no answer, no way, no such name
        return CUT_OFF
    try:
        with connection:
            connection.sendall(line)
            answer = _read_line(connection)
        return json.loads(answer) if answer else GONE
    except ConnectionError:
        return GONE
    except (OSError, ValueError):
        return SILENT


def _read_line(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as stream:
        return stream.readline(LONGEST_BYTES)


def _gather(value: object) -> list:
    everyone: list = [None] * dist.get_world_size()
    gather = partial(dist.all_gather_object, everyone, value, group=process_groups.control_group())
    process_groups.all_or_broken("the exchange of addresses", gather)
    return everyone
