"""Attention that drops weights: its values and gradients are those of dropout of all weights, whatever part it has."""

from __future__ import annotations

import math
import random

import pytest
import torch

from autopar.ops import attention_blocks, attention_documents, autopar, counter_rng
from autopar.ops.attention_dropout import WeightDropout
from autopar.ops.counter_rng import contiguous_strides, of_micro_batch

from ..helpers.fake_allocations import counted, nbytes

FP64 = torch.float64
STATE = torch.tensor([11, 4])
P, STREAM, SCALE = 0.3, 6, 0.4
FORMS = ["causal", "full", "bool", "added", "learned", "softcap", "sinks", "documents"]


def formula(form: str, q, k, v, mask, sinks, ids, p: float = P):
    """Return dropout(softmax(scores)) v with all scores and weights."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * SCALE
    scores = torch.tanh(scores / 0.7) * 0.7 if form == "softcap" else scores
    if form in ("causal", "softcap", "documents"):
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if form == "documents":
        scores = scores.masked_fill((ids[:, :, None] != ids[:, None, :])[:, None], -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if form == "bool" else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return autopar.dropout(weights, STATE, p, STREAM, 0, contiguous_strides(weights.shape)) @ v


def problem(form: str, b: int, heads: int, kv_heads: int, rows: int, columns: int, width: int):
    """Return tensors that an attention of a form takes: q, k, v, mask, sinks, documents."""
    q, k, v = (torch.randn(b, h, n, width, dtype=FP64) for h, n in ((heads, rows), *[(kv_heads, columns)] * 2))
    mask = {
        "bool": torch.rand(b, 1, rows, columns) > 0.3,
        "added": torch.randn(b, 1, 1, columns, dtype=FP64),
        "learned": torch.randn(1, heads, rows, columns, dtype=FP64).requires_grad_(),
    }.get(form)
    if form == "bool":
        mask[..., 0] = True
    sinks = torch.randn(heads, dtype=FP64).requires_grad_() if form == "sinks" else None
    ids = torch.randint(0, 2, (b, rows)).cumsum(-1) if form == "documents" else None
    return [x.requires_grad_() for x in (q, k, v)] + [mask, sinks, ids]


def attended(form: str, q, k, v, mask, sinks, ids, p: float = P):
    """Return what the op gives."""
    drops = STATE, p, STREAM, 0, contiguous_strides((*q.shape[:-1], k.shape[2]))
    causal, softcap = form in ("causal", "softcap", "documents"), 0.7 if form == "softcap" else 0.0
    special = sinks, softcap, form in ("added", "learned"), *drops
    return autopar.attention(q, k, v, mask, causal, SCALE, 0, 0, 0, ids, ids, *special)[0]


def compare(form: str, *sizes: int, p: float = P) -> None:
    given = problem(form, *sizes)
    inputs = [x for x in given if x is not None and x.requires_grad]
    wanted, found = (of(form, *given, p=p) for of in (formula, attended))
    grad = torch.randn_like(wanted)
    wanted, found = ((y, *torch.autograd.grad(y, inputs, grad)) for y in (wanted, found))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


def seeded() -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    torch.manual_seed(seed)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, 7, 100, 300])
def test_as_dropout_of_all_weights(form, length):
    seeded()
    for heads, kv_heads in ((3, 3), (4, 2), (2, 1)):
        compare(form, 2, heads, kv_heads, length, length, 5)
    if form != "documents":
        compare(form, 1, 2, 2, length, length + 4, 4)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_as_dropout_of_all_weights_of_long_rows(form):
    seeded()
    compare(form, 1, 4, 2, 1030, 1030, 8)


@pytest.mark.parametrize("p", [2.0**-16, 0.5, 1.0 - 2.0**-16, 1.0])
def test_probabilities(p):
    seeded()
    compare("causal", 2, 2, 2, 12, 12, 4, p=p)


@pytest.mark.parametrize("form", ["causal", "full", "documents"])
def test_parts_are_slices_of_the_whole(form):
    """A device knows the first of its samples, heads and queries."""
    seeded()
    b, h, s = 4, 6, 40
    given = problem(form, b, h, h, s, s, 4)
    q, k, v, *_, ids = given
    whole, strides = attended(form, *given), contiguous_strides((b, h, s, s))
    for _ in range(12):
        at = [sorted(random.sample(range(n + 1), 2)) for n in (b, h, s)]
        of = tuple(slice(*ends) for ends in at)
        start = sum(step * first for step, (first, _) in zip(strides, at))
        keys, values = (x[of[:2]] for x in (k, v))
        own_ids = (ids[of[0], of[2]], ids[of[0]]) if ids is not None else (None, None)
        arguments = None, form != "full", SCALE, at[2][0], 0, 0, *own_ids, None, 0.0, False
        mine, _ = autopar.attention(q[of], keys, values, *arguments, STATE, P, STREAM, start, strides)
        torch.testing.assert_close(mine, whole[of], rtol=0, atol=1e-12)


def test_blocks_of_keys_join_to_the_whole():
    """A ring's steps know the first of their keys."""
    seeded()
    given = problem("full", 2, 2, 2, 9, 30, 4)
    q, k, v, *_ = given
    strides, found = contiguous_strides((2, 2, 9, 30)), None
    for first, stop in ((0, 11), (11, 23), (23, 30)):
        keys, values = (x[:, :, first:stop] for x in (k, v))
        drops = None, 0.0, False, STATE, P, STREAM, first, strides
        part = autopar.attention(q, keys, values, None, False, SCALE, 0, 0, 0, None, None, *drops)
        found = part if found is None else autopar.join_attention(*found, *part, False)
    torch.testing.assert_close(found[0], attended("full", *given), rtol=0, atol=1e-12)


def test_micro_batches_draw_what_the_batch_does():
    seeded()
    given = problem("causal", 6, 2, 2, 8, 8, 4)
    strides = contiguous_strides((6, 2, 8, 8))
    whole = attended("causal", *given)
    for i in range(3):
        q, k, v = (x[2 * i : 2 * i + 2] for x in given[:3])
        drops = None, 0.0, False, of_micro_batch(STATE, 2 * i), P, STREAM, 0, strides, strides[0]
        part, _ = autopar.attention(q, k, v, None, True, SCALE, 0, 0, 0, None, None, *drops)
        torch.testing.assert_close(part, whole[2 * i : 2 * i + 2], rtol=0, atol=1e-12)


def test_what_is_kept_is_what_dropout_keeps(monkeypatch):
    """Also where words are drawn in pieces, and begin anywhere in one."""
    seeded()
    for numel in (counter_rng.BLOCK_NUMEL["cpu"], 5):
        monkeypatch.setitem(counter_rng.BLOCK_NUMEL, "cpu", numel)
        for shape in ((2, 3, 8, 12), (2, 3, 5, 7), (2, 3, 5, 23)):
            strides = contiguous_strides(shape)
            whole = autopar.dropout(torch.ones(shape), STATE, P, STREAM, 0, strides) > 0
            key, _ = counter_rng.key_and_start(STATE, STREAM, 0, 0)
            dropout = WeightDropout(key, 0, tuple(strides), round(P * counter_rng.ALL))
            for rows, columns in (
                (slice(0, 4), slice(4, 7)),
                (slice(1, 5), slice(0, shape[3])),
                (slice(3, 4), slice(2, 3)),
            ):
                mine = dropout.kept(2, 3, rows, columns, torch.device("cpu"))
                assert torch.equal(mine, whole[:, :, rows, columns])


def test_schema():
    q, k, v = (torch.randn(2, 2, 3, 4, requires_grad=True) for _ in range(3))
    drops = STATE, P, STREAM, 0, [18, 9, 3, 1]
    arguments = q, k, v, None, True, None, 0, 0, 0, None, None, None, 0.0, False, *drops
    torch.library.opcheck(autopar.attention.default, arguments)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("length", [1024, 1023])
def test_never_all_weights(length):
    """It holds some blocks of weights, of bools and of what draws them."""
    b, h, d, block = 1, 4, 16, attention_blocks.BLOCK
    dropout = WeightDropout(3, 0, tuple(contiguous_strides((b, h, length, length))), 2**14)

    def new(*more):
        return torch.empty(b, h, length, *more)

    block_bytes, keys = b * h * block * (block + d) * 4, 4 * b * h * length * d * 4
    drawing = counter_rng.drawing_bytes((b, h, block, block), dropout.strides, 0, "cpu") + b * h * block * block
    qkv = lambda: [new(d) for _ in range(3)]  # noqa: E731
    results, _, count = counted(lambda *x: attention_blocks.forward(*x, None, True, 0.1, dropout=dropout), qkv)
    assert count.peak_bytes - nbytes(results) <= 6 * block_bytes + drawing < 4 * b * h * length**2
    many = lambda: [new(d), *qkv(), new(d), new()]  # noqa: E731
    results, _, count = counted(lambda *x: attention_blocks.backward(*x, None, True, 0.1, dropout=dropout), many)
    assert count.peak_bytes - nbytes(results) <= 10 * block_bytes + drawing + keys


def test_ranges_of_documents_are_served_in_several(monkeypatch):
    monkeypatch.setattr(attention_documents, "CPU_ROWS", 7)
    seeded()
    compare("documents", 2, 4, 2, 40, 40, 4)


def test_as_many_are_dropped_as_are_said():
    ones = torch.ones(4, 4, 64, 64)
    out, _ = autopar.attention(torch.zeros_like(ones), torch.zeros_like(ones), ones, None, False, None, 0, 0, 0, None,
                               None, None, 0.0, False, STATE, P, STREAM, 0, contiguous_strides(ones.shape))  # fmt: skip
    error = math.sqrt(P / (1 - P) / ones.numel())
    assert abs(out.mean().item() - 1.0) < 5 * error
