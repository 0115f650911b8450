"""Attention within a window equals that under a mask of the window, forward and every gradient, and makes nothing of
all pairs."""

from __future__ import annotations

import itertools
import random
from functools import partial

import pytest
import torch

from autopar.ops import attention, attention_window, autopar
from autopar.ops.counter_rng import contiguous_strides

from ..helpers.fake_allocations import counted, nbytes

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


@pytest.mark.slow
def test_lengths_and_windows_at_random():
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for form, causal, window in itertools.product(FORMS, (True, False), (1, 3, 64, 1000)):
        compared(form, rng.choice((1, 100, 700)), window, causal, heads=rng.choice(((4, 4), (4, 2), (4, 1))))


@pytest.mark.parametrize("causal, first", itertools.product((True, False), (-30, -9, -1, 4, 9, 30)))
def test_rows_of_other_places(causal, first, monkeypatch):
    """A device has some rows, and keys from any place on: before the rows, around them, or beyond the window."""
    monkeypatch.setattr(attention_window, "CPU_ROWS", 4)
    torch.manual_seed(0)
    q, k, v, grad = real(2, 4, 9, 4), real(2, 2, 11, 4), real(2, 2, 11, 4), real(2, 4, 9, 4)
    for window in (1, 5, 8):
        expected = attend(q, k, v, False, grad=grad, mask=band(9, 11, window, causal, first))
        found = attend(q, k, v, causal, grad=grad, mask=None, first=first, window=window)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_heads_that_are_read():
    """Queries of some heads read those of their groups."""
    torch.manual_seed(0)
    q, k, v, grad = real(1, 3, 20, 4), real(1, 4, 20, 4), real(1, 4, 20, 4), real(1, 3, 20, 4)
    heads = {"head": 1, "group": 2}
    expected = attend(q, k, v, False, grad=grad, mask=band(20, 20, 6, True), **heads)
    torch.testing.assert_close(attend(q, k, v, True, grad=grad, mask=None, window=6, **heads), expected)


@pytest.mark.parametrize("causal, form", [(True, "plain"), (False, "plain"), (True, "keys"), (True, "softcap")])
def test_nothing_of_all_pairs_is_made(causal, form):
    """The largest tensor inside is a range's mask or scores."""
    length, window = 4096, 128
    given = arguments_of(form, 1, 2, length, length)
    mask = given.pop("mask")

    def make(backward):
        q, k, v = (torch.empty(1, 2, length, 8) for _ in range(3))
        lse = torch.empty(1, 2, length)
        return [*((q, q, k, v, q.clone(), lse) if backward else (q, k, v)), given_mask(), causal, None]

    def given_mask():
        return None if mask is None else torch.empty(mask.shape, dtype=torch.bool)

    for body in (attention.attention, attention.attention_bw):
        of_op = partial(body._init_fn, **given, window=window)
        results, _, count = counted(of_op, partial(make, body is attention.attention_bw))
        assert count.peak_bytes - nbytes(results) < length**2 / 2, "half of a bool for each pair"
