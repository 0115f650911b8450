"""Attention on CUDA, without a GPU: which kernel is asked, with what, what it costs in memory, and that what goes in
and comes out of stand-ins for the kernels is attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from autopar._torch import attention_kernels as kernels
from autopar.ops import attention, attention_gpu
from autopar.ops.attention_forms import additive

from ..helpers.fake_allocations import counted, nbytes
from .test_attention_blocks import reference

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FORWARD, BACKWARD = attention.attention._init_fn, attention.attention_bw._init_fn  # what runs on real tensors


def seq_major(batch, heads, length, width, dtype, device="cuda"):
    return torch.empty(batch, length, heads, width, dtype=dtype, device=device).transpose(1, 2)


def both(batch, heads, kv_heads, rows, columns, width, v_width, dtype, causal, mask=None, inside=lambda _: 0):
    """(results, arguments, count) of the forward and of the backward on fake CUDA tensors. `inside`: as `counted` has
    it, of the backward."""

    def qkv():
        return [
            seq_major(batch, heads, rows, width, dtype),
            seq_major(batch, kv_heads, columns, width, dtype),
            seq_major(batch, kv_heads, columns, v_width, dtype),
        ]

    def new_mask():
        return None if mask is None else torch.empty(mask, dtype=torch.bool, device="cuda")

    def backward_arguments():
        grad, out = (seq_major(batch, heads, rows, v_width, dtype) for _ in range(2))
        return [grad, *qkv(), out, torch.empty(batch, heads, rows, device="cuda"), new_mask()]

    yield counted(lambda *x: FORWARD(*x, causal, None), lambda: [*qkv(), new_mask()])
    yield counted(lambda *x: BACKWARD(*x, causal, None), backward_arguments, inside)


CALLS = {
    # batch, heads, kv_heads, rows, columns, width, v_width, dtype, causal, mask
    "_scaled_dot_product_flash_attention": [
        (1, 32, 8, 512, 512, 128, 128, BF16, True),
        (2, 4, 4, 100, 77, 80, 80, FP16, False),
        (2, 4, 1, 1, 100, 36, 36, BF16, False),
        (2, 4, 4, 64, 64, 192, 128, BF16, True),
        (2, 4, 4, 64, 64, 256, 256, BF16, True),
    ],
    "_scaled_dot_product_efficient_attention": [
        (2, 8, 2, 100, 77, 64, 64, BF16, False, (2, 1, 1, 77)),
        (2, 8, 8, 100, 100, 20, 20, BF16, False, (2, 1, 100, 100)),
        (2, 8, 2, 100, 100, 64, 64, FP32, True),
        (2, 8, 2, 33, 100, 64, 64, BF16, True),
        (1, 2, 2, 64, 64, 512, 512, BF16, True),
        (2, 8, 8, 64, 64, 64, 64, FP32, True, (1, 1, 64, 64)),
    ],
}


@pytest.mark.parametrize("kernel, call", [(kernel, call) for kernel, calls in CALLS.items() for call in calls])
def test_kernels_and_forms(kernel, call):
    """The one kernel meant for a call is run, and gives what the op promises: shapes, types and strides."""
    batch, heads, kv_heads, rows, columns, width, v_width, dtype, *_ = call
    for (results, arguments, count), name in zip(both(*call), (kernel, f"{kernel}_backward"), strict=True):
        assert [op for op in count.ops if "attention" in op] == [name]
        promised, *_ = counted(
            torch.ops.autopar.attention if len(results) == 2 else torch.ops.autopar.attention_bw,
            lambda arguments=arguments: (
                [
                    a if a is None else torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device)
                    for a in arguments
                ]
                + [call[8], None]
            ),
        )
        for mine, other in zip(results, promised, strict=True):
            assert (mine.shape, mine.dtype, mine.stride()) == (other.shape, other.dtype, other.stride())


def test_memory_of_a_long_layer():
    """Forward and backward of one causal layer of Llama-3-8B on 8192 tokens stay near what goes in and out."""
    for results, arguments, count in both(1, 32, 8, 8192, 8192, 128, 128, BF16, True):
        assert nbytes(arguments) + count.peak_bytes <= 1.3 * (nbytes(arguments) + nbytes(results))


@pytest.mark.parametrize("rows, columns, dtype, name", [
    (64, 64, FP64, "blocks"), (0, 64, BF16, "blocks"), (64, 0, BF16, "blocks"), (64, 64, FP32, "efficient"),
    (4096, 4096, BF16, "cudnn"), (64, 64, BF16, "flash"), (4096, 4096, FP16, "cudnn"),
])  # fmt: skip
def test_choice(monkeypatch, rows, columns, dtype, name):
    monkeypatch.setattr(kernels, "prefers_cudnn", lambda: True)
    q, k = (torch.empty(1, 2, n, 64, dtype=dtype, device="meta") for n in (rows, columns))
    assert attention_gpu.form_of(q, k, k, None, False).name == name
    monkeypatch.setattr(kernels, "prefers_cudnn", lambda: False)
    assert attention_gpu.form_of(q, k, k, None, False).name == ("flash" if name == "cudnn" else name)


def test_grouped_heads_are_for_flash(monkeypatch):
    monkeypatch.setattr(kernels, "prefers_cudnn", lambda: True)
    q, k = (torch.empty(1, n, 4096, 64, dtype=BF16, device="meta") for n in (4, 2))
    assert attention_gpu.form_of(q, k, k, None, True).name == "flash"


def test_rows_that_pad_the_log_sum_exp(monkeypatch):
    """The memory-efficient kernel reads its log-sum-exp in blocks of 32 rows; those it adds are of closed queries."""
    given = []

    def backward(grad, q, k, v, bias, out, lse, *rest, scale):
        given.append(lse)
        return q, k, v, None

    kernel = SimpleNamespace(_scaled_dot_product_efficient_attention_backward=backward)
    monkeypatch.setattr(kernels, "aten", kernel)
    q, lse = torch.randn(1, 2, 33, 8), torch.randn(1, 2, 33)
    kernels.efficient_backward(q, q, q, q, q, lse, None, True, 1.0)
    assert given[0].shape == (1, 2, 64) and torch.equal(given[0][..., :33], lse)
    assert (given[0][..., 33:] == float("inf")).all()


# stand-ins for the kernels: they refuse what the kernels refuse, and compute in fp64


def check_operands(q, *others):
    for x in (q, *others):
        assert x.shape[-1] == q.shape[-1] and x.shape[-1] % 8 == 0 and x.stride(-1) == 1


def flash(q, k, v, causal, scale):
    check_operands(q, k, v)
    return computed(None, q, k, v, None, causal, scale)[:2]


def flash_backward(grad, q, k, v, out, lse, causal, scale):
    check_operands(q, k, v, grad, out)
    assert lse.shape == q.shape[:3]
    return computed(grad, q, k, v, None, causal, scale)[2:]


def efficient(q, k, v, bias, causal, scale):
    """Closed queries have a sum of no terms here."""
    check_bias(q, k, bias)
    check_operands(q, k, v)
    out, lse, *_ = computed(None, q, k, v, bias, causal, scale)
    closed = lse == float("-inf")
    return out.masked_fill(closed.unsqueeze(-1), float("nan")), lse.masked_fill(closed, float("nan"))


def efficient_backward(grad, q, k, v, out, lse, bias, causal, scale):
    check_bias(q, k, bias)
    check_operands(q, k, v, grad, out)
    assert not lse.isnan().any() and not (lse == float("-inf")).any()
    return computed(grad, q, k, v, bias, causal, scale)[2:]


def check_bias(q, k, bias):
    assert q.shape[1] == k.shape[1]
    if bias is not None:
        assert bias.shape == (*q.shape[:3], k.shape[2]) and bias.dtype == q.dtype and bias.stride(-1) == 1
        assert all(stride * bias.element_size() % 16 == 0 for stride in bias.stride()[:-1])


def computed(grad, q, k, v, bias, causal, scale):
    grad = torch.zeros(*q.shape[:3], v.shape[-1]) if grad is None else grad
    wide = q * (scale * q.shape[-1] ** 0.5)
    out, lse, dq, dk, dv = reference(grad, wide, k, v, bias, causal)
    return (
        out.to(q.dtype),
        lse.float(),
        *((x * f).to(q.dtype) for x, f in ((dq, scale * q.shape[-1] ** 0.5), (dk, 1), (dv, 1))),
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("widths", [(8, 8), (5, 3), (20, 16)])
@pytest.mark.parametrize("mask", [None, "bool", "numbers", "padding"])
@pytest.mark.parametrize("rows, columns", [(9, 9), (5, 18)])
def test_what_goes_in_and_out(monkeypatch, rows, columns, mask, widths, heads, causal):
    for stand_in in (flash, flash_backward, efficient, efficient_backward):
        monkeypatch.setattr(kernels, stand_in.__name__, stand_in)
    torch.manual_seed(0)
    dtype = BF16 if mask is None else FP32
    grad, q = torch.randn(2, heads[0], rows, widths[1]), torch.randn(2, heads[0], rows, widths[0])
    k, v = torch.randn(2, heads[1], columns, widths[0]), torch.randn(2, heads[1], columns, widths[1])
    grad, q, k, v = (x.to(dtype) for x in (grad, q, k, v))
    given = {
        None: None,
        "bool": torch.rand(2, 1, rows, columns) > 0.6,
        "numbers": torch.randn(heads[0], rows, columns),
        "padding": torch.arange(columns).expand(2, 1, 1, -1) >= torch.tensor([2, columns])[:, None, None, None],
    }[mask]
    added, scale = additive(given, dtype), widths[0] ** -0.5
    form = stood_in(attention_gpu.form_of(q, k, v, added, causal).name)
    out, lse = form.forward(q, k, v, added, causal, scale)
    gradients = form.backward(grad, q, k, v, out, lse, added, causal, scale)
    tolerance = 5e-2 if dtype == BF16 else 1e-4
    for mine, whole in zip((out, lse, *gradients), reference(grad, q, k, v, added, causal), strict=True):
        torch.testing.assert_close(mine.double(), whole, rtol=tolerance, atol=tolerance)


def stood_in(name: str) -> attention_gpu.Form:
    """The form of this name with what the kernels are now."""
    if name == "efficient":
        return attention_gpu.EFFICIENT
    forward, backward = attention_gpu._unmasked(kernels.flash), attention_gpu._unmasked_backward(kernels.flash_backward)
    return attention_gpu.Form(name, forward, backward)
