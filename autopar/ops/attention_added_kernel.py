"""The gradient of what is added to an attention's scores, in Triton: autopar/ops/attention_fused.py.

A program has a tile of that gradient: the sum, over the samples and the heads that it is added to, of the gradients of
their scores, which are made again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_tiles import kept, levels_at, of_head, rows_at, scores_of


@triton.jit
def added_kernel(
    grad,
    q,
    k,
    v,
    lse,
    mask,
    delta,
    dmask,
    samples,
    mask_samples,
    mask_heads,
    steps,
    problem,
    drops,
    CAUSAL: tl.constexpr,
    CAPS: tl.constexpr,
    DROPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add a tile's gradient to what is there."""
    row_blocks, column_blocks = tl.cdiv(problem.rows, ROWS), tl.cdiv(problem.keys, COLUMNS)
    number, tile = tl.program_id(0) // (row_blocks * column_blocks), tl.program_id(0) % (row_blocks * column_blocks)
    mask_sample, mask_head = number // mask_heads, number % mask_heads
    first_row, first_column = tile // column_blocks * ROWS, tile % column_blocks * COLUMNS
    row, column, rows, many = tl.arange(0, ROWS), tl.arange(0, COLUMNS), problem.rows, problem.keys
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    many_samples, many_heads = samples // mask_samples, problem.heads // mask_heads
    if CAUSAL:
        if first_column > first_row + ROWS - 1 + problem.first:
            many_samples = 0
    for other_sample in range(many_samples):
        for other_head in range(many_heads):
            sample, head = mask_sample + other_sample * mask_samples, mask_head + other_head * mask_heads
            key_head, of_rows = head // problem.group, (sample * problem.heads + head).to(tl.int64) * rows + first_row
            query = rows_at(of_head(q, steps.q, sample, head), first_row, rows, steps.q[2], ROWS, DIM, WIDTH)
            gradients = of_head(grad, steps.grad, sample, head)
            dy = rows_at(gradients, first_row, rows, steps.grad[2], ROWS, VALUE_DIM, VALUE_WIDTH)
            keys, values = of_head(k, steps.k, sample, key_head), of_head(v, steps.v, sample, key_head)
            key = rows_at(keys, first_column, many, steps.k[2], COLUMNS, DIM, WIDTH)
            value = rows_at(values, first_column, many, steps.v[2], COLUMNS, VALUE_DIM, VALUE_WIDTH)
            level = levels_at(lse + of_rows, row, rows - first_row)
            shared = tl.load(delta + of_rows + row, mask=row < rows - first_row, other=0.0)
            places, added = (
                (first_row, first_column, row[:, None], column[None, :]),
                of_head(mask, steps.mask, sample, head),
            )
            scores, _ = scores_of(query, key, *places, problem, added, steps.mask, CAUSAL, CAPS, True, True)
            of_weights = tl.dot(dy, tl.trans(value), input_precision="ieee")
            if DROPS:
                start = of_head(drops.start, drops.steps, sample, head)
                keep = kept(drops, start, first_row, first_column, ROWS, COLUMNS, ALIGNED)
                of_weights = tl.where(keep, of_weights * drops.factor, 0.0)
            total += tl.exp(scores - level[:, None]) * (of_weights - shared[:, None])
    at = of_head(dmask, steps.dmask, mask_sample, mask_head)
    at = at + first_row.to(tl.int64) * steps.dmask[2] + first_column.to(tl.int64) * steps.dmask[3]
    at = at + (row[:, None] * steps.dmask[2] + column[None, :] * steps.dmask[3])
    here = (row < rows - first_row)[:, None] & (column < many - first_column)[None, :]
    tl.store(at, tl.load(at, mask=here) + total, mask=here)
