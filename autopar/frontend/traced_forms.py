"""Functions of torch that cannot be traced as they are, and the same mathematics in ops that can.

Some read a value in the middle of their C++ (`cov`), some have outputs whose sizes depend on values (`ctc_loss`,
`lstsq`), and of one the decomposition that torch traces gives other numbers than its kernel (`multilabel_margin_loss`).
Inside of `traced_forms` a call of one of them runs the form below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..errors import CaptureError
from ..ops import autopar

REDUCTIONS = ("none", "mean", "sum")


class traced_forms(TorchFunctionMode):  # noqa: N801  (a context manager)
    """Inside, calls of the functions in FORMS run their forms."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return FORMS.get(function, function)(*args, **(kwargs or {}))


def cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """Return the covariance matrix of the rows of `input`, (v, n) or (n,). Where ATen warns that no degree of freedom
    is left, and divides by zero, this does as well, without the warning."""
    if input.dim() > 2:
        raise CaptureError(
            f"cov takes one or two dims, not {input.dim()}", shape=tuple(input.shape), fix="give it one matrix"
        )
    x = input.reshape(1, -1) if input.dim() < 2 else input
    weights = [w for w in (fweights, aweights) if w is not None]
    w = weights[0] * weights[1] if len(weights) == 2 else weights[0] if weights else None
    total = x.shape[1] if w is None else w.sum()
    mean = (x if w is None else x * w).sum(1, keepdim=True) / total
    if aweights is not None and correction:
        freedom = total - correction * (w * aweights).sum() / total
    else:
        freedom = total - correction
    freedom = max(freedom, 0) if w is None else freedom.clamp_min(0)
    centered = x - mean
    products = centered @ (centered if w is None else centered * w).mH
    return (products / freedom if w is not None or freedom else products / torch.zeros_like(products)).squeeze()


def corrcoef(input: Tensor) -> Tensor:
    """Return the correlation matrix of the rows of `input`, (v, n) or (n,)."""
    c = cov(input)
    if not c.dim():
        return c / c
    deviation = torch.diagonal(c).real.sqrt() if c.is_complex() else torch.diagonal(c).sqrt()
    c = c / deviation.unsqueeze(1) / deviation.unsqueeze(0)
    return torch.complex(c.real.clamp(-1, 1), c.imag.clamp(-1, 1)) if c.is_complex() else c.clamp(-1, 1)


class LeastSquares:
    """The result of `lstsq` in a traced model: the solution. Its other fields have sizes that depend on the rank of the
    matrix."""

    def __init__(self, solution: Tensor):
        self.solution = solution

    def __getitem__(self, index: int) -> Tensor:
        return self.solution if index == 0 else _refuse_field(f"field {index}")

    def __iter__(self):
        return _refuse_field("fields beside the solution")

    def __getattr__(self, name: str):
        return _refuse_field(name)


def _refuse_field(name: str):
    raise CaptureError(
        f"torch.linalg.lstsq was asked for its {name}, whose size depends on the rank of the matrix",
        fix="take .solution, and compute residuals from it",
    )


def lstsq(A: Tensor, B: Tensor, rcond: float | None = None, *, driver: str | None = None) -> LeastSquares:  # noqa: N803
    """Return the solution of least squares and smallest norm, by the pseudo-inverse, through which torch differentiates
    it as well."""
    pinv = torch.linalg.pinv(A) if rcond is None else torch.linalg.pinv(A, rtol=rcond)
    is_vector = B.dim() == 1 or (B.dim() == A.dim() - 1 and B.shape == A.shape[:-1])
    return LeastSquares((pinv @ B.unsqueeze(-1)).squeeze(-1) if is_vector else pinv @ B)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths,
    target_lengths,
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Compute what torch.nn.functional.ctc_loss does, and torch.ctc_loss, whose reduction is a number."""
    is_batched = log_probs.dim() == 3
    if not is_batched:
        log_probs = log_probs.unsqueeze(1)
    samples, device = log_probs.shape[1], log_probs.device
    input_lengths, target_lengths = (_lengths(x, samples, device) for x in (input_lengths, target_lengths))
    targets = targets.to(torch.int64)
    loss = autopar.ctc(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    if zero_infinity:
        loss = torch.where(loss == float("inf"), 0.0, loss)
    if reduction in ("mean", 1):
        loss = loss / target_lengths.clamp_min(1)
    return _reduced(loss if is_batched else loss.squeeze(0), reduction)


def _lengths(lengths: Tensor | Sequence[int] | int, samples: int, device: torch.device) -> Tensor:
    if isinstance(lengths, Tensor):
        return lengths.to(torch.int64).reshape(samples)
    lengths = [lengths] if isinstance(lengths, int) else list(lengths)
    if len(set(lengths)) == 1:  # made for any number of samples, so that a part of the batch makes its own
        return torch.full((samples,), lengths[0], dtype=torch.int64, device=device)
    return torch.tensor(lengths, dtype=torch.int64, device=device)


def multilabel_margin_loss(
    input: Tensor, target: Tensor, size_average=None, reduce=None, reduction: str = "mean"
) -> Tensor:
    """Compute what torch.nn.functional.multilabel_margin_loss does: hinge losses of all pairs of a target, of those
    before the first -1, and another class, (n, c), (n, c) -> (n,) or reduced."""
    classes = input.shape[-1]
    is_end = (target < 0).to(torch.int64)
    is_listed = is_end.cumsum(-1) == 0  # (n, c): places before the first -1
    listed = torch.where(is_listed, target, 0)
    hits = torch.zeros_like(input).scatter_add(
        -1, listed, is_listed.to(input.dtype)
    )  # (n, c): how often a class is a target
    picked = input.gather(-1, listed)
    margins = (1 - picked.unsqueeze(-1) + input.unsqueeze(-2)).clamp_min(0)  # (n, target, class)
    counted = is_listed.unsqueeze(-1) & (hits == 0).unsqueeze(-2)
    loss = torch.where(counted, margins, 0).sum((-2, -1)) / classes
    return _reduced(loss, _legacy(size_average, reduce, reduction))


def _legacy(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    """Return the reduction that the arguments which torch has deprecated ask for, `reduction` if they are not given."""
    if size_average is None and reduce is None:
        return reduction
    return "none" if reduce is False else "sum" if size_average is False else "mean"


def _reduced(loss: Tensor, reduction: str | int) -> Tensor:
    reduction = REDUCTIONS[reduction] if isinstance(reduction, int) else reduction
    if reduction not in REDUCTIONS:
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


FORMS: dict[Callable, Callable] = {
    torch.cov: cov,
    torch.Tensor.cov: cov,
    torch.corrcoef: corrcoef,
    torch.Tensor.corrcoef: corrcoef,
    torch.linalg.lstsq: lstsq,
    F.ctc_loss: ctc_loss,
    torch.ctc_loss: ctc_loss,
    F.multilabel_margin_loss: multilabel_margin_loss,
}
