"""The forward of autopar/ops/attention_fused.py in Triton.

A program makes the output of ROWS queries of a head: it goes over their keys, COLUMNS at a time, with a running maximum
and sum of the weights. Keys that all of its queries see come first, so that only the last tiles compare places.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_tiles import kept, keys_seen, of_head, queries_here, rows_at, scores_of, store_rows


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    mask,
    out,
    lse,
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
    """Compute the output and the log-sum-exp of ROWS queries of a head."""
    number, sample, head, first_row = queries_here(problem, ROWS)
    key_head = head // problem.group
    keys, values = of_head(k, steps.k, sample, key_head), of_head(v, steps.v, sample, key_head)
    added, start = of_head(mask, steps.mask, sample, head), of_head(drops.start, drops.steps, sample, head)
    query = rows_at(of_head(q, steps.q, sample, head), first_row, problem.rows, steps.q[2], ROWS, DIM, WIDTH)
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    whole, end = keys_seen(problem, first_row, ROWS, COLUMNS, CAUSAL)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS, VALUE_WIDTH), tl.float32)
    for EDGE in tl.static_range(2):
        for first_column in range(whole if EDGE else 0, end if EDGE else whole, COLUMNS):
            key = rows_at(keys, first_column, problem.keys, steps.k[2], COLUMNS, DIM, WIDTH)
            places = first_row, first_column, row[:, None], column[None, :]
            scores, _ = scores_of(query, key, *places, problem, added, steps.mask, CAUSAL, CAPS, MASKED, EDGE)
            new_top = tl.maximum(top, tl.max(scores, 1))
            finite = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights, shrink = tl.exp(scores - finite[:, None]), tl.exp(top - finite)
            total = total * shrink + tl.sum(weights, 1)
            top = new_top
            if DROPS:
                weights = tl.where(kept(drops, start, first_row, first_column, ROWS, COLUMNS, ALIGNED), weights, 0.0)
            value = rows_at(values, first_column, problem.keys, steps.v[2], COLUMNS, VALUE_DIM, VALUE_WIDTH)
            weighted *= shrink[:, None]
            weighted = tl.dot(weights.to(value.dtype), value, weighted, input_precision="ieee")
    weighted *= (drops.factor / tl.where(total == 0.0, 1.0, total))[:, None]
    store_rows(
        of_head(out, steps.out, sample, head),
        weighted,
        first_row,
        problem.rows,
        steps.out[2],
        ROWS,
        VALUE_DIM,
        VALUE_WIDTH,
    )
    level = lse + number.to(tl.int64) * problem.rows + first_row
    tl.store(level + row, top + tl.log(total), mask=row < problem.rows - first_row)
