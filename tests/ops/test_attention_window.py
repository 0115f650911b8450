"""Attention within a window equals that under a mask of the window, forward and every gradient, and makes nothing of
all pairs."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopar.ops import attention_window, autopar
from autopar.ops.counter_rng import contiguous_strides

STATE = torch.tensor([7, 1])
FORMS = ["plain", "keys", "pairs", "added", "documents", "dropout", "softcap", "sinks", "learned", "all"]


def real(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def band(rows: int, columns: int, window: int, causal: bool, first: int = 0) -> torch.Tensor:
    """Return which keys each query keeps."""
    behind = first + torch.arange(rows)[:, None] - torch.arange(columns)
    return (behind < window) & (behind >= 0 if causal else behind > -window)


def arguments_of(form: str, b: int, h: int, s: int, t: int) -> dict:
    """Return what an attention has beside a window."""
    found: dict = {"mask": None}
    if form in ("keys", "all"):
        found["mask"] = torch.rand(b, 1, 1, t) < 0.8
    if form == "pairs":
        found["mask"] = torch.rand(b, 1, s, t) < 0.8
    if form == "added":
        found["mask"] = real(1, h, s, t)
    if form == "learned":
        found["mask"] = real(1, h, s, t).requires_grad_()
    if form in ("documents", "all"):
        ids = (torch.rand(b, max(s, t)) < 4 / t).cumsum(-1)
        found |= {"documents": ids[:, :s], "key_documents": ids[:, :t]}
    if form in ("sinks", "all"):
        found["sinks"] = real(h).requires_grad_()
    if form in ("softcap", "all"):
        found["softcap"] = 0.7
    if form in ("dropout", "all"):
        found |= {"state": STATE, "p": 0.3, "stream": 2, "start": 0, "strides": contiguous_strides((b, h, s, t))}
    return found


def attend(q, k, v, causal: bool, scale=None, *, grad, mask, **others):
    """Return output, log-sum-exp and all gradients."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = autopar.attention(*leaves, mask, causal, scale, **others)
    wanted = [*leaves, *(x for x in (mask, others.get("sinks")) if x is not None and x.requires_grad)]
    return out, lse, *torch.autograd.grad(out, wanted, grad)


def compared(form: str, s: int, window: int, causal: bool, heads=(2, 1), b: int = 2) -> None:
    """Compare with a mask of the band."""
    h, few = heads
    q, k, v, grad = real(b, h, s, 4), real(b, few, s, 4), real(b, few, s, 6), real(b, h, s, 6)
    given = arguments_of(form, b, h, s, s)
    keep, mask = band(s, s, window, causal)[None, None], given["mask"]
    if mask is not None and mask.dtype != torch.bool:
        masked = mask.masked_fill(~keep, -torch.inf)
    else:
        masked = keep if mask is None else keep & mask
    expected = attend(q, k, v, False, grad=grad, **given | {"mask": masked})
    found = attend(q, k, v, causal, grad=grad, **given, window=window)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


CASES = list(itertools.product(FORMS, (True, False)))


@pytest.mark.parametrize("form, causal", CASES)
def test_equals_a_mask_of_the_window(form, causal, monkeypatch):
    monkeypatch.setattr(attention_window, "CPU_ROWS", 8)
    for seed, (s, window) in enumerate(((1, 1), (21, 1), (21, 3), (21, 21), (30, 9))):
        torch.manual_seed(seed)
        compared(form, s, window, causal)
