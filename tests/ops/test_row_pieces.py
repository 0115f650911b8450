"""Programs of row-wise ops in pieces: as all rows at once, for any sizes, and a piece of them in memory."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ops import row_pieces
from autopar.ops.row_pieces import parsed, pieces_of, share_of

from ..helpers.fake_allocations import counted, nbytes

OP = row_pieces.in_pieces._init_fn  # what runs on real tensors
WIDE = (
    "t0 = autopar.linear.default(r0, w0); t1 = aten.add.Tensor(t0, w1); "
    "t2 = aten.gelu.default(t1, approximate='tanh'); "
)
FORWARD = f"{WIDE}t3 = autopar.linear.default(t2, w2); return (t3, ), ()"
BACKWARD = (
    f"{WIDE}t3 = autopar.linear_dx.default(r1, w2); t4 = autopar.linear_dw.default(r1, t2); "
    "t5 = aten.gelu_backward.default(t3, t1, approximate='tanh'); t6 = aten.sum.dim_IntList(t5, {dims}, True); "
    "t7 = autopar.linear_dx.default(t5, w0); t8 = autopar.linear_dw.default(t5, r0); return (t7, ), (t4, t6, t8, )"
)


def tensors(leading, hidden: int, wide: int, dtype=torch.float64, device: str = "cpu"):
    """Return rows of a source and of a gradient, and two matrices with a bias between them."""
    made = torch.empty if device == "meta" else torch.randn
    shapes = [(*leading, hidden)] * 2, [(wide, hidden), (wide,), (hidden, wide)]
    return [[made(shape, dtype=dtype, device=device) for shape in some] for some in shapes]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=3), st.integers(1, 4), st.integers(1, 9), st.integers(1, 7),
    st.sampled_from([torch.float64, torch.bfloat16]),
)  # fmt: skip
def test_an_mlp_and_its_backward(leading, hidden, wide, most, dtype):
    """Against autograd in fp64, in pieces of any size, rows of any number of dims."""
    torch.manual_seed(most)
    (x, grad), (up, bias, down) = tensors(leading, hidden, wide, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_pieces, "MOST_ROWS", most)
        (y,) = OP(FORWARD, [x], [up, bias, down])
        dx, ddown, dbias, dup = OP(BACKWARD.format(dims=list(range(len(leading)))), [x, grad], [up, bias, down])
    exact = [t.double().requires_grad_() for t in (x, up, bias, down)]
    hidden_rows = torch.nn.functional.gelu(exact[0] @ exact[1].t() + exact[2], approximate="tanh")
    wanted = hidden_rows @ exact[3].t()
    gradients = torch.autograd.grad(wanted, exact, grad.double())
    tolerance = 1e-12 if dtype == torch.float64 else 0.3
    for found, true in zip((y, dx, dup, dbias.reshape(-1), ddown), (wanted, *gradients)):
        assert found.dtype == dtype and found.is_contiguous() and found.shape == true.shape
        torch.testing.assert_close(found.double(), true.detach(), rtol=tolerance, atol=tolerance)


@given(st.lists(st.integers(0, 9000), min_size=1, max_size=3))
def test_pieces(leading):
    """No piece has more rows than are meant, but where the longest dim has too few places."""
    dim, count = pieces_of(leading)
    assert leading[dim] == max(leading) and 1 <= count <= max(1, leading[dim])
    if count < leading[dim]:
        assert math.prod(leading) <= count * row_pieces.MOST_ROWS
    assert not leading[dim] or 1 / count <= share_of(leading) < 1 / count + 1 / leading[dim] + 1e-9


@pytest.mark.parametrize("leading", [(32768,), (2, 32768)])
def test_memory(leading):
    """Beside what it gives, the backward holds four wide tensors of a piece, and what is between two products."""
    hidden, wide = 512, 4096
    text = BACKWARD.format(dims=list(range(len(leading))))
    made = lambda: sum(tensors(leading, hidden, wide, torch.bfloat16), [])  # noqa: E731
    results, _, count = counted(lambda *given: OP(text, given[:2], given[2:]), made)
    piece = row_pieces.MOST_ROWS * 2
    assert 3 * wide * piece < count.peak_bytes - nbytes(results) <= (5 * wide + 4 * hidden) * piece + 2**20


@pytest.mark.parametrize("text", [
    "t0 = os.system('ls'); return (t0, ), ()", "import os", "t0 = aten.relu.default(r0)", "", "return t0, ()",
    "return (1, ), ()", "t0 = 3; return (t0, ), ()", "t0, t1 = aten.relu.default(r0); return (t0, ), ()",
    "t0.x = aten.relu.default(r0); return (r0, ), ()", "import os; return (r0, ), ()",
])  # fmt: skip
def test_other_texts_are_no_programs(text):
    with pytest.raises(ValueError):
        parsed(text)


def test_numbers_lists_and_types_are_read():
    clamped = "t0 = aten.clamp.default(r0, -inf, 1e-05); "
    text = f"{clamped}t1 = aten._to_copy.default(t0, dtype=torch.float64); return (t1, ), ()"
    (found,) = OP(text, [torch.tensor([[-2.0, 3.0]])], [])
    assert found.dtype == torch.float64 and found.tolist() == [[-2.0, pytest.approx(1e-5)]]
