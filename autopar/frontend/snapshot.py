"""A value of the user's Python as it was, to compare with and to go back to.

Plain values are compared by type and value, containers by their elements, and everything else by identity: what is
inside other objects is watched where it is read (see watch.py). Tensors that a graph has among its constants count by
identity and version, others by what Python can see of them, their form.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Container, Iterator, Mapping

import torch

from .._torch import storage_key

PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.Size)
CONTAINERS = (list, dict, set, tuple, frozenset, collections.deque)


class _Missing:
    """The value of an attribute that is not there."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()


def is_container(value: object) -> bool:
    """Return whether a value is one of Python's own containers, or of a class made from one; torch.Size is none."""
    return isinstance(value, CONTAINERS) and not isinstance(value, (torch.Size, torch.Tensor))


class Snapshot:
    """A value and, of containers, what they hold, as deep as containers go. Tensors count by identity and version,
    until it is known that their values do not matter (`forget_values`)."""

    __slots__ = ("value", "version", "items", "form")

    def __init__(self, value: object, seen: frozenset[int] = frozenset()):
        self.value, self.form = value, None
        self.version = value._version if _has_version(value) else None
        self.items: tuple | None = None
        if is_container(value) and id(value) not in seen:
            within = seen | {id(value)}
            self.items = tuple((key, Snapshot(item, within)) for key, item in _entries(value))

    def is_now(self, value: object) -> bool:
        """Return whether a value is what this one was."""
        if self.items is None or type(value) is not type(self.value):
            if self.form is not None:
                return isinstance(value, torch.Tensor) and _form(value) == self.form
            if value is self.value:
                return self.version is None or value._version == self.version
            return type(value) is type(self.value) and isinstance(value, PLAIN) and value == self.value
        entries = list(_entries(value))
        if len(entries) != len(self.items):
            return False
        return all(k is key or k == key for (k, _), (key, _) in zip(entries, self.items)) and all(
            old.is_now(item) for (_, item), (_, old) in zip(entries, self.items)
        )

    def forget_values(self, used: Container[int]) -> None:
        """Let tensors count by their form alone, but for those in one of the memories `used` (see
        _torch.storage_key)."""
        if isinstance(self.value, torch.Tensor) and storage_key(self.value) not in used:
            self.form = _form(self.value)
        for _, item in self.items or ():
            item.forget_values(used)

    def copied(self, memo: Mapping[int, object]) -> Snapshot:
        """Return the same snapshot for a deep copy of what holds the value; `memo` has the copies by the ids of their
        originals."""
        made = Snapshot(memo.get(id(self.value), self.value))
        made.form = self.form
        if self.items is not None:
            made.items = tuple((key, item.copied(memo)) for key, item in self.items)
        return made

    def restore(self) -> None:
        """Give a container back what it held, and the containers inside of it."""
        if self.items is None:
            return
        for _, item in self.items:
            item.restore()
        held = self.value
        if isinstance(held, dict):
            held.clear()
            held.update((key, item.value) for key, item in self.items)
        elif isinstance(held, (list, collections.deque)):
            held.clear()
            held.extend(item.value for _, item in self.items)
        elif isinstance(held, set):
            held.clear()
            held.update(key for key, _ in self.items)

    def objects(self) -> Iterator[object]:
        """Yield the value itself, or the elements of containers, as deep as they go."""
        if self.items is None:
            yield self.value
        else:
            for _, item in self.items:
                yield from item.objects()


def _form(tensor: torch.Tensor) -> tuple:
    return type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


def _has_version(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_inference()


def _entries(container) -> list[tuple[object, object]]:
    """Return (key, element) pairs, whose keys are numbers for sequences, the elements themselves for sets."""
    if isinstance(container, dict):
        return list(container.items())
    if isinstance(container, (set, frozenset)):
        return [(item, item) for item in sorted(container, key=repr)]
    return list(enumerate(container))


def text(value: object) -> str:
    """Return a value as text for a message, in one short line."""
    words = f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return words if len(words) <= 60 else f"{words[:57]}..."
