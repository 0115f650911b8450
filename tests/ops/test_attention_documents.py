"""Attention among packed documents equals that under a mask of all pairs, ranges of queries and of keys alike."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from autopar.ops import attention_documents, autopar


def real(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def documents(samples: int, length: int, most: int = 4) -> torch.Tensor:
    """Return the numbers of documents of random lengths."""
    return (torch.rand(samples, length) < most / length).cumsum(-1)


def eager(q, k, v, mask, documents, key_documents, causal: bool, first: int):
    """Return output and log-sum-exp by a mask of all pairs."""
    keep = (documents.unsqueeze(-1) == key_documents.unsqueeze(-2)).unsqueeze(1)
    if causal:
        keep = keep & (torch.arange(k.shape[2]) <= first + torch.arange(q.shape[2])[:, None])
    added = torch.zeros(()) if mask is None else mask
    added = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if added.dtype == torch.bool else added
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + added).masked_fill(~keep, -torch.inf)
    closed = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(closed, 0.0).softmax(-1).masked_fill(closed, 0.0)
    return weights @ v, scores.logsumexp(-1)


MASKS = {
    "none": lambda b, s, t: None,
    "keys": lambda b, s, t: torch.rand(b, 1, 1, t) < 0.8,
    "pairs": lambda b, s, t: torch.rand(b, 1, s, t) < 0.8,
    "added": lambda b, s, t: real(s, t),
}


@pytest.mark.parametrize("causal, mask, rows", itertools.product((True, False), MASKS, (3, 4)))
def test_equals_a_mask_of_all_pairs(causal, mask, rows, monkeypatch):
    monkeypatch.setattr(attention_documents, "CPU_ROWS", rows)
    for seed, (first, s, t) in enumerate(((0, 11, 11), (5, 6, 11), (4, 5, 13), (0, 7, 3))):
        torch.manual_seed(seed)
        q, k, v = real(2, 4, s, 4), real(2, 2, t, 4), real(2, 2, t, 6)
        ids, added = documents(2, max(t, first + s)), MASKS[mask](2, s, t)
        of = ids[:, first : first + s], ids[:, :t]
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        expected, expected_lse = eager(*leaves, added, *of, causal, first)
        grad = real(*expected.shape)
        expected.backward(grad)
        out, lse = autopar.attention(q, k, v, added, causal, None, first, 0, 0, *of)
        torch.testing.assert_close((out, lse), (expected, expected_lse), rtol=1e-12, atol=1e-12)
        found = autopar.attention_bw(grad, q, k, v, out, lse, added, causal, None, first, 0, 0, *of)
        torch.testing.assert_close(found, tuple(x.grad for x in leaves), rtol=1e-12, atol=1e-12)


def test_costs_what_documents_need(monkeypatch):
    """On a CPU the pairs that are computed are those of documents, up to ranges of queries."""
    monkeypatch.setattr(attention_documents, "CPU_ROWS", 4)
    ids = torch.arange(16).div(4, rounding_mode="floor").expand(2, -1)
    q, pairs = real(2, 2, 16, 4), []
    ranges = attention_documents.ranges
    for causal, other in ((False, False), (True, False), (False, True)):
        found = ranges(q, q, causal, 0, ids, ids + 16 if other else ids)
        sizes = [(x.rows.stop - x.rows.start, x.columns.stop - x.columns.start) for x in found]
        pairs.append(sum(rows * columns for rows, columns in sizes))
    assert pairs == [4 * 16, 4 * 16, 0]


def test_gradients_pass_through_autograd():
    torch.manual_seed(0)
    q, k, v, ids = real(1, 2, 5, 4), real(1, 1, 5, 4), real(1, 1, 5, 4), torch.tensor([[0, 0, 1, 1, 1]])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    attend = partial(autopar.attention, mask=None, causal=True, scale=None, documents=ids, key_documents=ids)
    assert torch.autograd.gradcheck(lambda *x: attend(*x)[0], leaves)
