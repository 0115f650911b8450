"""A line to every other rank besides the process groups, open when those are broken.

Each process listens on a port of its own, on a thread that sleeps until somebody asks, so that nothing is sent while
all goes well. Messages are one line of JSON each way. A rank that refuses the connection is gone; one that takes it, as
its operating system does, and says nothing is stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from . import process_groups
from .machines import LOOPBACK, Machine, numbered

GONE, SILENT = "gone", "silent"  # instead of an answer
LONGEST_BYTES = 1 << 16


class Peers:
    """All ranks of the world. Making one is collective: addresses are exchanged, and a word that only these processes
    know. `machines`: by rank, the number of its machine.

    `answer`: what this rank says to a message, both plain data; it is called on the listening thread."""

    def __init__(self, answer: Callable[[dict], dict]):
        self.rank, self.answer = dist.get_rank(), answer
        everyone_is_on = _gather(Machine.of_this_process())
        self.machines = numbered(everyone_is_on)
        is_one = not any(self.machines)
        self.listener = socket.create_server((LOOPBACK, 0), backlog=128) if is_one else _for_all_machines()
        address = LOOPBACK if is_one else everyone_is_on[self.rank].address, self.listener.getsockname()[1]
        everyone = _gather((address, secrets.token_hex(16)))
        self.addresses, self.word = [address for address, _ in everyone], everyone[0][1]
        os.register_at_fork(after_in_child=self.close)  # a child that lives on would answer for a dead process
        threading.Thread(target=self._listen, name="autopar peers", daemon=True).start()

    def ask(self, message: dict, seconds: float = 1.0) -> dict[int, dict | str]:
        """Ask all other ranks at once and return their answers: plain data, GONE or SILENT."""
        others = [rank for rank in range(len(self.addresses)) if rank != self.rank]
        line = json.dumps(message | {"word": self.word}).encode() + b"\n"
        with ThreadPoolExecutor(min(32, len(others))) as pool:
            return dict(zip(others, pool.map(lambda rank: _exchange(self.addresses[rank], line, seconds), others)))

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
        with socket.create_connection(address, timeout=seconds) as connection:
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
    dist.all_gather_object(everyone, value, group=process_groups.control_group())
    return everyone
