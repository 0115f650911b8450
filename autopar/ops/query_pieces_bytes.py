"""Bytes that an attention in pieces of its queries allocates beside its arguments and results, and frees before it
returns: those of one piece, and the sums of keys' gradients in a wide type (autopar/ops/query_pieces.py).

Arguments are those of the call by name, with anything that has a `shape` and a `dtype` for a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from . import query_pieces
from .attention_forms import Like, lse_dtype, numel
from .workspace import workspace_bytes


def forward_bytes(op: object, given: Mapping[str, Any], rows: Mapping[str, int], queries: int, is_gpu: bool) -> int:
    """Return the bytes of a forward. `rows`: by name of an argument that is cut, the dim of queries; `queries`: of a
    piece; `is_gpu`: whether what kernels allocate counts."""
    piece = _piece(given, rows, queries)
    q, v = piece["q"], piece["v"]
    made = numel(q) // q.shape[-1] * (v.shape[-1] * q.dtype.itemsize + lse_dtype(q.dtype).itemsize)
    return made + (_kernel(op, piece) if is_gpu else 0)


def backward_bytes(op: object, given: Mapping[str, Any], rows: Mapping[str, int], queries: int, is_gpu: bool) -> int:
    """Return the bytes of a backward; see `forward_bytes`."""
    piece = _piece(given, rows, queries)
    q, k, v = (piece[name] for name in "qkv")
    item, wide = q.dtype.itemsize, lse_dtype(q.dtype).itemsize
    sums = (numel(k) + numel(v)) * (wide - item)
    if query_pieces.is_in_blocks(piece, piece["first"]):
        k, v = (_cut(x, 2, min(x.shape[2], query_pieces.MOST_KEYS)) for x in (k, v))
        piece |= {"k": k, "v": v, "causal": False, "first": 0}
    of_block = (numel(q) + numel(k) + numel(v)) * item + (numel(q) * wide if wide > item else 0)
    inside = of_block + (_kernel(op, piece) if is_gpu else 0)
    return sums + max(inside, numel(given["k"]) * item if wide > item else 0)


def _kernel(op: object, piece: Mapping[str, Any]) -> int:
    return workspace_bytes(op, *piece.values())


def _piece(given: Mapping[str, Any], rows: Mapping[str, int], queries: int) -> dict[str, Any]:
    """Return the arguments of the piece that most keys are read for: the last one under a causal mask."""
    whole = given["q"].shape[2]
    first = given["first"]
    if first >= 0 and (given["causal"] or given["window"]):
        first += whole - queries
    own = {name: _cut(given[name], dim, queries) for name, dim in rows.items()}
    return {**given, **own, "first": first}


def _cut(x: Like, dim: int, size: int) -> torch.Tensor:
    """Return a tensor without memory that has so many rows."""
    shape = list(x.shape)
    shape[dim] = size
    return torch.empty(shape, dtype=x.dtype, device="meta")
