"""Two nodes on one machine, with a link that can be cut."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess


def has_namespaces() -> bool:
    """Return whether this process may make network namespaces, and has what connects them."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare"))):
        return False
    return subprocess.run(["unshare", "--net", "true"], capture_output=True, timeout=20).returncode == 0


class TwoNodes:
    """Holds two network namespaces with a link between, half of the `ranks` in each. Needs root and iproute2."""

    ADDRESSES = ("10.78.0.1", "10.78.0.2")

    def __init__(self, ranks: int):
        self.ranks, self.names = ranks, [f"autopar{os.getpid()}{letter}" for letter in "ab"]

    def __enter__(self) -> TwoNodes:
        a, b = self.names
        for name in self.names:
            self._ip("netns", "add", name)
            self._ip("-n", name, "link", "set", "lo", "up")
        self._ip("link", "add", "wan0", "netns", a, "type", "veth", "peer", "name", "wan0", "netns", b)
        for name, address in zip(self.names, self.ADDRESSES):
            self._ip("-n", name, "addr", "add", f"{address}/24", "dev", "wan0")
        self.link("up")
        return self

    def __exit__(self, *error) -> None:
        for name in self.names:
            self._ip("netns", "del", name)

    def link(self, state: str) -> None:
        """Cut the link, "down", or mend it, "up"."""
        for name in self.names:
            self._ip("-n", name, "link", "set", "wan0", state)

    def enter(self, rank: int, life: int) -> str:
        """Move this process to the node of its rank, and return where ranks meet."""
        with open(f"/var/run/netns/{self.names[rank // (self.ranks // 2)]}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")
        os.environ |= {"GLOO_SOCKET_IFNAME": "wan0", "MASTER_ADDR": self.ADDRESSES[0]}
        return f"tcp://{self.ADDRESSES[0]}:{20000 + life % 10000}"

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, timeout=20)
