"""Record what a forward reads of Python: attributes, globals and closures, each reached from the model through others.

What is known at first are the model's modules, their classes, and the variables that the functions of a forward name
(see names.py). An object that is read out of one that is known is known from then on. So what was read is a list of
places, in order, and another process finds the same places in its own model: see `Reads.repeat`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from . import lasting
from .moe_in_token_order import SETTINGS
from .names import Reach, Variable, called_by, is_library
from .snapshot import MISSING, PLAIN, Snapshot, is_container
from .user_lines import line_now

_HEAP_TYPE = 1 << 9  # a class that Python code made, whose attributes can be set
_UNWATCHED = (
    "logging.", "threading.", "pathlib.", "enum.", "re.", "weakref.", "collections.", "typing.", "abc.", "torch._",
    "torch.fx.", "torch.export.", "torch.utils.", "torch.distributed.", "autopar.",
)  # fmt: skip
CACHES = ("_flat_weights", "_flat_weight_refs")  # of recurrent layers: made again when their parameters are others
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


class Reads:
    """The reads of one run of a model's forward. `unwatched`: containers of the model's parameters, which are other
    ones while it is traced; `meet` is called with every class whose objects become known."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable | None = None,
        unwatched: Iterable[object] = (),
        meet: Callable[[type], None] = lambda cls: None,
    ):
        self.model, self.loss_fn, self.meet = model, loss_fn, meet
        self._unwatched = {id(container) for container in unwatched}
        self.found: dict[tuple[int, str], Read] = {}
        self.known: dict[int, tuple[object, str, int]] = {}  # objects with a path and a number, as they were met
        self.asked: dict[tuple[int, str], None] = {}  # the attributes that were read, in order, by the objects' numbers
        self.reach = Reach(())
        self.is_running = False

    def begin(self) -> None:
        """Forget an earlier run, and know what every run begins with."""
        for kept in (self.found, self.known, self.asked):
            kept.clear()
        for name, module in self.model.named_modules():
            self._know(module, f"model.{name}" if name else "model")
        classes = {type(module): None for module in self.model.modules()}
        self.reach = Reach(classes)
        for cls in classes:  # of libraries too, whose forwards are what others replace
            self._note(cls, "forward", cls.forward, f"{cls.__name__}.forward")
        for function in called_by(self.model, self.loss_fn):
            self._follow(function)

    def repeat(self, asked: Iterable[tuple[int, str]]) -> None:
        """Read what another run did, of another process it may be, without running anything: objects are met in the
        same order. Raises LookupError where that cannot be."""
        self.begin()
        objects = [known for known, _, _ in self.known.values()]
        for number, name in asked:
            if len(objects) < len(self.known):
                objects = [known for known, _, _ in self.known.values()]
            if number >= len(objects):
                raise LookupError(f"there is no object {number} that has {name}")
            owner = objects[number]
            self.read(owner, name, getattr(owner, name, MISSING))

    def know(self, owner: object) -> bool:
        """Return whether an object's reads and writes count at this time."""
        return self.is_running and identity(owner) in self.known

    def read(self, owner: object, name: str, value: object) -> None:
        """Note that an attribute of a known object was read, unless it is one that is compared elsewhere."""
        owner, path, number = self.known[identity(owner)]
        if (id(owner), name) in self.found or name.startswith("__") or name in (*SETTINGS, lasting.INSTALLED):
            return
        is_in_table = isinstance(owner, nn.Module) and is_in_tables(owner, name)
        if isinstance(owner, nn.Module) and name in MODULE_ATTRIBUTES:
            return
        if is_in_table and nn.Module.__getattr__(owner, name) is not None:
            return
        self.asked[number, name] = None
        if is_in_table:
            return self._note(owner, name, None, f"{path}.{name}")  # a buffer that is to be filled
        if value is not MISSING and own(owner, name) is MISSING and _is_computed(type(owner), name):
            if isinstance(value, types.MethodType) and hasattr(owner, "__dict__"):  # which the object may get itself
                self._note(Variable(vars(owner), name, f"{path}.{name}"), name, MISSING, f"{path}.{name}")
                if not is_library(type(owner).__module__) and isinstance(
                    vars(type(owner)).get(name), types.FunctionType
                ):
                    self._note(type(owner), name, vars(type(owner))[name], f"{type(owner).__name__}.{name}")
            return
        self._note(owner, name, value, f"{path}.{name}")

    def _know(self, value: object, path: str) -> None:
        """Know an object from here on, if it is one whose attributes can be watched; of a compiled module its source,
        which has them."""
        if isinstance(value, nn.Module) and type(value).__module__.startswith("autopar.runtime."):
            value = value._source
        if isinstance(value, (*PLAIN, torch.Tensor)) or identity(value) in self.known:
            return
        if isinstance(value, type):
            if not is_library(value.__module__):
                self._number(value, path)
                for name, held in vars(value).items():
                    if not name.startswith("__") and (isinstance(held, PLAIN) or is_container(held)):
                        self._note(value, name, held, f"{path}.{name}")
            return
        if isinstance(value, (types.FunctionType, types.MethodType)):
            self._number(value, path)
            self._follow(value)
            if isinstance(value, types.MethodType):
                self._know(value.__self__, path)
            return
        cls = type(value)
        if not _is_watchable(cls):
            if isinstance(value, types.SimpleNamespace):
                self._number(value, path)
                for name, held in vars(value).items():
                    self._note(value, name, held, f"{path}.{name}")
            return
        self._number(value, path)
        self.meet(cls)

    def _number(self, value: object, path: str) -> None:
        self.known[identity(value)] = value, path, len(self.known)

    def _follow(self, function: object) -> None:
        for variable in self.reach.follow(function):
            self._note(variable, variable.key, variable.value(MISSING), variable.path)

    def _note(self, owner: object, name: str, value: object, path: str) -> None:
        if id(value) in self._unwatched or (name in CACHES and isinstance(owner, nn.RNNBase)):
            return
        before = Snapshot(value)
        key = id(owner.table) if isinstance(owner, Variable) else id(owner), name
        self.found[key] = Read(owner, name, before, path, line_now() if self.is_running else None)
        for item in before.objects():
            self._know(item, path)


def identity(owner: object) -> int:
    """Return a number that an object shares with what stands for it while torch traces, which has the same dict."""
    try:
        return id(object.__getattribute__(owner, "__dict__"))
    except AttributeError:  # an object with slots alone
        return id(owner)


def own(owner: object, name: str) -> object:
    """Return an attribute in the object's own dict, MISSING if it is not there."""
    try:
        return object.__getattribute__(owner, "__dict__").get(name, MISSING)
    except AttributeError:  # an object with slots alone
        return MISSING


def is_in_tables(module: nn.Module, name: str) -> bool:
    """Return whether a name of a module is a parameter, buffer or module of its own."""
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
