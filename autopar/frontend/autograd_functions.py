"""User-defined autograd functions in a traced model.

`torch.export` follows a `torch.autograd.Function` through its forward and forgets its backward. Inside
`recorded_backwards` every call of one becomes an op of its own instead, whose gradient is the function's backward,
traced on the function's forward made again; when the model is differentiated, `inline` gives the forward's own ops in
the place of such an op.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

import torch
import torch.utils.checkpoint
from torch import Tensor

from .._torch import functionalized, tree_flatten, tree_unflatten
from ..errors import CaptureError
from .autocast import ambient, entered
from .open_numbers import plain

NAMESPACE = "autopar_function"
_numbers = itertools.count()
_forwards: dict[object, Callable] = {}


@contextmanager
def recorded_backwards() -> Iterator[None]:
    """Trace autograd functions inside as ops. Raises CaptureError for one with outputs other than tensors or None."""
    plain = torch.autograd.Function.__dict__["apply"]

    def apply(cls, *args, **kwargs):
        if cls is torch.utils.checkpoint.CheckpointFunction:  # what is computed again is the planner's choice
            function, _, *rest = args
            return function(*rest)
        is_torchs_own = cls.__module__.split(".")[0] == "torch"
        return (plain.__get__(None, cls) if is_torchs_own else partial(_apply, cls))(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)
    try:
        yield
    finally:
        torch.autograd.Function.apply = plain


def inline() -> dict[object, Callable]:
    """Return the decomposition table of the ops made so far: for each of them, what it stands for."""
    return dict(_forwards)


class Context:
    """A stand-in for the `ctx` of a function's forward and backward: it keeps what is saved and what is set on it."""

    def __init__(self, needs_input_grad: tuple[bool, ...] = ()):
        self.needs_input_grad, self.saved_tensors = needs_input_grad, ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep tensors for the backward, which reads them as `saved_tensors`."""
        self.saved_tensors = tensors

    def mark_dirty(self, *tensors: Tensor) -> NoReturn:
        """Raise CaptureError: a function that writes to its inputs cannot be traced."""
        raise CaptureError("an autograd function that writes to its inputs cannot be traced", fix="return new tensors")

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Do nothing: gradients of these tensors arrive as zeros, and the backward ignores them."""

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing: gradients of unused outputs arrive as zeros either way."""


def _apply(cls, *args, **kwargs):
    flat, spec = tree_flatten((args, kwargs))
    flat = [plain(x) for x in flat]  # its backward computes with the arguments outside of the trace
    positions = [i for i, x in enumerate(flat) if isinstance(x, Tensor)]
    form: dict[str, bool] = {}
    are_tensors: list[bool] = []  # of the outputs; the others are None
    around = ambient()  # it is off when the op is inlined

    def arguments(tensors):
        given = list(flat)
        for i, tensor in zip(positions, tensors):
            given[i] = tensor
        return tree_unflatten(given, spec)

    def forward(tensors: list[Tensor], ctx: Context | None = None) -> list[Tensor]:
        with entered(around):
            return _forward(tensors, ctx or Context())

    def _forward(tensors: list[Tensor], ctx: Context) -> list[Tensor]:
        given, named = arguments(tensors)
        if cls.setup_context is not torch.autograd.Function.setup_context:
            output = cls.forward(*given, **named)
            cls.setup_context(ctx, given, output)
        else:
            output = cls.forward(ctx, *given, **named)
        form["single"] = isinstance(output, Tensor)
        outputs = [output] if form["single"] else list(output)
        if not all(isinstance(o, Tensor) or o is None for o in outputs):
            raise CaptureError(
                f"the autograd function {cls.__name__} returns something else than tensors and None",
                fix="return tensors only",
            )
        are_tensors[:] = [o is not None for o in outputs]
        return [o.clone() if any(o is t for t in tensors) else o for o in outputs if o is not None]

    def backward(ctx, grads: list[Tensor]) -> list[Tensor | None]:
        inputs = ctx.saved_tensors
        own = Context(tuple(i in positions and inputs[positions.index(i)].requires_grad for i in range(len(flat))))
        with torch.no_grad():
            forward(inputs, own)
            given = cls.backward(own, *_placed(grads, are_tensors))
        given = given if isinstance(given, tuple) else (given,)
        return [given[i] if i < len(given) else None for i in positions]

    def functional(tensors: list[Tensor]) -> list[Tensor]:
        outputs, is_written = functionalized(forward, tensors)  # it may write to what it made
        return outputs if not is_written else Context().mark_dirty()

    name = f"{cls.__name__.lower()}_{next(_numbers)}"
    op = torch.library.custom_op(
        f"{NAMESPACE}::{name}",
        lambda tensors: forward(tensors),
        mutates_args=(),
        schema="(Tensor[] tensors) -> Tensor[]",
    )
    op.register_fake(lambda tensors: forward(tensors))
    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[0]))
    target = getattr(getattr(torch.ops, NAMESPACE), name).default
    _forwards[target] = functional
    outputs = target([flat[i] for i in positions])
    return outputs[0] if form["single"] else tuple(_placed(outputs, are_tensors))


def _placed(tensors: Iterable[Tensor], is_tensor: Iterable[bool]) -> list[Tensor | None]:
    """Return the tensors at the places where there are tensors, and None at the others."""
    rest = iter(tensors)
    return [next(rest) if here else None for here in is_tensor]
