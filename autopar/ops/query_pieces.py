"""An op that computes a program around an attention for some of its queries at a time.

    queries_in_pieces("t0 = autopar.linear.default(r0, w0); ...", [x, cos, sin], [1, 0, 0, 2, 2], [weight, k, v])

The program is text as in row_pieces.py. Its rows are queries: of each tensor that is cut, and of each that stands side
by side in the result, `dims` says which dim has them. A piece attends to all keys, its place is an argument of the
attention (`place(1, 0)`), and gradients of keys and values add up over pieces.

The backward of a piece takes the keys in blocks, where given the log-sum-exp over all keys no block needs another:
kernels for GPUs make gradients of keys for each head of the queries, and these would be as long as the keys. What a
mask, a window, documents or dropout of weights say stays with the attention's own op, which has such blocks itself, and
gets the keys alone that the piece's queries may attend to.

Tensors of an attention are those of autopar/ops/attention_forms.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from . import attention
from .attention_forms import lse_dtype
from .row_pieces import cuts, parsed, wide

aten, autopar = torch.ops.aten, torch.ops.autopar
# Each piece reads the keys and adds to their gradients. For a number of a key, n queries of a head take 10 n operations
# in the backward, and the sums move some 12 bytes once a head of keys: at 2**13 queries about 1 % of an H100's time
# where four heads share keys, 3 % where none do. A piece of 32 heads of 128 in 16 bits has 64 MiB a tensor.
MOST_QUERIES = 2**13  # of a piece
MOST_KEYS = 2**14  # of a block: each adds to the gradient of all queries of a piece, once for so many keys


def pieces_of(queries: int) -> int:
    """Return into how many pieces so many queries are cut."""
    return max(1, -(-queries // MOST_QUERIES))


def share_of(queries: int) -> float:
    """Return the part of the queries that the largest piece has."""
    return -(-queries // pieces_of(queries)) / queries if queries else 1.0


@custom_op("autopar::queries_in_pieces", mutates_args=())
def queries_in_pieces(
    program: str,
    rows: Sequence[Tensor],
    dims: Sequence[int],
    whole: Sequence[Tensor],
    ranges: Sequence[int] | None = None,
) -> list[Tensor]:
    """Return what a program returns: rows as whole tensors, then the sums. `ranges`: where the queries are several
    ranges of a longer sequence, how many each has, and its place."""
    known, keys = parsed(program), _KeySums()
    size, of_rows, of_made = rows[0].shape[dims[0]], dims[: len(rows)], dims[len(rows) :]
    made: list[Tensor] = []
    found: dict[str, Tensor] = {}
    types: dict[str, torch.dtype] = {}
    for start, end, place in _pieces(size, ranges):
        here = [_part(x, dim, start, end) for x, dim in zip(rows, of_rows)]
        some = known(here, whole, found, place, {autopar.attention_bw.default: keys})
        pieces, sums = some[: len(known.rows)], dict(zip(known.sums, some[len(known.rows) :]))
        if not made:
            types = {name: keys.type_of(x) for name, x in sums.items()}
            made = [_empty(x, dim, size) for x, dim in zip(pieces, of_made)]
            found = {name: x if name in known.products else wide(x) for name, x in sums.items()}
        for x, piece, dim in zip(made, pieces, of_made):
            aten.copy_(x.narrow(dim, start, end - start), piece)
        del here, some, pieces, sums
    keys.forget()
    return [*made, *(found.pop(name).to(types[name]) for name in known.sums)]


@queries_in_pieces.register_fake
def _(program, rows, dims, whole, ranges=None):
    known = parsed(program)
    made = known(rows, whole)
    own = zip(made, dims[len(rows) :])
    size = rows[0].shape[dims[0]]
    return [*(_empty(x, dim, size) for x, dim in own), *(torch.empty_like(x) for x in made[len(known.rows) :])]


def _pieces(size: int, ranges: Sequence[int] | None) -> Iterator[tuple[int, int, int]]:
    """Iterate over the first query of each piece, the one behind its last, and its place."""
    start = 0
    for count, place in zip(ranges[::2], ranges[1::2]) if ranges else [(size, 0)]:
        for first, end in cuts(count, pieces_of(count)):
            yield start + first, start + end, place + first
        start += count


def _part(x: Tensor, dim: int, start: int, end: int) -> Tensor:
    """Return some rows of a tensor; of one without gaps, without gaps: else products copy the weights."""
    part = x.narrow(dim, start, end - start)
    return part.contiguous() if x.is_contiguous() else part


def _empty(x: Tensor, dim: int, size: int) -> Tensor:
    """Return room for the rows of all pieces, given those of one; heads stored as (b, s, h, d)."""
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    return _seq_major(x, shape, x.dtype) if x.dim() == 4 and dim == 2 else x.new_empty(shape)


def _seq_major(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    b, h, s, d = shape
    return x.new_empty(b, s, h, d, dtype=dtype).transpose(1, 2)


class _KeySums:
    """Is called in the place of `autopar::attention_bw`, and adds up the gradients of keys and values over calls."""

    def __init__(self) -> None:
        self.sums: tuple[Tensor, ...] = ()
        self.dtype: torch.dtype | None = None

    def type_of(self, x: Tensor) -> torch.dtype:
        """Return the type of a sum that a program gives."""
        return self.dtype if self.dtype is not None and any(x is own for own in self.sums) else x.dtype

    def forget(self) -> None:
        """Let go of the sums."""
        self.sums = ()

    def __call__(self, grad, q, k, v, out, lse, mask, causal, scale, *constants) -> tuple[Tensor, ...]:
        """Return the gradient of the queries, and the sums over all calls so far."""
        if not self.sums:
            type_, self.dtype = lse_dtype(k.dtype), k.dtype
            self.sums = tuple(_seq_major(x, x.shape, type_).zero_() for x in (k, v))
        named = dict(zip(NAMES, constants))
        first = attention.counted(named.pop("first", 0), k)
        rows = grad, q, out, lse
        if is_in_blocks({"mask": mask, "causal": causal, **named}, first):
            return self._in_blocks(rows, k, v, causal, scale, first, named), *self.sums
        return self._as_asked(rows, k, v, mask, causal, scale, first, named), *self.sums

    def _in_blocks(self, rows, k, v, causal: bool, scale, first: int, named: dict[str, Any]) -> Tensor:
        heads = named.get("head", 0), named.get("group", 0)
        total = None
        for start, end, is_last in _key_blocks(rows[1].shape[2], k.shape[2], causal, first):
            total = self._add(total, rows, k, v, None, is_last, scale, slice(start, end), (0, *heads, None, None, True))
        return (torch.zeros_like(rows[1]) if total is None else total).to(rows[1].dtype)

    def _as_asked(self, rows, k, v, mask, causal: bool, scale, first: int, named: dict[str, Any]) -> Tensor:
        """Call the op with the keys that the queries may attend to."""
        keys = slice(0, k.shape[2])
        if named.get("state") is None and named.get("documents") is None and first >= 0:
            keys = _reach(rows[1].shape[2], k.shape[2], causal, first, named.get("window", 0))
        named = {"first": first - keys.start} | named
        own = mask if mask is None or mask.shape[-1] == 1 else mask[..., keys]
        total = self._add(None, rows, k, v, own, causal, scale, keys, (), named)
        return total.to(rows[1].dtype)

    def _add(self, total, rows, k, v, mask, causal, scale, keys: slice, constants, named=None) -> Tensor:
        """Add gradients of some keys to the sums, and that of the queries to `total`, which is returned."""
        grad, q, out, lse = rows
        some = k[:, :, keys], v[:, :, keys]
        tensors = grad, q, *some, out, lse, mask
        dq, *gradients = autopar.attention_bw.default(*tensors, causal, scale, *constants, **named or {})
        for whole, found in zip(self.sums, gradients):
            whole[:, :, keys].add_(found)
        return wide(dq) if total is None else total.add_(dq)


NAMES = (
    "first", "head", "group", "documents", "key_documents", "of_block", "softcap", "state", "p", "stream", "start",
    "strides", "micro_batch_step", "window",
)  # fmt: skip  # the arguments of attention_bw behind the scale
PLACED = ("mask", "documents", "softcap", "state", "window")  # by which a block of keys is not like another


def is_in_blocks(given: Mapping[str, Any], first: int) -> bool:
    """Return whether the backward of a piece with these arguments takes the keys in blocks."""
    said = [given.get(name) for name in PLACED]
    is_placed = any(value is not None and (not isinstance(value, (int, float)) or value != 0) for value in said)
    return not is_placed and (first >= 0 or not given["causal"])


def _key_blocks(queries: int, keys: int, causal: bool, first: int) -> Iterator[tuple[int, int, bool]]:
    """Iterate over blocks of the keys that queries from number `first` on attend to, of some the last causal."""
    before = min(first, keys) if causal else keys
    for start in range(0, before, MOST_KEYS):
        yield start, min(start + MOST_KEYS, before), False
    if before < (seen := min(first + queries, keys)) and causal:
        yield before, seen, True


def _reach(queries: int, keys: int, causal: bool, first: int, window: int) -> slice:
    """Return the keys that queries from number `first` on may attend to, or one of them if there is none."""
    end = first + queries if causal else first + queries + window - 1 if window else keys
    start = max(0, first - window + 1) if window else 0
    end = max(1, min(end, keys))
    return slice(min(start, end - 1), end)
