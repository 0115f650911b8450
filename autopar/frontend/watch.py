"""The Python state of a model that its forward reads and writes, watched while it is traced.

A trace is right only for the Python values that it saw: a temperature, a dropout's p, an entry of a config, a training
flag. Inside `Watch.run` the classes of the model's modules, and of the objects that the forward finds in their
attributes, tell what is read and what is set. Afterwards the model is as it was before, so that tracing a call is not a
call.
"""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from .._torch.seeds import seeding
from ..errors import CaptureError
from .moe_in_token_order import SETTINGS
from .names import Reach, Variable, called_by, is_library
from .snapshot import MISSING, PLAIN, Snapshot, is_container, text
from .user_lines import line_now

_HEAP_TYPE = 1 << 9  # a class that Python code made, whose attributes can be set
_UNWATCHED = (
    "logging.", "threading.", "pathlib.", "enum.", "re.", "weakref.", "collections.", "typing.", "abc.", "torch._",
    "torch.fx.", "torch.export.", "torch.utils.", "torch.distributed.", "autopar.",
)  # fmt: skip
_CACHES = ("_flat_weights", "_flat_weight_refs")  # of recurrent layers: made again when their parameters are others
_LASTING = ("_output_capturing_hooks_installed",)  # of transformers: the hooks that a first forward installs stay there
MODULE_ATTRIBUTES = frozenset(
    {*vars(nn.Module()), *dir(nn.Module)}
)  # of torch's own; flags and tables are compared elsewhere


@dataclass(frozen=True)
class Read:
    """An attribute of an object (or `variable` of a global) that the forward read, as it was then, and the line that
    read it."""

    owner: object
    name: str
    before: Snapshot
    path: str
    source: str | None = None

    def now(self) -> object:
        """Return the value that is there now."""
        if isinstance(self.owner, Variable):
            return self.owner.value(MISSING)
        return getattr(self.owner, self.name, MISSING)

    def put(self, value: object) -> None:
        """Set the attribute or global to a value, or delete the attribute (MISSING)."""
        if isinstance(self.owner, Variable):
            self.owner.clear() if value is MISSING else self.owner.set(value)
        elif value is MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


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
        buffers = _own(self.owner, "_buffers") if isinstance(self.owner, nn.Module) else {}
        return buffers[self.name] if self.name in buffers else _own(self.owner, self.name)

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
        self.model, self.loss_fn = model, loss_fn
        self._unwatched = {id(container) for container in unwatched}
        self.reads: dict[tuple[int, str], Read] = {}
        self.writes: dict[tuple[int, str], Write] = {}
        self._known: dict[int, tuple[object, str]] = {}
        self._is_running = False
        self._patched: dict[type, dict[str, object]] = {}

    @contextmanager
    def installed(self) -> Iterator[Watch]:
        """Inside, the classes of the model's objects tell of reads and writes. Afterwards modules have the lists and
        dicts that they had: torch.export leaves copies of them."""
        held = [(vars(m), name, value) for m in self.model.modules() for name, value in vars(m).items()
                if is_container(value) and name not in MODULE_ATTRIBUTES]  # fmt: skip
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
        self.reads.clear(), self.writes.clear(), self._known.clear()
        generators = _random_states()
        for name, module in self.model.named_modules():
            self._know(module, f"model.{name}" if name else "model")
        classes = {type(module): None for module in self.model.modules()}
        self.reach = Reach(classes)
        for cls in classes:  # of libraries too, whose forwards are what others replace
            self._note(cls, "forward", cls.forward, f"{cls.__name__}.forward")
        for function in called_by(self.model, self.loss_fn):
            self._follow(function)
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False
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
            if isinstance(read.owner, nn.Module) and _is_in_tables(read.owner, read.name):
                continue  # a buffer that was registered or filled, see TensorTables
            if not read.before.is_now(read.now()):
                raise CaptureError(
                    f"the forward changes {read.path} from {text(read.before.value)} to {text(read.now())}",
                    source=read.source,
                    fix="keep what changes in a buffer (register_buffer) or an attribute of the module",
                )
        writes = [w for w in self.writes.values() if not (w.name in _CACHES and isinstance(w.owner, nn.RNNBase))]
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

    def _know(self, value: object, path: str) -> None:
        """Watch an object from here on, if it is one whose attributes can be watched."""
        if isinstance(value, (*PLAIN, torch.Tensor)) or _identity(value) in self._known:
            return
        if isinstance(value, type):
            if not is_library(value.__module__):
                self._known[_identity(value)] = value, path
                for name, held in vars(value).items():
                    if not name.startswith("__") and (isinstance(held, PLAIN) or is_container(held)):
                        self._note(value, name, held, f"{path}.{name}")
            return
        if isinstance(value, (types.FunctionType, types.MethodType)):
            self._known[_identity(value)] = value, path
            self._follow(value)
            if isinstance(value, types.MethodType):
                self._know(value.__self__, path)
            return
        cls = type(value)
        if not _is_watchable(cls):
            if isinstance(value, types.SimpleNamespace):
                self._known[_identity(value)] = value, path
                for name, held in vars(value).items():
                    self._note(value, name, held, f"{path}.{name}")
            return
        self._known[_identity(value)] = value, path
        if cls not in self._patched:
            self._patch(cls)

    def _follow(self, function: object) -> None:
        for variable in self.reach.follow(function):
            self._note(variable, variable.key, variable.value(MISSING), variable.path)

    def _note(self, owner: object, name: str, value: object, path: str) -> None:
        if id(value) in self._unwatched or (name in _CACHES and isinstance(owner, nn.RNNBase)):
            return
        before = Snapshot(value)
        key = id(owner.table) if isinstance(owner, Variable) else id(owner), name
        self.reads[key] = Read(owner, name, before, path, line_now() if self._is_running else None)
        for item in before.objects():
            self._know(item, path)

    def _patch(self, cls: type) -> None:
        read, write, remove = cls.__getattribute__, cls.__setattr__, cls.__delattr__
        before = {name: vars(cls).get(name, MISSING) for name in ("__getattribute__", "__setattr__", "__delattr__")}

        def watched_read(owner, name: str):
            if not self._is_running or (known := self._known.get(_identity(owner))) is None:
                return read(owner, name)
            try:
                value = read(owner, name)
            except AttributeError:
                self._read(*known, name, MISSING)
                raise
            self._read(*known, name, value)
            return value

        def watched_write(owner, name: str, value) -> None:
            known = self._known.get(_identity(owner)) if self._is_running else None
            old = _own(owner, name) if known else None
            write(owner, name, value)
            if known and _own(owner, name) is not MISSING:
                self._wrote(*known, name, old)

        def watched_removal(owner, name: str) -> None:
            known = self._known.get(_identity(owner)) if self._is_running else None
            old = _own(owner, name) if known else None
            remove(owner, name)
            if known and old is not MISSING:
                self._wrote(*known, name, old)

        try:
            cls.__getattribute__, cls.__setattr__, cls.__delattr__ = watched_read, watched_write, watched_removal
        except TypeError:  # a class that does not let itself be changed
            return
        self._patched[cls] = before

    def _read(self, owner: object, path: str, name: str, value: object) -> None:
        key = id(owner), name
        if key in self.reads or key in self.writes or name.startswith("__") or name in (*SETTINGS, *_LASTING):
            return
        if isinstance(owner, nn.Module):
            if name in MODULE_ATTRIBUTES:
                return
            if _is_in_tables(owner, name):
                if nn.Module.__getattr__(owner, name) is not None:
                    return
                return self._note(owner, name, None, f"{path}.{name}")  # a buffer that is to be filled
        if value is not MISSING and _own(owner, name) is MISSING and _is_computed(type(owner), name):
            if isinstance(value, types.MethodType) and hasattr(owner, "__dict__"):  # which the object may get itself
                self._note(Variable(vars(owner), name, f"{path}.{name}"), name, MISSING, f"{path}.{name}")
                if not is_library(type(owner).__module__) and isinstance(
                    vars(type(owner)).get(name), types.FunctionType
                ):
                    self._note(type(owner), name, vars(type(owner))[name], f"{type(owner).__name__}.{name}")
            return
        self._note(owner, name, value, f"{path}.{name}")

    def _wrote(self, owner: object, path: str, name: str, old: object) -> None:
        if name in _LASTING:
            return
        self.writes.setdefault((id(owner), name), Write(owner, name, old, f"{path}.{name}", line_now()))


def _identity(owner: object) -> int:
    """Return a number that an object shares with what stands for it while torch traces, which has the same dict."""
    try:
        return id(object.__getattribute__(owner, "__dict__"))
    except AttributeError:  # an object with slots alone
        return id(owner)


def _own(owner: object, name: str) -> object:
    """Return an attribute in the object's own dict, MISSING if it is not there."""
    try:
        return object.__getattribute__(owner, "__dict__").get(name, MISSING)
    except AttributeError:  # an object with slots alone
        return MISSING


def _is_in_tables(module: nn.Module, name: str) -> bool:
    own = object.__getattribute__(module, "__dict__")
    return any(name in own[table] for table in ("_parameters", "_buffers", "_modules"))


def _is_computed(cls: type, name: str) -> bool:
    """Return whether a class makes the attribute by a method, a property or `__getattr__`, what they read being watched
    itself."""
    for base in cls.__mro__:
        if name in vars(base):
            kind = type(vars(base)[name])
            return hasattr(kind, "__get__") and not issubclass(kind, types.MemberDescriptorType)
    return True


def _is_watchable(cls: type) -> bool:
    if not cls.__flags__ & _HEAP_TYPE or issubclass(cls, (type, types.ModuleType, BaseException)):
        return False
    module = cls.__module__ or ""
    return issubclass(cls, nn.Module) or not any(f"{module}.".startswith(name) for name in _UNWATCHED)


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
