"""Attention block by block, for what no fused kernel takes: products and a softmax that never hold all scores.

Blocks of queries go over blocks of keys with a running maximum and sum (Milakov and Gimelshein, arXiv 1805.02867;
FlashAttention, arXiv 2205.14135); the backward computes the weights of a block again from the log-sum-exp. Under a
causal mask blocks of later keys are left out. Scores are computed in the type of the log-sum-exp, whose range the
lowest number of a narrower type does not leave; on GPUs products of queries in bf16 or fp16 take what they multiply in
that type, as fused kernels do, and add up in fp32. Heads that share keys are rows of one product. Scores may be capped
before the mask, softcap * tanh(scores / softcap) (Gemma 2, arXiv 2408.00118), what is added to them may want its
gradient, and weights may be dropped by counter: no kernel of torch does any of it.

With weights P and dropped ones D = P mask / (1 - p) the output is D v, and the gradient of the scores P (dP - row sum
of grad out), where dP is grad v^T, dropped alike: what is dropped has no part in the row sum either.

Tensors are those of autopar/ops/attention_forms.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .attention_dropout import WeightDropout
from .attention_forms import Form, lse_dtype

aten = torch.ops.aten
BLOCK = 256  # queries, and keys
INF = float("inf")


def forward(
    q,
    k,
    v,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    block: int = BLOCK,
    first: int = 0,
    softcap: float = 0.0,
    dropout: WeightDropout | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (output, log-sum-exp); 0 and -inf for a query whose keys are all closed. `first`: the number of the first
    query, for a causal mask."""
    problem = _Problem(q, k, mask, causal, scale, block, first, softcap=softcap, dropout=dropout)
    out, lse = q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=problem.wide)
    for rows in problem.row_blocks():
        top, total, sum_ = problem.start(rows, v.shape[-1])
        for columns, scores, _ in problem.scores(rows):
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights = _exp_of_difference(scores, new_top)
            shrink = _exp_of_difference(top, new_top)
            total = total * shrink + weights.sum(-1, keepdim=True)
            weights = problem.dropped(weights, rows, columns)
            sum_ = sum_.mul_(shrink).add_(problem.times(weights, _part(v, columns)))
            top = new_top
        _part(out, rows).copy_(problem.joined(problem.grown(sum_ / total.masked_fill(total == 0, 1.0))))
        _part(lse, rows).copy_(problem.joined(top + total.log()).squeeze(-1))
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
    block: int = BLOCK,
    first: int = 0,
    lse_is_exact: bool = False,
    softcap: float = 0.0,
    dmask: Tensor | None = None,
    dropout: WeightDropout | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. `lse_is_exact`: nothing of the log-sum-exp is lost in the mask. The gradient
    of the mask is added to `dmask` (the mask's shape, wide type)."""
    problem = _Problem(q, k, mask, causal, scale, block, first, lse_is_exact, softcap, dropout)
    dq, dk, dv = torch.empty_like(q), *(torch.zeros_like(x, dtype=problem.wide) for x in (k, v))
    for rows in problem.row_blocks():
        of_rows = _gradients_of_rows(problem, rows, grad, v, out, lse, dk, dv, dmask)
        _part(dq, rows).copy_(problem.joined(of_rows))
        del of_rows
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _gradients_of_rows(
    problem: _Problem, rows: slice, grad, v, out, lse, dk: Tensor, dv: Tensor, dmask: Tensor | None
) -> Tensor:
    """Return the gradient of a block of queries, and add what they give to those of keys, values and mask."""
    query, grad_rows = problem.rows_of(problem.q, rows), problem.rows_of(grad, rows)
    shared = (grad_rows * problem.rows_of(out, rows)).sum(-1, keepdim=True)
    grad_rows = problem.grown(grad_rows)
    top, total = problem.statistics(rows, lse)
    dq_rows = torch.zeros_like(query)
    for columns, scores, slope in problem.scores(rows, with_slope=True):
        p = _exp_of_difference(scores, top).div_(total)
        dp = problem.times(grad_rows, _part(v, columns).transpose(-1, -2))
        kept = problem.kept(rows, columns)
        _part(dv, columns).add_(problem.transposed_times(p if kept is None else p * kept, grad_rows))
        ds = p.mul_((dp if kept is None else dp.mul_(kept)).sub_(shared))
        if dmask is not None:
            problem.add_to(dmask, ds, rows, columns)
        ds = (ds if slope is None else ds.mul_(slope)).mul_(problem.scale)
        dq_rows += problem.times(ds, _part(problem.k, columns))
        _part(dk, columns).add_(problem.transposed_times(ds, query))
    return dq_rows


BLOCKS = Form("blocks", forward, backward, takes_first=True)


def form_with(softcap: float, dmask: Tensor | None = None, dropout: WeightDropout | None = None) -> Form:
    """Return the form for scores that are capped, whose mask has its gradient added to `dmask`, or whose weights are
    dropped."""
    attend = partial(forward, softcap=softcap, dropout=dropout)
    attend_backward = partial(backward, softcap=softcap, dropout=dropout, dmask=dmask)
    return Form("blocks", attend, attend_backward, takes_first=True)


def _exp_of_difference(a: Tensor, b: Tensor) -> Tensor:
    """Return exp(a - b), 0 where a is -inf."""
    return (a - b.masked_fill(b == -INF, 0.0)).exp_()


@dataclass(frozen=True)
class _Problem:
    """Blocks of rows (queries) are (b, h_kv, h / h_kv, rows, d) in the wide type, their scores (..., rows, columns)."""

    q: Tensor
    k: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    block: int
    first: int
    lse_is_exact: bool = False
    softcap: float = 0.0
    dropout: WeightDropout | None = None

    @property
    def wide(self) -> torch.dtype:
        return lse_dtype(self.q.dtype)

    def row_blocks(self) -> Iterator[slice]:
        return _slices(self.q.shape[2], self.block)

    def rows_of(self, x: Tensor, rows: slice) -> Tensor:
        return _part(x, rows).to(self.wide).unflatten(1, (self.k.shape[1], -1))

    def joined(self, x: Tensor) -> Tensor:
        """Return a block of rows as (b, h, rows, d)."""
        return x.flatten(1, 2)

    def start(self, rows: slice, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the running maximum, the sum of the weights and of the weighted values before any key."""
        shape = (self.q.shape[0], self.k.shape[1], self.q.shape[1] // self.k.shape[1], rows.stop - rows.start)
        new = self.q.new_full((*shape, 1), -INF, dtype=self.wide)
        return new, torch.zeros_like(new), self.q.new_zeros((*shape, width), dtype=self.wide)

    def scores(self, rows: slice, with_slope: bool = False) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Yield the blocks of keys of a block of queries with their scores, scaled, capped and masked, and, if it is
        wanted, the slope of a cap."""
        query, places = self.rows_of(self.q, rows), range(self.first + rows.start, self.first + rows.stop)
        for columns in _slices(min(self.k.shape[2], places.stop if self.causal else self.k.shape[2]), self.block):
            scores = self.times(query, _part(self.k, columns).transpose(-1, -2)).mul_(self.scale)
            slope = None
            if self.softcap:
                capped = scores.div_(self.softcap).tanh_()
                slope = 1.0 - capped.square() if with_slope else None
                scores = capped.mul_(self.softcap)
            if self.causal and columns.stop > places.start + 1:
                at = [torch.arange(x.start, x.stop, device=scores.device) for x in (places, columns)]
                scores.masked_fill_(at[0].unsqueeze(-1) < at[1], -INF)
            if self.mask is not None:
                own = _block_of_mask(self.mask, rows, columns)
                scores += own.unflatten(1, (self.k.shape[1], -1)) if own.shape[1] > 1 else own.unsqueeze(1)
            yield columns, scores, slope

    def kept(self, rows: slice, columns: slice) -> Tensor | None:
        """Return whether each weight of a block is kept, None if nothing is dropped."""
        if self.dropout is None:
            return None
        (samples, heads), device = self.q.shape[:2], self.q.device
        return self.dropout.kept(samples, heads, rows, columns, device).unflatten(1, (self.k.shape[1], -1))

    def dropped(self, weights: Tensor, rows: slice, columns: slice) -> Tensor:
        """Set weights of a block that are dropped to zero, in place."""
        kept = self.kept(rows, columns)
        return weights if kept is None else weights.mul_(kept)

    def grown(self, x: Tensor) -> Tensor:
        """Return what is made of kept weights as it is of weights that are as much larger as fewer are kept."""
        return x if self.dropout is None else x * self.dropout.factor

    def add_to(self, dmask: Tensor, ds: Tensor, rows: slice, columns: slice) -> None:
        """Add the gradient of a block of scores to that of the mask."""
        into = _block_of_mask(dmask, rows, columns)
        into += self.joined(ds).sum_to_size(into.shape)

    def statistics(self, rows: slice, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return (m, l) of each row with weights exp(scores - m) / l. The log-sum-exp is m with l = 1, but where a mask
        has numbers so large that it is lost in them."""
        if self.mask is None or self.lse_is_exact:
            top = self.rows_of(lse.unsqueeze(-1), rows)
            return top, torch.ones_like(top)
        top, total, _ = self.start(rows, 0)
        for _, scores, _ in self.scores(rows):
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            total = total * _exp_of_difference(top, new_top) + _exp_of_difference(scores, new_top).sum(-1, keepdim=True)
            top = new_top
        return top, total.masked_fill_(total == 0, 1.0)

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply a block of rows (b, h_kv, n, rows, i) by matrices of its keys' heads (b, h_kv, i, j)."""
        return self._product(a.flatten(2, 3), b).unflatten(2, a.shape[2:4])

    def transposed_times(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the sum over rows and heads that share keys: (b, h_kv, n, rows, i), (..., j) -> (b, h_kv, i, j)."""
        return self._product(a.flatten(2, 3).transpose(-1, -2), b.flatten(2, 3))

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a product of matrices (b, h_kv, ...) in the wide type."""
        if self.q.dtype == self.wide or not multiplies_narrow(self.q.device):
            return a @ b.to(self.wide)
        one, other = (x.to(self.q.dtype).flatten(0, 1) for x in (a, b))
        return widened_product(one, other, self.wide).unflatten(0, a.shape[:2])


def multiplies_narrow(device: torch.device) -> bool:
    """Return whether products of narrow matrices are wide there: torch has them on GPUs, and where it only counts."""
    return device.type in ("cuda", "meta")


def widened_product(a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """Return the products of narrow matrices (n, i, j) and (n, j, k), added up and returned in a wide type."""
    return aten.bmm.dtype(a, b, wide)


def _slices(length: int, block: int) -> Iterator[slice]:
    for start in range(0, length, block):
        yield slice(start, min(start + block, length))


def _block_of_mask(mask: Tensor, rows: slice, columns: slice) -> Tensor:
    """Return a view of the block of a mask, with all four dims."""
    mask = mask.view((1,) * (4 - mask.dim()) + tuple(mask.shape))
    mask = _part(mask, rows) if mask.shape[2] > 1 else mask
    return mask.narrow(3, columns.start, columns.stop - columns.start) if mask.shape[3] > 1 else mask


def _part(x: Tensor, of: slice) -> Tensor:
    """Return some of the queries or keys of a tensor (b, h, s, ...)."""
    return x.narrow(2, of.start, of.stop - of.start)
