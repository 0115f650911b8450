"""Hold what a program's script works with: the model, calls that are recorded, and values that it wants recorded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from . import snapshot


class Run:
    """One run of a program, eager or compiled. `compile_(module, example)` compiles a further module, or hands it back
    as it is.

    `loss`: what a call's backward starts from, a function of the output; by default all differentiable outputs with
    fixed weights. Gradients are dropped at the start of a recorded call unless `accumulates`."""

    def __init__(self, model: nn.Module, source: nn.Module, batch: Callable, compile_: Callable):
        self.model, self.source, self.batch, self.compile = model, source, batch, compile_
        self.loss: Callable = weighted_sum
        self.accumulates = False
        self.records: list[dict[str, object]] = []
        self.record()

    def __call__(self, seed: int):
        """A recorded call on batch(seed), backward included."""
        args, kwargs = arguments(self.batch(seed))
        return self.call(*args, **kwargs)

    def call(self, *args, **kwargs):
        """A recorded call on these arguments, backward included; returns the output, made of plain tensors where it is
        nested in built-in containers."""
        if not self.accumulates:
            for parameter in self.model.parameters():
                parameter.grad = None
        output = self.model(*args, **kwargs)
        seen = snapshot.of_output(output)
        loss = self.loss(output)
        if loss is not None and loss.requires_grad:
            loss.backward()
        self.records.append(seen | self._inputs(args, kwargs) | snapshot.of_model(self.model, self.source))
        return output

    def record(self, **values) -> None:
        """Values of the script's own, and the state of the model now."""
        mine = {f"recorded {p}": snapshot.copied(leaf) for k, v in values.items() for p, leaf in snapshot.leaves(v, k)}
        self.records.append(mine | snapshot.of_model(self.model, self.source))

    @staticmethod
    def _inputs(args, kwargs) -> dict[str, object]:
        found = {}
        for i, tensor in enumerate(t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)):
            found[f"input {i} after the call"] = snapshot.copied(tensor)
            if tensor.requires_grad and tensor.is_leaf:
                found[f"gradient of input {i}"] = snapshot.copied(tensor.grad)
        return found


def arguments(batch) -> tuple[tuple, dict]:
    """(args, kwargs) of a batch, in the forms that `example_inputs` has."""
    if isinstance(batch, dict):
        return (), batch
    if len(batch) == 2 and isinstance(batch[0], tuple) and isinstance(batch[1], dict):
        return batch
    return tuple(batch), {}


def weighted_sum(output) -> Tensor | None:
    """All differentiable outputs times fixed numbers between 0.5 and 1.5, added up; None without any."""
    total = None
    for _, leaf in snapshot.leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.numel():
            whole = snapshot.plain(leaf)
            value = whole.abs() if whole.is_complex() else whole.float() if whole.dtype != torch.float64 else whole
            weights = 1 + torch.sin(torch.arange(value.numel(), dtype=value.dtype)).view(value.shape) / 2
            term = (value * weights).sum()
            total = term if total is None else total + term
    return total
