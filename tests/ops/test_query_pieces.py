"""Programs around an attention in pieces of its queries: as all queries at once, for any sizes, and a piece of them in
memory."""

from __future__ import annotations

import random

import pytest
import torch

from autopar.ops import autopar, query_pieces
from autopar.ops.query_pieces import pieces_of, share_of

OP = query_pieces.queries_in_pieces._init_fn  # what runs on real tensors
CONSTANTS = "{causal}, None, place(1, {first}), 0, 0, None, None"
FORWARD = f"t0 = autopar.attention.default(r0, w0, w1, None, {CONSTANTS}, None, 0.0, False, None, 0.0, 0, 0, None, 0, "
FORWARD += "{window}); t1 = t0[0]; t2 = t0[1]; return (t1, t2, ), ()"
BACKWARD = (
    f"t0 = autopar.attention_bw.default(r1, r0, w0, w1, r2, r3, None, {CONSTANTS}, False, 0.0, None, 0.0, 0, 0, None, "
    "0, {window}); t1 = t0[0]; t2 = t0[1]; t3 = t0[2]; return (t1, ), (t2, t3, )"
)


def drawn(draw: random.Random, dtype: torch.dtype = torch.float64):
    """Return queries, keys and values, with the number of the first query, causal or not, and a window."""
    torch.manual_seed(draw.randint(0, 99))
    heads, group, width = draw.randint(1, 2), draw.randint(1, 3), 8
    keys, causal = draw.randint(2, 20), draw.random() < 0.6
    first = draw.randint(0, keys - 1) if causal else 0
    queries = draw.randint(1, keys - first) if causal else draw.randint(1, 20)
    shapes = (2, heads * group, queries, width), (2, heads, keys, width), (2, heads, keys, width)
    q, k, v = (torch.randn(shape, dtype=dtype) for shape in shapes)
    return (q, k, v), causal, first, draw.randint(1, 6) if causal and draw.random() < 0.3 else 0


@pytest.mark.parametrize("case", range(40))
def test_as_all_queries_at_once(case, monkeypatch):
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    (q, k, v), causal, first, window = drawn(draw)
    monkeypatch.setattr(query_pieces, "MOST_QUERIES", draw.randint(1, 6))
    monkeypatch.setattr(query_pieces, "MOST_KEYS", draw.randint(1, 9))
    says = dict(causal=causal, first=first, window=window)
    out, lse = OP(FORWARD.format(**says), [q], [2, 2, 2], [k, v])
    wanted = autopar.attention.default(q, k, v, None, causal, None, first, window=window)
    for found, true in zip((out, lse), wanted):
        torch.testing.assert_close(found, true, rtol=1e-12, atol=1e-12)
        assert found.stride() == true.stride() or 1 in found.shape
    grad = torch.randn_like(out)
    gradients = OP(BACKWARD.format(**says), [q, grad, out, lse], [2, 2, 2, 2, 2], [k, v])
    wanted = autopar.attention_bw.default(grad, q, k, v, out, lse, None, causal, None, first, window=window)
    for found, true in zip(gradients, wanted):
        torch.testing.assert_close(found, true, rtol=1e-11, atol=1e-12)
        assert found.stride() == true.stride() or 1 in found.shape


def test_two_ranges_of_a_longer_sequence(monkeypatch):
    """The first and the last quarter of it, as a device has them in zigzag."""
    monkeypatch.setattr(query_pieces, "MOST_QUERIES", 3)
    q, k, v = torch.randn(3, 2, 4, 16, 8, dtype=torch.float64)
    own = torch.cat([q[:, :, :4], q[:, :, 12:]], 2)
    program = FORWARD.format(causal=True, first=0, window=0)
    out, _ = OP(program, [own], [2, 2, 2], [k, v], [4, 0, 4, 12])
    whole, _ = autopar.attention.default(q, k, v, None, True, None)
    torch.testing.assert_close(out, torch.cat([whole[:, :, :4], whole[:, :, 12:]], 2), rtol=1e-12, atol=1e-12)


def test_gradients_of_keys_add_up_in_a_wide_type(monkeypatch):
    """So that many pieces in 16 bits give them as one does."""
    monkeypatch.setattr(query_pieces, "MOST_QUERIES", 2)
    monkeypatch.setattr(query_pieces, "MOST_KEYS", 16)
    torch.manual_seed(0)
    q, k, v, grad = torch.randn(4, 1, 2, 256, 16).bfloat16()
    out, lse = autopar.attention.default(q, k, v, None, False, None)
    program = BACKWARD.format(causal=False, first=0, window=0)
    found = OP(program, [q, grad, out, lse], [2, 2, 2, 2, 2], [k, v])
    exact = [x.double() for x in (grad, q, k, v)]
    true = autopar.attention_bw.default(
        *exact, *autopar.attention.default(*exact[1:], None, False, None), None, False, None
    )
    for mine, wanted in zip(found, true):
        assert mine.dtype == torch.bfloat16
        assert (mine.double() - wanted).norm() <= 1e-2 * wanted.norm()


def test_pieces():
    assert [pieces_of(n) for n in (0, 1, 8192, 8193, 500_000)] == [1, 1, 1, 2, 62]
    assert share_of(8192) == 1.0 and share_of(500_000) == 8065 / 500_000 and share_of(0) == 1.0
