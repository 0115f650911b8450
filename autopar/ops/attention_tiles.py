"""Tiles of an attention's scores in Triton: what is added to them, closed, capped, and which weights are kept.

Places of queries and of keys are tensors that broadcast to a tile: (rows, 1) and (1, columns), or the other way round
for a tile that has keys as its rows. Which weights are dropped is said by counter_rng.py, whose words these are: a word
serves four neighbours, so that a tile draws one for every four keys, or two where rows do not begin with a word.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_at(base, first, rows, step, COUNT: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Load rows (COUNT, WIDTH) of DIM adjacent elements, `step` apart, from number `first` on: zeros behind them, and
    for rows that are not there."""
    row, element = tl.arange(0, COUNT)[:, None], tl.arange(0, WIDTH)[None, :]
    here = (row < rows - first) & (element < DIM)
    return tl.load(_row(base, first, step) + row * step + element, mask=here, other=0.0)


@triton.jit
def store_rows(base, value, first, rows, step, COUNT: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Store rows (COUNT, WIDTH), but for what `rows_at` adds to them."""
    row, element = tl.arange(0, COUNT)[:, None], tl.arange(0, WIDTH)[None, :]
    here = (row < rows - first) & (element < DIM)
    tl.store(_row(base, first, step) + row * step + element, value.to(base.dtype.element_ty), mask=here)


@triton.jit
def _row(base, first, step):
    """Return where a row begins, whose number times the step may be beyond 32 bits; those of a tile are not."""
    return base + tl.cast(first, tl.int64) * step


@triton.jit
def of_head(base, steps, sample, head):
    """Return where a head of a sample begins."""
    return base + sample.to(tl.int64) * steps[0] + head.to(tl.int64) * steps[1]


@triton.jit
def queries_here(problem, ROWS: tl.constexpr):
    """Return the number of this program's head among those of all samples, its sample, its head and the first of its
    ROWS queries. Programs with the most keys to go over begin first."""
    blocks = tl.cdiv(problem.rows, ROWS)
    number, block = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks
    return number, number // problem.heads, number % problem.heads, block * ROWS


@triton.jit
def keys_seen(problem, first_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr):
    """Return up to which key tiles are seen whole by all of ROWS queries, and up to which any is seen."""
    whole, end = problem.keys // COLUMNS * COLUMNS, problem.keys
    if CAUSAL:
        whole = tl.minimum(whole, tl.maximum(problem.first + first_row + 1, 0) // COLUMNS * COLUMNS)
        end = tl.minimum(end, tl.maximum(problem.first + first_row + ROWS, 0))
    return whole, end


@triton.jit
def levels_at(lse, row, rows):
    """Load log-sum-exps; infinite, so that weights are 0, for queries that are not there or see no key."""
    level = tl.load(lse + row, mask=row < rows, other=float("inf"))
    return tl.where(level == float("-inf"), float("inf"), level)


@triton.jit
def scores_of(
    one,
    other,
    first_row,
    first_column,
    row,
    column,
    problem,
    mask,
    steps,
    CAUSAL: tl.constexpr,
    CAPS: tl.constexpr,
    MASKED: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Return the scores of a tile, capped, with what a mask adds to them, -inf for keys that are closed, and the slope
    of the cap, softcap * tanh(scores / softcap). Only a tile at an EDGE has keys that are closed by their place."""
    scores, slope = tl.dot(one, tl.trans(other), input_precision="ieee") * problem.scale, 1.0
    if CAPS:
        tanh = 1.0 - 2.0 / (tl.exp(2.0 / problem.softcap * scores) + 1.0)
        scores, slope = problem.softcap * tanh, 1.0 - tanh * tanh
    if MASKED:
        at = _row(_row(mask, first_row, steps[2]), first_column, steps[3]) + (row * steps[2] + column * steps[3])
        here = (row < problem.rows - first_row) & (column < problem.keys - first_column)
        scores += tl.load(at, mask=here, other=0.0).to(tl.float32)
    if EDGE:
        is_open = column < problem.keys - first_column
        if CAUSAL:
            is_open = is_open & (column <= row + (problem.first + first_row - first_column))
        scores = tl.where(is_open, scores, float("-inf"))
    return scores, slope


@triton.jit
def squares64(counter, key):
    """Return 64 random bits for each counter, as counter_rng.squares64."""
    y = counter * key
    z = y + key
    x = _swapped(y * y + y)
    x = _swapped(x * x + z)
    x = _swapped(x * x + y)
    t = x * x + z
    x = _swapped(t)
    return t ^ ((x * x + y).to(tl.uint64) >> 32).to(tl.int64)


@triton.jit
def _swapped(x):
    return (x.to(tl.uint64) >> 32).to(tl.int64) | (x << 32)


@triton.jit
def kept(drops, start, first_row, first_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr):
    """Return which weights (ROWS, COLUMNS) of a tile are kept: those from a query and a key, a multiple of four, on, of
    the head whose first weight is number `start`. ALIGNED: every row begins with a word."""
    first = start + tl.cast(first_row, tl.int64) * drops.steps[2] + first_column
    place = first + (tl.arange(0, ROWS)[:, None] * drops.steps[2] + 4 * tl.arange(0, COLUMNS // 4)[None, :])
    word = squares64(place >> 2, drops.key)
    if not ALIGNED:
        shift = (place & 3) * 16
        behind = (squares64((place >> 2) + 1, drops.key) << (48 - shift)) << 16
        word = (word.to(tl.uint64) >> shift.to(tl.uint64)).to(tl.int64) | behind
    low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
    even = tl.interleave(_is_kept(low << 16, drops), _is_kept(high << 16, drops))
    odd = tl.interleave(_is_kept(low, drops), _is_kept(high, drops))
    return tl.interleave(even, odd) != 0


@triton.jit
def _is_kept(upper, drops):
    """Return whether the upper 16 bits, a signed number, are at least as much as one that is kept."""
    return ((upper >> 16) >= drops.least).to(tl.int8)
