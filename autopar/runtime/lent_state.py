"""The local parts of an optimizer's parameters and of their state, lent to a stand-in for a step and kept until the
next one, so that a step asks for little but the gradients.

What was kept is of use as long as the user's optimizer has the very same tensors. It goes as soon as one of them does,
so that state which is moved elsewhere, or cleared, leaves no copy behind.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .. import _torch
from .narrow_state import widened
from .stand_in import give_back_of, local_gradient, parameters_of, stand_in, written_to


class _Lent:
    """The local parts of an optimizer's parameters, and a stand-in's state of them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.parameters = parameters_of(optimizer)
        self.parts = [_torch.local_of(p).detach() if isinstance(p, DTensor) else p for p in self.parameters]
        pairs = zip(self.parameters, self.parts)
        self.cut = [(p, part, p.placements) for p, part in pairs if isinstance(p, DTensor)]
        self.parameters_cut = [p for p, _, _ in self.cut]
        self.updated: list = []  # the parameters that have a gradient in this step
        self.state: defaultdict = defaultdict(dict)
        for parameter, part in zip(self.parameters, self.parts):
            if parameter in optimizer.state:
                self.state[part] = widened(optimizer.state[parameter], part)
        self.before: list | None = None  # what the state was when it was the user's last
        self.theirs: list[int] = []  # ids of the user's tensors that all this was made from
        self.watched: list[weakref.ref] = []  # the same tensors: while they live, their ids are no others'

    def take_gradients(self) -> None:
        self.updated = []
        for parameter, part, placements in self.cut:
            gradient: Any = parameter.grad
            if gradient is None:
                continue
            is_reduced = gradient.placements == placements
            part.grad = _torch.local_of(gradient) if is_reduced else local_gradient(parameter)
            self.updated.append(parameter)

    def leave_gradients(self) -> None:
        for _, part, _ in self.cut:
            part.grad = None
        written_to(self.updated)

    def give_back(self, optimizer: Optimizer) -> None:
        """Give what a step made of the state to the user's optimizer, as DTensors like the parameters."""
        if self.before is not None and _are(_values(self.state), self.before):
            return
        for parameter, part in zip(self.parameters, self.parts):
            if part in self.state:
                give_back_of(optimizer.state[parameter], parameter, self.state[part])
        self.before = list(_values(self.state))
        forget = _forgetting(optimizer)
        theirs = list(self._tensors(optimizer))
        if all(isinstance(value, torch.Tensor) for value in theirs):
            self.theirs, self.watched = list(map(id, theirs)), [weakref.ref(value, forget) for value in theirs]
            _lent[optimizer] = self

    def is_of(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer has the tensors that this was made from, and no other ones."""
        if not _are(chain.from_iterable(group["params"] for group in optimizer.param_groups), self.parameters):
            return False
        return list(map(id, self._tensors(optimizer))) == self.theirs

    def _tensors(self, optimizer: Optimizer) -> Iterable:
        """Return the tensors that the optimizer has of these parameters: their local parts, and what their state is."""
        return chain(_torch.locals_of(self.parameters_cut), _values(optimizer.state))


_lent: weakref.WeakKeyDictionary[Optimizer, _Lent] = weakref.WeakKeyDictionary()  # by optimizers and stand-ins


def lend(optimizer: Optimizer) -> Optimizer:
    """Return a stand-in that has the local parts of the parameters, their gradients and their state."""
    lent = _lent.get(optimizer)
    if lent is None or not lent.is_of(optimizer):
        lent = _Lent(optimizer)
    lent.take_gradients()
    parts = iter(lent.parts)
    made = stand_in(
        optimizer, [group | {"params": [next(parts) for _ in group["params"]]} for group in optimizer.param_groups]
    )
    made.state = lent.state
    _lent[made] = lent
    return made


def is_lent(made: Optimizer) -> bool:
    """Return whether an optimizer has state that is lent to it."""
    return made in _lent


def give_back(optimizer: Optimizer, made: Optimizer) -> None:
    """Give the state of a stand-in to the optimizer that lent it."""
    lent = _lent.pop(made)
    lent.leave_gradients()
    lent.give_back(optimizer)


def _values(state: dict) -> Iterable:
    return chain.from_iterable([of_one.values() for of_one in state.values() if isinstance(of_one, dict)])


def _are(some: Iterable, others: list) -> bool:
    some = list(some)
    return len(some) == len(others) and all(map(is_, some, others))


def _forgetting(optimizer: Optimizer) -> Callable:
    owner = weakref.ref(optimizer)

    def forget(_) -> None:
        if (here := owner()) is not None:
            _lent.pop(here, None)

    return forget
