"""The Python state of a model that its forward reads and writes, watched while it is traced.

A trace is right only for the Python values that it saw: a temperature, a dropout's p, an entry of a config, a training
flag. Inside `Watch.run` the classes of the model's modules, and of the objects that the forward finds in their
attributes, tell what is read and what is set. Afterwards the model is as it was before, so that tracing a call is not a
call.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from .._torch.seeds import seeding
from ..errors import CaptureError
from . import lasting
from .names import Variable
from .reads import CACHES, MODULE_ATTRIBUTES, Read, Reads, identity, is_in_tables, own
from .snapshot import MISSING, PLAIN, is_container, text
from .user_lines import line_now


@dataclass(frozen=True)
class Write:
    """An attribute, or a buffer, that the forward set, with what was there before, and the line that set it."""

    owner: object
    name: str
    before: object
    path: str
    source: str | None = None

    def now(self) -> object:
        """Return the value that is there now."""
        buffers = own(self.owner, "_buffers") if isinstance(self.owner, nn.Module) else {}
        return buffers[self.name] if self.name in buffers else own(self.owner, self.name)

    def undo(self) -> None:
        """Put back what was there before."""
        if self.before is MISSING:
            vars(self.owner).pop(self.name, None)
        else:
            vars(self.owner)[self.name] = self.before


class Watch:
    """Reads and writes of one run of a model's forward; of the last one, if there were several. `unwatched`: containers
    of the model's parameters, which are other ones while it is traced."""

    def __init__(self, model: nn.Module, loss_fn: Callable | None = None, unwatched: Iterable[object] = ()):
        self.model = model
        self.seen = Reads(model, loss_fn, unwatched, self._patch)
        self.writes: dict[tuple[int, str], Write] = {}
        self._patched: dict[type, dict[str, object]] = {}

    @property
    def reads(self) -> dict[tuple[int, str], Read]:
        """Return what was read, by the object and the name in it."""
        return self.seen.found

    @contextmanager
    def installed(self) -> Iterator[Watch]:
        """Inside, the classes of the model's objects tell of reads and writes. Afterwards modules have the lists and
        dicts that they had: torch.export leaves copies of them."""
        held = [
            (vars(m), name, value)
            for m in self.model.modules()
            for name, value in vars(m).items()
            if is_container(value) and name not in MODULE_ATTRIBUTES
        ]
        try:
            yield self
        finally:
            for own, name, value in held:
                own[name] = value
            for cls, before in reversed(self._patched.items()):
                for name, value in before.items():
                    if value is MISSING:
                        delattr(cls, name)
                    else:
                        setattr(cls, name, value)
            self._patched.clear()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Watch one run of the forward. Raises CaptureError for what it changes and a graph cannot."""
        self.writes.clear()
        generators = _random_states()
        self.seen.begin()
        self.seen.is_running = True
        try:
            yield
        finally:
            self.seen.is_running = False
        self._check_random(generators)

    def refilled(self) -> list[Read]:
        """Return the reads of lists, dicts and sets that hold other elements than before the run."""
        return [r for r in self.reads.values() if r.before.items is not None and not r.before.is_now(r.before.value)]

    def changed(self) -> list[Write]:
        """Return the attributes that have another value than before the run. Raises CaptureError for globals that the
        forward set."""
        for read in self.reads.values():
            if (id(read.owner), read.name) in self.writes or is_container(read.before.value):
                continue
            if isinstance(read.owner, nn.Module) and is_in_tables(read.owner, read.name):
                continue  # a buffer that was registered or filled, see TensorTables
            if not read.before.is_now(read.now()):
                raise CaptureError(
                    f"the forward changes {read.path} from {text(read.before.value)} to {text(read.now())}",
                    source=read.source,
                    fix="keep what changes in a buffer (register_buffer) or an attribute of the module",
                )
        writes = [w for w in self.writes.values() if not (w.name in CACHES and isinstance(w.owner, nn.RNNBase))]
        return [write for write in writes if not _is_same(write.before, write.now())]

    def undo(self) -> None:
        """Give everything that was written or changed in place its value from before the run."""
        for write in self.writes.values():
            write.undo()
        for read in self.reads.values():
            if isinstance(read.owner, (Variable, type)) and read.now() is not read.before.value:
                read.put(read.before.value)
            if not read.before.is_now(read.before.value):
                read.before.restore()

    def _check_random(self, before: Mapping[str, tuple[object, Callable[..., object]]]) -> None:
        for name, (state, restore) in before.items():
            if not _equal(_random_states()[name][0], state):
                restore(state)
                raise CaptureError(
                    f"the forward draws random numbers from {name}, which a graph would draw once and for all",
                    fix="draw with torch (torch.rand, F.dropout), or outside of the model and pass the number to it",
                )

    def _patch(self, cls: type) -> None:
        if cls in self._patched:
            return
        read, write, remove = cls.__getattribute__, cls.__setattr__, cls.__delattr__
        before = {name: vars(cls).get(name, MISSING) for name in ("__getattribute__", "__setattr__", "__delattr__")}

        def watched_read(owner, name: str):
            if not self.seen.know(owner):
                return read(owner, name)
            try:
                value = read(owner, name)
            except AttributeError:
                self._read(owner, name, MISSING)
                raise
            self._read(owner, name, value)
            return value

        def watched_write(owner, name: str, value) -> None:
            is_known = self.seen.know(owner)
            old = own(owner, name) if is_known else None
            write(owner, name, value)
            if is_known and own(owner, name) is not MISSING:
                self._wrote(owner, name, old)

        def watched_removal(owner, name: str) -> None:
            is_known = self.seen.know(owner)
            old = own(owner, name) if is_known else None
            remove(owner, name)
            if is_known and old is not MISSING:
                self._wrote(owner, name, old)

        try:
            cls.__getattribute__, cls.__setattr__, cls.__delattr__ = watched_read, watched_write, watched_removal
        except TypeError:  # a class that does not let itself be changed
            return
        self._patched[cls] = before

    def _read(self, owner: object, name: str, value: object) -> None:
        known, _, _ = self.seen.known[identity(owner)]
        if (id(known), name) not in self.writes:
            self.seen.read(owner, name, value)

    def _wrote(self, owner: object, name: str, old: object) -> None:
        owner, path, _ = self.seen.known[identity(owner)]
        if name != lasting.INSTALLED:
            self.writes.setdefault((id(owner), name), Write(owner, name, old, f"{path}.{name}", line_now()))


def _is_same(before: object, now: object) -> bool:
    return before is now or (type(before) is type(now) and isinstance(now, PLAIN) and before == now)


def _random_states() -> dict[str, tuple[object, Callable]]:
    """Return the state of the generators outside of torch, and since when torch's has its seed, each with what sets
    it."""
    import numpy

    return {
        "Python's random": (random.getstate(), random.setstate),
        "numpy.random": (numpy.random.get_state(legacy=False), numpy.random.set_state),
        "torch.manual_seed": (seeding(), lambda _, state=torch.get_rng_state(): torch.set_rng_state(state)),
    }


def _equal(a: object, b: object) -> bool:
    return repr(a) == repr(b) if isinstance(a, dict) else a == b
