"""Attention on GPUs with what no kernel of torch does: scores that are capped, weights that are dropped by counter, the
gradient of what is added to the scores.

It does in one kernel forward, and one for queries and one for keys and values backward, what attention_blocks.py does
block by block, so that no score goes through memory (FlashAttention-2, arXiv 2307.08691). The kernels
(attention_forward_kernel.py, attention_backward_kernel.py, attention_added_kernel.py) are in Triton, which comes with
torch for CUDA; none adds in an order that changes from run to run. Widths of heads are those of powers of two, zeros
behind them.

Tensors are those of autopar/ops/attention_forms.py.
"""

from __future__ import annotations

import functools
import warnings
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .attention_dropout import WeightDropout
from .attention_forms import Form, Like, adjacent, contiguous
from .counter_rng import ALL
from .packed_linear import has_kernel

HALVES = (torch.float16, torch.bfloat16)
WIDEST, NARROWEST = 256, 16
OLDEST_CAPABILITY = (8, 0)


class Tile(NamedTuple):
    """Queries and keys that a program works on at a time, by so many warps, loads so many stages ahead."""

    rows: int
    columns: int
    warps: int
    stages: int


# by the width of heads: as large as 255 registers a thread and 99 KiB of shared memory let them be
FORWARD = {64: Tile(64, 64, 4, 3), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 8, 2)}
MASKED_FORWARD = FORWARD | {128: Tile(128, 32, 8, 3)}
QUERIES = {64: Tile(128, 32, 8, 2), 128: Tile(64, 64, 8, 2), 256: Tile(64, 32, 8, 1)}
KEYS = {64: Tile(32, 128, 8, 2), 128: Tile(32, 64, 8, 2), 256: Tile(32, 32, 8, 1)}
ADDED = {64: Tile(64, 32, 4, 1), 128: Tile(32, 64, 4, 1), 256: Tile(64, 32, 8, 1)}


class Steps(NamedTuple):
    """Strides (sample, head, query or key), those of masks also of keys."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    mask: tuple[int, ...]
    out: tuple[int, ...]
    grad: tuple[int, ...] = (0, 0, 0)
    dq: tuple[int, ...] = (0, 0, 0)
    dk: tuple[int, ...] = (0, 0, 0)
    dv: tuple[int, ...] = (0, 0, 0)
    dmask: tuple[int, ...] = (0, 0, 0, 0)


class Problem(NamedTuple):
    """Sizes and numbers of an attention, for kernels; `group` heads of queries read one of keys."""

    heads: int
    group: int
    rows: int
    keys: int
    first: int
    scale: float
    softcap: float


class Drops(NamedTuple):
    """A WeightDropout, for kernels: weights whose number is at least `least` are kept, times `factor`."""

    key: int = 1
    start: int = 0
    steps: tuple[int, ...] = (0, 0, 0)
    least: int = -ALL // 2
    factor: float = 1.0


def serves(q: Like, k: Like, v: Like, dmask: Like | None = None, dropout: WeightDropout | None = None) -> bool:
    """Return whether the kernels serve tensors of these forms; `dmask`: the gradient of what is added, if it is wanted,
    which has to have all queries and keys."""
    rows, keys = q.shape[2], k.shape[2]
    is_whole = dmask is None or (
        len(dmask.shape) > 1 and all(n >= m for n, m in zip(dmask.shape[-2:], (rows, keys), strict=True))
    )
    fits = max(q.shape[-1], v.shape[-1]) <= WIDEST and all((*q.shape, *k.shape, *v.shape))
    return q.dtype in HALVES and fits and is_whole and (dropout is None or dropout.strides[3] == 1)


@functools.cache
def is_there(device: torch.device) -> bool:
    """Return whether a device runs the kernels; warn if it should and does not, as without a C compiler for Triton."""
    if not has_kernel(device) or torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
        return False
    try:
        few = torch.zeros(1, 1, NARROWEST, NARROWEST, dtype=torch.bfloat16, device=device)
        forward(few, few, few, None, False, 1.0)
    except Exception as error:
        warnings.warn(
            f"Triton makes no kernel for {device}, so that attention with dropout, a softcap or a learned bias runs "
            f"block by block, several times slower: {type(error).__name__}: {error}",
            stacklevel=2,
        )
        return False
    return True


def form_with(softcap: float, dmask: Tensor | None = None, dropout: WeightDropout | None = None) -> Form:
    """Return the form for scores that are capped, whose mask has its gradient added to `dmask`, or whose weights are
    dropped."""
    attend = partial(forward, softcap=softcap, dropout=dropout)
    attend_backward = partial(backward, softcap=softcap, dropout=dropout, dmask=dmask)
    return Form("fused", attend, attend_backward, takes_first=True)


def forward(
    q,
    k,
    v,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    first: int = 0,
    softcap: float = 0.0,
    dropout: WeightDropout | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (output, log-sum-exp); 0 and -inf for a query whose keys are all closed. `first`: the number of the first
    query, for a causal mask."""
    from .attention_forward_kernel import forward_kernel

    call = _Call(q, k, v, mask, causal, scale, first, softcap, dropout)
    out, lse = _seq_major(q, (*q.shape[:3], v.shape[-1])), q.new_empty(q.shape[:3], dtype=torch.float32)
    tile = call.tile(FORWARD if mask is None else MASKED_FORWARD)
    tensors = call.q, call.k, call.v, call.mask, out, lse
    with torch.cuda.device_of(q):
        forward_kernel[call.programs(q, tile.rows)](*tensors, call.steps(out), *call.told, **call.constants(tile))
    return out, lse


def backward(
    grad,
    q,
    k,
    v,
    out,
    lse,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    first: int = 0,
    lse_is_exact: bool = False,
    softcap: float = 0.0,
    dmask: Tensor | None = None,
    dropout: WeightDropout | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; that of the mask is added to `dmask` (the mask's shape, fp32). Where numbers
    that are added are so low that the log-sum-exp is lost in them, gradients are what torch's kernels give."""
    from .attention_added_kernel import added_kernel
    from .attention_backward_kernel import keys_kernel, queries_kernel

    call = _Call(q, k, v, mask, causal, scale, first, softcap, dropout)
    grad, out, lse = adjacent(grad), adjacent(out), contiguous(lse)
    delta, (dq, dk, dv) = torch.empty_like(lse), (_seq_major(x, x.shape) for x in (q, k, v))
    steps, heads = call.steps(out, grad, dq, dk, dv, dmask), (call.q, call.k, call.v)
    told, read = (steps, *call.told), (lse, call.mask, delta)
    with torch.cuda.device_of(q):
        tile = call.tile(QUERIES)
        queries_kernel[call.programs(q, tile.rows)](grad, *heads, out, *read, dq, *told, **call.constants(tile))
        tile = call.tile(KEYS)
        keys_kernel[call.programs(k, tile.columns)](grad, *heads, *read, dk, dv, *told, **call.constants(tile))
        if dmask is not None:
            tile = call.tile(ADDED)
            samples, mask_heads = _four(dmask).shape[:2]
            tiles = samples * mask_heads * _blocks(q.shape[2], tile.rows) * _blocks(k.shape[2], tile.columns)
            of_mask, constants = (q.shape[0], samples, mask_heads), call.constants(tile)
            del constants["MASKED"]
            added_kernel[(tiles,)](grad, *heads, *read, dmask, *of_mask, *told, **constants)
    return dq, dk, dv


class _Call:
    """Holds what all kernels of a call are given."""

    def __init__(self, q, k, v, mask, causal, scale, first, softcap, dropout: WeightDropout | None):
        self.q, self.k, self.v = (adjacent(x) for x in (q, k, v))
        self.is_masked, self.is_causal, self.dropout = mask is not None, causal, dropout
        self.mask = q if mask is None else _four(mask).expand(*q.shape[:3], k.shape[2])
        heads, group = q.shape[1], q.shape[1] // k.shape[1]
        problem = Problem(heads, group, q.shape[2], k.shape[2], first, float(scale), float(softcap))
        drops = Drops()
        if dropout is not None:
            least = dropout.dropped - ALL // 2
            drops = Drops(dropout.key, dropout.start, dropout.strides[:3], least, dropout.factor)
        self.told = problem, drops

    def steps(self, out, grad=None, dq=None, dk=None, dv=None, dmask=None) -> Steps:
        """Return the strides of all tensors."""
        of_mask = self.mask.stride() if self.is_masked else (0, 0, 0, 0)
        of_dmask = (0, 0, 0, 0) if dmask is None else _four(dmask).stride()
        q, k, v, out, grad, dq, dk, dv = (
            (0, 0, 0) if x is None else x.stride()[:3] for x in (self.q, self.k, self.v, out, grad, dq, dk, dv)
        )
        return Steps(q, k, v, of_mask, out, grad, dq, dk, dv, of_dmask)

    def tile(self, tiles: dict[int, Tile]) -> Tile:
        """Return the tile of a kernel for the width of these heads."""
        return tiles[max(64, _width(self.q), _width(self.v))]

    def programs(self, heads: Tensor, block: int) -> tuple[int]:
        """Return how many programs take so many rows each of all heads."""
        return (heads.shape[0] * heads.shape[1] * _blocks(heads.shape[2], block),)

    def constants(self, tile: Tile) -> dict[str, int | bool]:
        """Return what a kernel is compiled for."""
        drops, problem = self.told[1], self.told[0]
        return {
            "CAUSAL": self.is_causal,
            "CAPS": problem.softcap != 0.0,
            "MASKED": self.is_masked,
            "DROPS": self.dropout is not None,
            "ALIGNED": not any(n % 4 for n in (drops.start, *drops.steps)),
            "DIM": self.q.shape[-1],
            "WIDTH": _width(self.q),
            "VALUE_DIM": self.v.shape[-1],
            "VALUE_WIDTH": _width(self.v),
            "ROWS": tile.rows,
            "COLUMNS": tile.columns,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }


def _width(heads: Like) -> int:
    """Return the width of heads as kernels have them, a power of two."""
    return max(NARROWEST, 1 << (heads.shape[-1] - 1).bit_length())


def _blocks(length: int, block: int) -> int:
    return -(-length // block)


def _four(mask: Tensor) -> Tensor:
    """Return a view of a mask of all four dims."""
    return mask.view((1,) * (4 - mask.dim()) + tuple(mask.shape))


def _seq_major(like: Tensor, shape) -> Tensor:
    """Return new heads (b, h, s, d) stored as (b, s, h, d)."""
    b, h, s, d = shape
    return like.new_empty(b, s, h, d).transpose(1, 2)
