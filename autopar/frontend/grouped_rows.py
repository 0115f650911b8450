"""Compute what experts noted of their rows as one computation of all rows, each with the weights of its expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from .picked_rows import Note

PRODUCTS = (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm)


class Grouped:
    """Computes the notes of experts 0 to n - 1 for rows (r, ...) of which `group` (r) says whose each is. `part_of`
    says of which tensor one is a part along dim 0, and which."""

    def __init__(self, group: Tensor, part_of: Callable, refuse: Callable):
        self.group, self.part_of, self.refuse = group, part_of, refuse
        self.known: dict[tuple[int, ...], Any] = {}

    def rows(self, notes: Sequence[Note]) -> Tensor:
        """Return the rows (r, ...) that one note of each expert gives."""
        key = tuple(map(id, notes))
        if key not in self.known:
            self.known[key] = self._rows(notes)
        made = self.known[key]
        return made if notes[0].item is None else made[notes[0].item]

    def _rows(self, notes: Sequence[Note]) -> Any:
        first = notes[0]
        if any(note.is_written_to() for note in notes):
            raise self.refuse("computes with a tensor that is written to before the result is read")
        forms = {(n.function, len(n.args), tuple(sorted(n.kwargs)), n.item) for n in notes}
        if len(forms) > 1:
            raise self.refuse("computes differently for some experts")
        if first.function is None:
            return self._picked([n.args[0] for n in notes], first.args[1])
        args = [self._argument(values) for values in zip(*(n.args for n in notes))]
        kwargs = {name: self._argument([n.kwargs[name] for n in notes]) for name in first.kwargs}
        if first.function is F.linear and isinstance(args[1], Stacked):
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            rows = self._product(args[0], args[1].weight, 2)
            return rows if bias is None else rows + self._of_each(bias, rows)
        if first.function in PRODUCTS and isinstance(args[1], Stacked):
            return self._product(args[0], args[1].weight, 1)
        rows = next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        args = [self._of_each(a, rows) if isinstance(a, Stacked) else a for a in args]
        return first.function(*args, **kwargs)

    def _argument(self, values: Sequence) -> Any:
        from .picked_rows import Rows

        if all(isinstance(v, Rows) for v in values):
            return self.rows([v.note for v in values])
        if isinstance(values[0], Tensor):
            return values[0] if all(v is values[0] for v in values) else Stacked(self._stack(values))
        if any(v != values[0] for v in values):
            raise self.refuse("computes differently for some experts")
        return values[0]

    def _stack(self, values: Sequence[Tensor]) -> Tensor:
        parts = [self.part_of(v) for v in values]
        base = parts[0][0] if parts[0] else None
        if base is not None and len(base) == len(values):
            if all(p is not None and p[0] is base and p[1] == i for i, p in enumerate(parts)):
                return base
        if len({v.shape for v in values}) > 1:
            raise self.refuse("has experts of several sizes")
        return torch.stack(list(values))

    def _picked(self, tensors: Sequence[Tensor], dims: int) -> Tensor:
        tokens = [t.flatten(0, dims - 1) if dims > 1 else t for t in dict.fromkeys(tensors)]
        copies = len(self.group) // len(tokens[0])
        if len(tokens) == 1:
            (shared,) = tokens
            if copies == 1:
                return shared
            tail = shared.shape[1:]
            return shared.unsqueeze(1).expand(len(shared), copies, *tail).reshape(len(self.group), *tail)
        if len(tokens) != len(tensors):
            raise self.refuse("picks rows of several tensors")
        row = torch.arange(len(self.group), device=self.group.device)
        return torch.stack(tokens)[self.group, row // copies]

    def _product(self, rows: Tensor, weight: Tensor, turned: int) -> Tensor:
        """Return each row times the matrix of its expert, (n, k) if `turned` is 2, else (k, n)."""
        if rows.dim() != 2:
            raise self.refuse("multiplies rows of several dims")
        if turned == 2:
            return torch.bmm(weight[self.group], rows.unsqueeze(2)).squeeze(2)
        return torch.bmm(rows.unsqueeze(1), weight[self.group]).squeeze(1)

    def _of_each(self, value: Stacked | Tensor, rows: Tensor) -> Tensor:
        """Return what each row's expert adds or multiplies by, (r, ...)."""
        if isinstance(value, Tensor):
            return value
        each = value.weight[self.group]
        return each.reshape(len(each), *(1,) * (rows.dim() - each.dim()), *each.shape[1:])


class Stacked:
    """Weights of all experts, (n, ...)."""

    def __init__(self, weight: Tensor):
        self.weight = weight
