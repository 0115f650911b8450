"""Caps, sinks and what is added to scores: values and every gradient of the canonical attention against its formula."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from autopar.ops import autopar

LOWEST = torch.finfo(torch.float64).min
MASKS = [None, (2, 4, 7, 7), (1, 4, 7, 7), (1, 1, 7, 7), (4, 1, 7), (2, 1, 1, 7), (1, 4, 7, 1)]


def formula(q, k, v, mask, causal, sinks, softcap):
    """Return attention by a softmax over all scores."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * 0.3
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    scores = scores if mask is None else scores + mask
    if sinks is None:
        return scores.softmax(-1) @ v
    column = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


def mask_of(shape, closes: bool):
    """Return numbers to add; a lowest one may close some keys of all queries, and all keys of one."""
    mask = torch.randn(shape, dtype=torch.float64)
    if closes and mask.shape[-1] > 1:
        mask[..., 1] = LOWEST
    if closes and mask.shape[-2] > 1:
        mask[..., 2, :] = LOWEST
    return mask


@pytest.mark.parametrize("causal, softcap, has_sinks", itertools.product((False, True), (0.0, 0.7), (False, True)))
def test_as_the_formula(causal, softcap, has_sinks):
    seed = random.randrange(10**6)
    print("seed", seed)
    torch.manual_seed(seed)
    for shape, is_learned, closes in itertools.product(MASKS, (False, True), (False, True)):
        if shape is None and is_learned or causal and closes:  # beside a causal mask nothing closes keys
            continue
        q, k, v = (torch.randn(2, h, 7, 5, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
        mask = None if shape is None else mask_of(shape, closes).requires_grad_(is_learned)
        sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if has_sinks else None
        wanted = formula(q, k, v, mask, causal, sinks, softcap)
        as_softmax = mask is not None and not has_sinks
        options = 0, 0, 0, None, None, sinks, softcap, as_softmax
        out, _ = autopar.attention(q, k, v, mask, causal, 0.3, *options)
        grad, inputs = torch.randn_like(out), [x for x in (q, k, v, mask, sinks) if x is not None and x.requires_grad]
        mine, theirs = ((y, *torch.autograd.grad(y, inputs, grad)) for y in (out, wanted))
        for found, expected in zip(mine, theirs, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_as_near_as_the_formula(dtype):
    """Against fp64 on the same numbers: no further off than the formula in the narrow type, its softmax in fp32."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 65, 16).to(dtype).requires_grad_() for h in (4, 2, 2))
    sinks, grad = torch.randn(4).to(dtype).requires_grad_(), torch.randn(2, 4, 65, 16).to(dtype)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, sinks)]
    exact = formula(*wide[:3], None, True, wide[3], 5.0)
    exact = exact, *torch.autograd.grad(exact, wide, grad.double())
    narrow = formula(q, k, v, None, True, sinks, 5.0)
    narrow = narrow, *torch.autograd.grad(narrow, (q, k, v, sinks), grad)
    mine, _ = autopar.attention(q, k, v, None, True, 0.3, 0, 0, 0, None, None, sinks, 5.0)
    mine = mine, *torch.autograd.grad(mine, (q, k, v, sinks), grad)
    for found, theirs, wanted in zip(mine, narrow, exact):
        error, allowed = ((x.double() - wanted).norm().item() for x in (found, theirs))
        assert error <= allowed + torch.finfo(dtype).eps * wanted.norm().item() / 4
