"""A last linear layer and its loss in blocks: exact for any cut of rows and vocabulary, and small in memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ops import autopar, workspace
from autopar.ops import linear_loss as ops

from ..helpers.fake_allocations import counted, nbytes

FORWARD, BACKWARD = ops.linear_loss._init_fn, ops.linear_loss_bw._init_fn  # what runs on real tensors
GIB = 2**30


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 5), min_size=0, max_size=2), st.integers(2, 13), st.integers(1, 7), st.data(),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.tuples(st.integers(1, 9), st.integers(1, 20)),
)  # fmt: skip
def test_blocks_and_shards_add_up(leading, vocabulary, hidden, data, dtype, blocks):
    """Over uneven parts of the vocabulary, in small blocks, against torch's linear layer and cross-entropy in fp64."""
    cut = data.draw(st.integers(1, vocabulary - 1))
    generator = torch.Generator().manual_seed(vocabulary)
    x = torch.randn(*leading, hidden, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocabulary, hidden, generator=generator, dtype=torch.float64).to(dtype)
    target = torch.randint(0, vocabulary, leading, generator=generator)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    parts = [(weight[:cut], 0), (weight[cut:], cut)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "block_shape", lambda rows, columns, hidden: (blocks[0], min(columns, blocks[1])))
        tops, totals, picked = zip(*(FORWARD(x, part, target, at) for part, at in parts))
        row_max = torch.stack(tops).amax(0).to(wide)
        total = sum(t * torch.exp(top.to(wide) - row_max) for t, top in zip(totals, tops))
        rows = 1 / total, -torch.ones_like(total)
        found = [BACKWARD(*rows, x, part, target, row_max, at) for part, at in parts]
    dx, dw = sum(d for d, _ in found), torch.cat([d for _, d in found])
    assert dx.dtype == dw.dtype == dtype and total.shape == row_max.shape == target.shape and total.dtype == wide
    exact, exact_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    logits = (exact @ exact_weight.t()).reshape(-1, vocabulary)
    loss = torch.nn.functional.cross_entropy(logits, target.reshape(-1), reduction="none")
    wanted = torch.autograd.grad(loss.sum(), (exact, exact_weight))
    tolerance = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 0.15}[dtype]
    mine = (total.log() + row_max - sum(picked)).double().reshape(-1)
    torch.testing.assert_close(mine, loss.detach(), rtol=tolerance, atol=tolerance)
    for found, true in zip((dx, dw), wanted):
        torch.testing.assert_close(found.double(), true, rtol=tolerance, atol=tolerance)


def test_a_part_without_any_logit_of_weight():
    """Logits of -inf in all of a part add nothing, and make no NaN."""
    x, weight = torch.ones(3, 1), torch.tensor([[-float("inf")], [-float("inf")]])
    top, total, _ = FORWARD(x, weight, torch.zeros(3, dtype=torch.int64), 2)
    assert torch.isfinite(top).all() and (total == 0).all()


CASES = [  # rows, vocabulary, hidden
    ((8192,), 128256, 4096),
    ((1, 8192), 128256 // 8, 4096),  # a part of the vocabulary
    pytest.param((131072,), 128256, 4096, marks=pytest.mark.slow),
    ((4, 512), 32000, 1024),
]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("rows, vocabulary, hidden", CASES)
def test_memory(rows, vocabulary, hidden, device):
    """Beside what it gives, neither way holds more than 1.2 times the weight's gradient, nor more than is said."""

    def of(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device=device)

    def a_number(dtype=torch.float32):
        return of(*rows, dtype=dtype)

    made = lambda: [of(*rows, hidden), of(vocabulary, hidden), a_number(torch.int64), 0]  # noqa: E731
    back = lambda: [a_number(), a_number(), *made()[:3], a_number(), 0]  # noqa: E731
    head = 2 * vocabulary * hidden
    for body, op, make in ((FORWARD, autopar.linear_loss, made), (BACKWARD, autopar.linear_loss_bw, back)):
        results, arguments, count = counted(body, make)
        beside = count.peak_bytes - nbytes(results)
        said = workspace.workspace_bytes(op.default, *arguments)
        assert beside <= 1.2 * head and beside <= said + 2**20 and said <= 1.5 * beside, (beside / GIB, said / GIB)
        if rows == (8192,):
            assert beside + (nbytes(results) - head if body is BACKWARD else 0) <= 0.3 * GIB


def test_the_blocks_of_a_large_head_are_large():
    assert ops.block_shape(8192, 128256, 4096) == (4096, 4096)
    assert ops.block_shape(3, 7, 5) == (3, 7)
