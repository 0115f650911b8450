"""Trace what a forward leaves behind in its model's attributes as a part of the call.

A tensor that a forward puts into an attribute (`self.aux_loss = ...`) is one more output of the graph; a buffer that it
replaces by another tensor of the same form is written; a plain value is set again after each call, since the same state
before a call gives the same state after it; a counter that is only counted on goes on from where it stands.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import CaptureError
from .eager_meaning import is_stand_in
from .open_numbers import plain
from .reads import Read
from .snapshot import MISSING, PLAIN, Snapshot, text
from .steps import step_of
from .watch import Watch, Write

FIX = "keep what changes in a buffer, or return it"


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in an attribute's new value: its position among the outputs of the graph."""

    position: int


@dataclass(frozen=True)
class Effect:
    """An attribute that a call sets. `value` has Slots for tensors; `step` is what a counter goes on by, 0 for other
    attributes; `is_saved`: of a buffer that the call registers, whether a state dict has it."""

    owner: object
    name: str
    path: str
    value: object
    step: int | float = 0
    is_saved: bool | None = None

    def apply(self, outputs: list) -> None:
        """Give the attribute the value that the call leaves in it, from the outputs of the call."""
        if self.step:
            setattr(self.owner, self.name, getattr(self.owner, self.name) + self.step)
        elif self.value is MISSING:
            delattr(self.owner, self.name)
        elif self.is_saved is not None:
            self.owner.register_buffer(self.name, _filled(self.value, outputs), self.is_saved)
        else:
            setattr(self.owner, self.name, _filled(self.value, outputs))


@dataclass(frozen=True)
class Refill:
    """A list or dict that a call changes in place. `value` is what it then holds, as in an Effect."""

    owner: list | dict
    path: str
    value: object

    def apply(self, outputs: list) -> None:
        """Change the list or dict as the call does, given the outputs of the call."""
        made = _filled(self.value, outputs)
        self.owner.clear()
        self.owner.update(made) if isinstance(self.owner, dict) else self.owner.extend(made)


def has_tensor(value: object) -> bool:
    """Return whether an attribute's new value has tensors in it."""
    if isinstance(value, dict):
        return any(map(has_tensor, value.values()))
    return any(map(has_tensor, value)) if type(value) in (list, tuple) else isinstance(value, Slot)


def _filled(value: object, outputs: list) -> object:
    if isinstance(value, Slot):
        tensor = outputs[value.position]
        is_state = hasattr(tensor, "full_tensor") and not tensor.requires_grad  # the next call may read it
        return tensor.full_tensor() if is_state else tensor
    if isinstance(value, dict):
        return {key: _filled(item, outputs) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_filled(item, outputs) for item in value)
    return value


def effects_of(watch: Watch, others: Iterable[Write], outputs: list[Tensor], names: list[str]) -> list[Effect | Refill]:
    """Return what the run that `watch` saw leaves in attributes, with the writes of buffers in `others`. Its tensors
    are appended to `outputs`, with a name each.

    Raises CaptureError for what no graph can leave there."""
    found, others = [], list(others)
    for write in (*watch.changed(), *others):
        step = step_of(write, watch.seen.reach)
        if step:
            watch.reads.pop((id(write.owner), write.name), None)  # what is only counted on may have any value
        value = step or _template(write.now(), write, outputs, names)
        is_new = write in others and write.before is MISSING
        is_saved = write.name not in write.owner._non_persistent_buffers_set if is_new else None
        found.append(Effect(write.owner, write.name, write.path, value, step, is_saved))
    for read in watch.refilled():
        held = read.before.value
        if not isinstance(held, (list, dict, collections.deque)) or not all(
            _is_flat(item) for _, item in read.before.items
        ):
            raise CaptureError(
                f"the forward changes {read.path}, a {type(held).__name__}, in place", source=read.source, fix=FIX
            )
        now = dict(held) if isinstance(held, dict) else list(held)
        before = {id(item.value) for _, item in read.before.items}
        found.append(Refill(held, read.path, _template(now, read, outputs, names, before)))
    return found


def _is_flat(item: Snapshot) -> bool:
    """Return whether an element of a container is no container itself, or one that is what it was."""
    return item.items is None or item.is_now(item.value)


def _template(
    value: object, write: Write | Read, outputs: list[Tensor], names: list[str], before: Set[int] = frozenset()
) -> object:
    """Return the value with Slots for the tensors that a run made; elements that were there `before` are what they
    were."""
    value = plain(value)
    if value is MISSING or isinstance(value, PLAIN) or id(value) in before:
        return value
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        outputs.append(value)
        names.append(write.path)
        return Slot(len(outputs) - 1)
    if type(value) in (list, tuple):
        return type(value)(_template(item, write, outputs, names, before) for item in value)
    if type(value) is dict:
        return {key: _template(item, write, outputs, names, before) for key, item in value.items()}
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise CaptureError(
            f"the forward sets {write.path} to a Python number that it reads from a tensor (item(), float(...))",
            source=write.source,
            fix=f"keep the tensor: {write.path} = value.detach(), and call item() on it outside of the forward",
        )
    raise CaptureError(
        f"the forward sets {write.path} to {text(value)}, a {type(value).__name__}", source=write.source, fix=FIX
    )


class TensorTables:
    """The tables of a model's modules before a run, to see what the run replaced in them."""

    def __init__(self, model: nn.Module):
        self.before = [
            (path, module, dict(module._parameters), dict(module._buffers), dict(module._modules))
            for path, module in model.named_modules()
        ]

    def replaced(self, casts: bool = False) -> tuple[dict[str, Tensor], list[Write]]:
        """Return what the run put in the place of buffers: tensors of the same form, but for a float type if the run
        `casts`, by the name of the buffer that takes their value, and the others: new ones, those of another form and
        those with a gradient.

        Raises CaptureError for parameters and modules that were replaced."""
        values, others = {}, []
        for path, module, parameters, buffers, modules in self.before:
            label = f"model.{path}" if path else "model"
            for kind, old, new in (("parameter", parameters, module._parameters), ("module", modules, module._modules)):
                for name in {**old, **new}:
                    if old.get(name) is not new.get(name) and not is_stand_in(new.get(name)):
                        raise CaptureError(
                            f"the forward replaces the {kind} {label}.{name}", fix="make it once, before compiling"
                        )
            for name, tensor in module._buffers.items():
                was = buffers.get(name)
                if tensor is was and tensor is not None and tensor.requires_grad:
                    raise CaptureError(
                        f"the forward writes to {label}.{name} what carries a gradient, and the next call would go "
                        f"back through it",
                        fix="write tensor.detach(), or do it inside of torch.no_grad()",
                    )
                if tensor is was:
                    continue
                if _is_like(tensor, was, casts) and not tensor.requires_grad:
                    values[f"{path}.{name}" if path else name] = tensor.detach().to(was.dtype).clone()
                else:
                    others.append(Write(module, name, MISSING if name not in buffers else was, f"{label}.{name}"))
        return values, others

    def undo(self) -> None:
        """Put back what the tables held."""
        for _, module, *tables in self.before:
            for now, old in zip((module._parameters, module._buffers, module._modules), tables):
                if list(now) != list(old) or any(now[name] is not value for name, value in old.items()):
                    now.clear()
                    now.update(old)


def _is_like(tensor: Tensor | None, other: Tensor | None, casts: bool) -> bool:
    if tensor is None or other is None or tensor.shape != other.shape:
        return False
    return tensor.dtype == other.dtype or (casts and tensor.is_floating_point() and other.is_floating_point())
