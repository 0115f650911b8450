"""Call a function that is written for one sample, head, query and key with all of them at once.

torch maps such functions by vmap, which hides dims from the graph. Here the four scalars are tensors of four dims, of
which one is longer than 1, (b, 1, 1, 1) to (1, 1, 1, t): what is computed of scalars is computed of these in the same
ops, broadcast. Two things are not the same and are done otherwise: `x[b, i]` reads numbers, which is a view where the
scalars are the places themselves, and `x[b][i]` reads the first dim of what `x[b]` is for a scalar. Anything else than
ops of one number at a time is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import CaptureError

FIX = "write the function with comparisons, arithmetic, torch.where and tensors indexed by batch, head and places"
OF_NUMBERS = frozenset(
    """add sub mul div true_divide floor_divide remainder fmod pow neg abs exp exp2 expm1 log log2 log1p sqrt rsqrt
    square reciprocal sin cos tan atan sinh cosh tanh sigmoid erf relu sign floor ceil round trunc minimum maximum clamp
    eq ne lt le gt ge less less_equal greater greater_equal not_equal isinf isneginf isnan where masked_fill
    logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor
    bitwise_left_shift bitwise_right_shift multiply divide subtract detach clone to type_as float double half bfloat16
    int long bool ones_like zeros_like full_like""".split()
)
OPERATORS = frozenset(  # of Python, with two underscores on both sides
    """add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow and rand or ror xor rxor invert
    lshift rshift neg abs eq ne lt le gt ge""".split()
)
CONSTANTS = frozenset("new_ones new_zeros new_full new_tensor".split())  # that have the type and device of a number
READ = frozenset("dtype device requires_grad is_cuda is_meta layout".split())


def places(b: int, h: int, s: int, t: int, device: torch.device | str | None) -> tuple[Tensor, ...]:
    """Return the numbers of samples, heads, queries and keys, each along a dim of its own."""
    sizes = (b, h, s, t)
    return tuple(
        torch.arange(size, device=device).reshape([-1 if at == dim else 1 for at in range(4)])
        for dim, size in enumerate(sizes)
    )


def of_all(function: Callable[..., Tensor], scalars: tuple[Tensor, ...], before: tuple[Tensor, ...] = ()) -> Tensor:
    """Return what a function of (*before, b, h, i, j) gives for all of these places, in a shape that broadcasts to
    theirs. `before`: tensors with four dims as well, a number for each. Raises CaptureError for what is not computed
    number by number."""
    with _Scalars(scalars, before) as mode:
        made = function(*before, *scalars)
    if not isinstance(made, Tensor) or mode.rank(made) not in (None, 0):
        raise CaptureError("a function of flex_attention gives more than one number for a query and a key", fix=FIX)
    if mode.rank(made) is None and made.dim():
        raise CaptureError(f"a function of flex_attention gives a tensor {tuple(made.shape)}, not a number", fix=FIX)
    return made


class _Scalars(TorchFunctionMode):
    """Inside, these tensors stand for numbers. `known`: by id, a tensor with four dims in front, the dims that it has
    besides, and what was indexed how to get it; they are kept, so that no id is used twice."""

    def __init__(self, scalars: tuple[Tensor, ...], before: tuple[Tensor, ...]):
        super().__init__()
        self.scalars = scalars
        self.known: dict[int, tuple[Tensor, int, tuple[Tensor, list] | None]] = {}
        for x in (*before, *scalars):
            self._know(x)

    def rank(self, x: object) -> int | None:
        """Return how many dims a tensor has for each number, None if it does not depend on any."""
        found = self.known.get(id(x))
        return None if found is None else found[1]

    def _know(self, x: Tensor, rank: int = 0, origin: tuple[Tensor, list] | None = None) -> Tensor:
        self.known[id(x)] = x, rank, origin
        return x

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        flat = [*args, *kwargs.values()]
        flat += [x for several in flat if isinstance(several, (tuple, list)) for x in several]
        name = getattr(function, "__name__", "")
        is_read = name == "__get__" and getattr(function.__self__, "__name__", "") in READ
        if all(self.rank(x) is None for x in flat) or is_read or name in CONSTANTS:
            return function(*args, **kwargs)
        if name == "__getitem__":
            return self._item(*args)
        is_known = name in OF_NUMBERS or name.startswith("__") and name.strip("_") in OPERATORS
        if not is_known or not all(self.rank(x) == 0 or not x.dim() for x in flat if isinstance(x, Tensor)):
            raise CaptureError(f"a function of flex_attention calls {name} on its numbers", fix=FIX)
        if name in ("add", "__add__", "__radd__") and isinstance(args[-1], int) and args[-1] == 0 and not kwargs:
            return args[0]
        return self._know(function(*args, **kwargs))

    def _item(self, x: Tensor, index: Any) -> Tensor:
        """Return numbers of a tensor, at indices that may be numbers themselves."""
        found = self.known.get(id(x))
        if found is not None and found[2] is None:
            raise CaptureError("a function of flex_attention indexes a number", fix=FIX)
        source, indices = found[2] if found is not None and found[2] is not None else (x, [])
        indices = [*indices, *(index if isinstance(index, tuple) else (index,))]
        if len(indices) > source.dim() or not all(self._is_index(i) for i in indices):
            raise CaptureError(
                f"a function of flex_attention indexes a tensor {tuple(source.shape)} by more than numbers", fix=FIX
            )
        made = self._view(source, indices)
        made = source[tuple(self._plain(i) for i in indices)] if made is None else made
        return self._know(made, source.dim() - len(indices), (source, indices))

    def _is_index(self, i: object) -> bool:
        if isinstance(i, Tensor):
            is_number = self.rank(i) == 0 or self.rank(i) is None and not i.dim()
            return is_number and not i.is_floating_point() and i.dtype != torch.bool
        return isinstance(i, (int, torch.SymInt)) and not isinstance(i, bool)

    def _plain(self, i: Tensor | int) -> Tensor:
        return i if isinstance(i, Tensor) else torch.full((1, 1, 1, 1), i, device=self.scalars[0].device)

    def _view(self, source: Tensor, indices: list) -> Tensor | None:
        """Return a view of the numbers at these indices if they are different places themselves, or numbers known now;
        else None."""
        for i in reversed(range(len(indices))):
            if not isinstance(indices[i], Tensor) and len(indices) > 1:
                source, indices = source.select(i, indices[i]), [*indices[:i], *indices[i + 1 :]]
        dims = [d for i in indices for d, x in enumerate(self.scalars) if x is i]
        if len(dims) < len(indices) or len({*dims}) < len(dims):
            return None
        for at, d in enumerate(dims):
            size = self.scalars[d].shape[d]
            if size > source.shape[at]:
                return None
            source = source.narrow(at, 0, size) if size < source.shape[at] else source
        order = sorted(range(len(dims)), key=dims.__getitem__)
        rest = list(range(len(dims), source.dim()))
        source = source if order == sorted(order) else source.permute(*order, *rest)
        for d in range(4):
            source = source if d in dims else source.unsqueeze(d)
        return source
