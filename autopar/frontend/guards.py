"""The Python state that a capture holds for, checked before every call that it serves.

Most values are the same objects as when they were read, which one pass in C finds out. A value that is another object
may still be an equal number or text. Anything else that changed makes the call another one, which is captured anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import replace
from itertools import repeat
from operator import is_

from torch import Tensor

from .._torch import storage_key
from .names import Variable
from .reads import Read, Reads
from .snapshot import MISSING, PLAIN, Snapshot, is_container, text
from .watch import Watch


class Guards:
    """The attributes, globals and containers that a capture read, as they were then. `seen`: how it got there; `used`:
    the memories of tensors whose values its graph has."""

    def __init__(self, reads: Iterable[Read] = (), seen: Reads | None = None, used: Set[int] = frozenset()):
        self.reads, self.seen, self.used = list(reads), seen, used
        simple = [r for r in self.reads if not isinstance(r.before.value, Tensor) and not is_container(r.before.value)]
        self._attributes = [r for r in simple if not isinstance(r.owner, Variable)]
        served = {id(r) for r in self._attributes}
        self._others = [r for r in self.reads if id(r) not in served]
        self._owners, self._names = [r.owner for r in self._attributes], [r.name for r in self._attributes]
        self._values = [r.before.value for r in self._attributes]

    @staticmethod
    def of(watch: Watch, constants: Iterable[Tensor]) -> Guards:
        """Return what the last run under a watch read; `constants` are the tensors whose values its graph has."""
        return Guards.using(watch, {storage_key(tensor) for tensor in constants})

    @staticmethod
    def using(watch: Watch, used: Set[int]) -> Guards:
        """Return what the last run under a watch read, for a graph that has the values of the memories `used`."""
        for read in watch.reads.values():
            read.before.forget_values(used)
        return Guards(watch.reads.values(), watch.seen, used)

    def copied(self, memo: Mapping[int, object]) -> Guards:
        """Return the same guards for a deep copy of the model; `memo` has the copies by the ids of their originals."""
        copied = [replace(r, owner=memo.get(id(r.owner), r.owner), before=r.before.copied(memo)) for r in self.reads]
        return Guards(old if isinstance(old.owner, Variable) else new for old, new in zip(self.reads, copied))

    def hold(self) -> bool:
        """Return whether everything is as it was."""
        if (
            not all(map(is_, map(getattr, self._owners, self._names, repeat(MISSING)), self._values))
            and not self._are_equal()
        ):
            return False
        return all(r.before.is_now(r.now()) for r in self._others)

    def _are_equal(self) -> bool:
        for at, read in enumerate(self._attributes):
            now = read.now()
            if now is self._values[at]:
                continue
            if type(now) is not type(read.before.value) or not isinstance(now, PLAIN) or now != read.before.value:
                return False
            self._values[at] = now  # equal, and looked at faster from here on
        return True

    def changed(self) -> list[tuple[Read, str]]:
        """Return what is not as it was, each with a text: `model.temperature 1.0 -> 2.0`."""
        return [
            (r, f"{r.path} {text(r.before.value)} -> {text(r.now())}")
            for r in self.reads
            if not r.before.is_now(r.now())
        ]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, attributes and globals have the values that the capture read."""
        later = [(r, r.now(), Snapshot(r.now())) for r in self.reads if not r.before.is_now(r.now())]
        try:
            for read, _, _ in later:
                read.put(read.before.value)
                read.before.restore()
            yield
        finally:
            for read, value, content in later:
                read.put(value)
                content.restore()
