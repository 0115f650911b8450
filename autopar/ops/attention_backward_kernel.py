"""The backward of autopar/ops/attention_fused.py in Triton: of queries, and of keys and values.

Both make the weights again from the log-sum-exp. With weights P, dropped ones D and dP = grad v^T, dropped alike, the
gradient of the scores is P (dP - delta), delta the row sum of grad out, which the first kernel leaves for the others.
No program adds to what another one writes, so that results are the same in every run; gradients of keys and values are
summed over the heads of queries that read them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_tiles import kept, keys_seen, levels_at, of_head, queries_here, rows_at, scores_of, store_rows


@triton.jit
def queries_kernel(
    grad,
    q,
    k,
    v,
    out,
    lse,
    mask,
    delta,
    dq,
    steps,
    problem,
    drops,
    CAUSAL: tl.constexpr,
    CAPS: tl.constexpr,
    MASKED: tl.constexpr,
    DROPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the gradients of ROWS queries of a head, going over their keys as the forward does."""
    number, sample, head, first_row = queries_here(problem, ROWS)
    key_head = head // problem.group
    keys, values = of_head(k, steps.k, sample, key_head), of_head(v, steps.v, sample, key_head)
    added, start = of_head(mask, steps.mask, sample, head), of_head(drops.start, drops.steps, sample, head)
    row, column, rows = tl.arange(0, ROWS), tl.arange(0, COLUMNS), problem.rows
    query = rows_at(of_head(q, steps.q, sample, head), first_row, rows, steps.q[2], ROWS, DIM, WIDTH)
    dy = rows_at(of_head(grad, steps.grad, sample, head), first_row, rows, steps.grad[2], ROWS, VALUE_DIM, VALUE_WIDTH)
    y = rows_at(of_head(out, steps.out, sample, head), first_row, rows, steps.out[2], ROWS, VALUE_DIM, VALUE_WIDTH)
    of_rows = number.to(tl.int64) * rows + first_row
    level, shared = levels_at(lse + of_rows, row, rows - first_row), tl.sum(dy.to(tl.float32) * y.to(tl.float32), 1)
    tl.store(delta + of_rows + row, shared, mask=row < rows - first_row)
    whole, end = keys_seen(problem, first_row, ROWS, COLUMNS, CAUSAL)
    gradient = tl.zeros((ROWS, WIDTH), tl.float32)
    for EDGE in tl.static_range(2):
        for first_column in range(whole if EDGE else 0, end if EDGE else whole, COLUMNS):
            key = rows_at(keys, first_column, problem.keys, steps.k[2], COLUMNS, DIM, WIDTH)
            value = rows_at(values, first_column, problem.keys, steps.v[2], COLUMNS, VALUE_DIM, VALUE_WIDTH)
            places = first_row, first_column, row[:, None], column[None, :]
            scores, slope = scores_of(query, key, *places, problem, added, steps.mask, CAUSAL, CAPS, MASKED, EDGE)
            of_weights = tl.dot(dy, tl.trans(value), input_precision="ieee")
            if DROPS:
                keep = kept(drops, start, first_row, first_column, ROWS, COLUMNS, ALIGNED)
                of_weights = tl.where(keep, of_weights * drops.factor, 0.0)
            of_scores = tl.exp(scores - level[:, None]) * (of_weights - shared[:, None]) * slope
            gradient = tl.dot(of_scores.to(key.dtype), key, gradient, input_precision="ieee")
    gradient *= problem.scale
    store_rows(of_head(dq, steps.dq, sample, head), gradient, first_row, rows, steps.dq[2], ROWS, DIM, WIDTH)


@triton.jit
def keys_kernel(
    grad,
    q,
    k,
    v,
    lse,
    mask,
    delta,
    dk,
    dv,
    steps,
    problem,
    drops,
    CAUSAL: tl.constexpr,
    CAPS: tl.constexpr,
    MASKED: tl.constexpr,
    DROPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the gradients of COLUMNS keys of a head, and of their values, going over the queries that see them. Tiles
    are (COLUMNS, ROWS)."""
    blocks, key_heads = tl.cdiv(problem.keys, COLUMNS), problem.heads // problem.group
    number, first_column = tl.program_id(0) // blocks, tl.program_id(0) % blocks * COLUMNS
    sample, key_head = number // key_heads, number % key_heads
    row, column, rows, many = tl.arange(0, ROWS), tl.arange(0, COLUMNS), problem.rows, problem.keys
    key = rows_at(of_head(k, steps.k, sample, key_head), first_column, many, steps.k[2], COLUMNS, DIM, WIDTH)
    values = of_head(v, steps.v, sample, key_head)
    value = rows_at(values, first_column, many, steps.v[2], COLUMNS, VALUE_DIM, VALUE_WIDTH)
    begin, whole = 0, 0
    if CAUSAL:
        begin = tl.maximum(first_column - problem.first, 0) // ROWS * ROWS
        whole = tl.cdiv(tl.maximum(first_column + COLUMNS - 1 - problem.first, 0), ROWS) * ROWS
    of_keys = tl.zeros((COLUMNS, WIDTH), tl.float32)
    of_values = tl.zeros((COLUMNS, VALUE_WIDTH), tl.float32)
    for other in range(problem.group):
        head = key_head * problem.group + other
        queries, gradients = of_head(q, steps.q, sample, head), of_head(grad, steps.grad, sample, head)
        added, start = of_head(mask, steps.mask, sample, head), of_head(drops.start, drops.steps, sample, head)
        of_rows = (sample * problem.heads + head).to(tl.int64) * rows
        for WHOLE in tl.static_range(2):
            first, end = whole if WHOLE else begin, rows if WHOLE else tl.minimum(whole, rows)
            for first_row in range(first, end, ROWS):
                query = rows_at(queries, first_row, rows, steps.q[2], ROWS, DIM, WIDTH)
                dy = rows_at(gradients, first_row, rows, steps.grad[2], ROWS, VALUE_DIM, VALUE_WIDTH)
                level = levels_at(lse + of_rows + first_row, row, rows - first_row)
                shared = tl.load(delta + of_rows + first_row + row, mask=row < rows - first_row, other=0.0)
                places, closes = (first_row, first_column, row[None, :], column[:, None]), WHOLE == 0
                scores, slope = scores_of(key, query, *places, problem, added, steps.mask, CAUSAL, CAPS, MASKED, closes)
                weights = tl.exp(scores - level[None, :])
                of_weights, dropped = tl.dot(value, tl.trans(dy), input_precision="ieee"), weights
                if DROPS:
                    keep = tl.trans(kept(drops, start, first_row, first_column, ROWS, COLUMNS, ALIGNED))
                    of_weights = tl.where(keep, of_weights * drops.factor, 0.0)
                    dropped = tl.where(keep, weights, 0.0)
                of_values = tl.dot(dropped.to(dy.dtype), dy, of_values, input_precision="ieee")
                of_scores = weights * (of_weights - shared[None, :]) * slope
                of_keys = tl.dot(of_scores.to(query.dtype), query, of_keys, input_precision="ieee")
    of_keys, of_values = of_keys * problem.scale, of_values * drops.factor
    store_rows(of_head(dk, steps.dk, sample, key_head), of_keys, first_column, many, steps.dk[2], COLUMNS, DIM, WIDTH)
    of_head_values = of_head(dv, steps.dv, sample, key_head)
    store_rows(of_head_values, of_values, first_column, many, steps.dv[2], COLUMNS, VALUE_DIM, VALUE_WIDTH)
