"""Bytes of live tensors while a program runs: every storage once, from the op that makes it until it is freed.

    with Allocations() as seen:
        ...
    seen.peak_bytes, seen.at_peak          # {"parameters": 4096, "values between ops": 512}

What is seen is what ops take and return, on this thread and in the backward that it runs. What a kernel allocates for
itself and frees before it returns is not, nor what a communication library keeps. Tensors that are there before are
told by `hold`, or met when an op first reads them. A kind may be given to a storage after it was freed, by a mark that
was set while it lived. Copies of values that wait on the host count apart, as if the device had memory of its own.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch.distributed.tensor import DTensor

from .._torch import TorchDispatchMode, local_of, storage_key, tree_flatten

TRANSIENT, BUCKETS = "values between ops", "collective buffers"
ON_HOST = "autopar::on_host"  # the op that gives copies in the host's memory


@dataclass(eq=False)
class Storage:
    """The memory of one or more tensors. `maker`: the op that returned it first, "" if it was there before."""

    bytes_: int
    kind: str
    maker: str = ""
    shape: tuple[int, ...] = field(default=())


class Allocations(TorchDispatchMode):
    """A context. `changes` are storages with +1 as they come, -1 as they go, in order; `host_changes` those of copies
    of values that wait on the host."""

    def __init__(self):
        super().__init__()
        self.changes: list[tuple[Storage, int]] = []
        self.host_changes: list[tuple[Storage, int]] = []
        self._alive: dict[int, Storage] = {}
        self._left_out: set[int] = set()
        self._on_host: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it calls ops on its local tensors, which come by here in turn
        self._track(tree_flatten((args, kwargs))[0], TRANSIENT, "")
        results = func(*args, **kwargs or {})
        if func.name() == ON_HOST:
            self._on_host.add(storage_key(results))
        self._track(tree_flatten(results)[0], BUCKETS if "c10d" in func.namespace else TRANSIENT, str(func))
        return results

    def hold(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Give these tensors a kind, for all their life."""
        tensors = list(tensors)
        self._track(tensors, kind, "")
        for tensor in tensors:
            self._alive[storage_key(_local(tensor))].kind = kind

    def hold_state(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Hold parameters, buffers and what the optimizer keeps, each under a kind of their own."""
        self.hold("parameters", module.parameters())
        self.hold("buffers", module.buffers())
        states = (x for state in optimizer.state.values() for x in state.values())
        self.hold("optimizer", [x for x in states if isinstance(x, torch.Tensor)])

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave these tensors out of the count."""
        self._left_out |= {storage_key(_local(tensor)) for tensor in tensors}

    def hold_rest(self, kind: str, old: str = TRANSIENT) -> None:
        """Give what is alive and still of the kind `old` another one, for all its life."""
        for storage in self._alive.values():
            if storage.kind == old:
                storage.kind = kind

    def _track(self, values: Iterable, kind: str, maker: str) -> None:
        for value in values:
            if not isinstance(value, torch.Tensor):
                continue
            memory = _local(value).untyped_storage()
            key = storage_key(_local(value))
            if memory.device.type == "meta" or key in self._alive or key in self._left_out:
                continue
            storage = self._alive[key] = Storage(memory.nbytes(), kind, maker, tuple(value.shape))
            (self.host_changes if key in self._on_host else self.changes).append((storage, 1))
            weakref.finalize(memory, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        changes = self.host_changes if key in self._on_host else self.changes
        changes.append((self._alive.pop(key), -1))
        self._on_host.discard(key)

    @property
    def total(self) -> list[int]:
        """Return the bytes alive after each change."""
        return list(accumulate(sign * storage.bytes_ for storage, sign in self.changes))

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes that were alive at once."""
        return max(self.total, default=0)

    @property
    def host_peak_bytes(self) -> int:
        """Return the most bytes of copies on the host that were alive at once."""
        return max(accumulate(sign * storage.bytes_ for storage, sign in self.host_changes), default=0)

    def storages_at_peak(self) -> list[Storage]:
        """Return what was alive when most was, the largest first."""
        total = self.total
        alive: dict[Storage, None] = {}
        for storage, sign in self.changes[: total.index(max(total)) + 1] if total else ():
            if sign > 0:
                alive[storage] = None
            else:
                del alive[storage]
        return sorted(alive, key=lambda s: -s.bytes_)

    @property
    def at_peak(self) -> dict[str, int]:
        """Return the bytes alive when most was, by kind."""
        found: Counter[str] = Counter()
        for storage in self.storages_at_peak():
            found[storage.kind] += storage.bytes_
        return dict(found)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor
