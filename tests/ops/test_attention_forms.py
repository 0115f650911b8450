"""The forms of attention give what torch's attention gives, queries that a mask closes included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from autopar.ops import attention_blocks, attention_cpu
from autopar.ops import attention_forms as forms
from autopar.simulate.compare import verify_model

from ..helpers import gloo

INF = float("-inf")


def closed_rows(rows: int, columns: int, padding: int) -> torch.Tensor:
    """A causal mask of two samples, the second padded on the left: its first rows may attend to nothing."""
    keep = torch.ones(2, 1, rows, columns, dtype=torch.bool).tril()
    keep[1, :, :, :padding] = False
    return keep


def masks(keep: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        "bool": keep,
        "-inf": torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, INF),
        "lowest": torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, torch.finfo(dtype).min),
    }


def kernel(grad, q, k, v, mask, causal):
    out, lse = attention_cpu.forward(q, k, v, mask, causal, q.shape[-1] ** -0.5)
    return out, lse, attention_cpu.backward(grad, q, k, v, out, lse, mask, causal, q.shape[-1] ** -0.5)


def blocks(grad, q, k, v, mask, causal):
    """In blocks of 3 queries and 3 keys, so that small tensors have several."""
    out, lse = attention_blocks.forward(q, k, v, mask, causal, q.shape[-1] ** -0.5, 3)
    return out, lse, attention_blocks.backward(grad, q, k, v, out, lse, mask, causal, q.shape[-1] ** -0.5, 3)


def canonical(grad, q, k, v, mask, causal):
    out, lse = torch.ops.autopar.attention(q, k, v, mask, causal, None)
    return out, lse, torch.ops.autopar.attention_bw(grad, q, k, v, out, lse, mask, causal, None)


FORMS = {"kernel": kernel, "blocks": blocks, "canonical": canonical}


def eager(grad, q, k, v, mask):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.detach(), torch.autograd.grad(out, (q, k, v), grad)


def tensors(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2, 3, n, 8, generator=generator, dtype=torch.float64).to(dtype)
        for n in (rows, rows, columns, columns)
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["bool", "-inf"])
@settings(deadline=None, max_examples=15)
@given(
    st.integers(1, 7),
    st.integers(1, 9),
    st.integers(0, 9),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_a_closed_query_gives_zeros(form, kind, rows, columns, padding, dtype):
    keep = closed_rows(rows, columns, min(padding, columns))
    mask, (grad, *qkv) = masks(keep, dtype)[kind], tensors(rows, columns, dtype)
    added = mask if form == "canonical" else forms.additive(mask, dtype)
    out, lse, gradients = FORMS[form](grad, *qkv, added, False)
    closed = ~keep.any(-1).expand(2, 3, rows)
    assert (out[closed] == 0).all() and (lse[closed] == INF).all() and lse[~closed].isfinite().all()
    assert (gradients[0][closed] == 0).all()
    expected, wanted = eager(grad, *qkv, mask)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for mine, whole in zip((out, *gradients), (expected, *wanted), strict=True):
        assert whole.isfinite().all()
        torch.testing.assert_close(mine, whole, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_lowest_number_closes_nothing(form, dtype):
    mask, (grad, *qkv) = masks(closed_rows(5, 5, 2), dtype)["lowest"], tensors(5, 5, dtype)
    out, lse, gradients = FORMS[form](grad, *qkv, mask, False)
    expected, _ = eager(grad, *qkv, mask)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out[1, :, 0], qkv[2][1].mean(-2), rtol=tolerance, atol=tolerance)
    assert all(x.isfinite().all() for x in (lse, *gradients))


def test_gradients_of_the_lowest_number():
    """The kernel's are those of eager torch on the same kernel, the blocks' those of the function itself."""
    mask, (grad, *qkv) = masks(closed_rows(5, 5, 2), torch.float32)["lowest"], tensors(5, 5, torch.float32)
    _, wanted = eager(grad, *qkv, mask)
    for mine, whole in zip(kernel(grad, *qkv, mask, False)[2], wanted, strict=True):
        torch.testing.assert_close(mine, whole)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        _, exact = eager(grad, *qkv, mask)
    for mine, whole in zip(blocks(grad, *qkv, mask, False)[2], exact, strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["kernel", "blocks"])
@pytest.mark.parametrize("mask", [None, torch.tensor([INF, 0, 0, 0, 0])])
def test_causal(form, mask):
    """Also together with a mask, which closes the first query here."""
    grad, *qkv = tensors(5, 5, torch.float64)
    mask = None if mask is None else mask.double()
    out, lse, gradients = FORMS[form](grad, *qkv, mask, True)
    triangle = torch.ones(5, 5, dtype=torch.float64).tril().log()
    expected, wanted = eager(grad, *qkv, triangle if mask is None else triangle + mask)
    assert (lse[:, :, 0] == INF).all() == (mask is not None)
    for mine, whole in zip((out, *gradients), (expected, *wanted), strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-10, atol=1e-10)


class LeftPadded(nn.Module):
    """Causal attention over samples that are padded on the left, with a mask that follows from an input."""

    def __init__(self, kind: str, bias: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.qkv, self.out = kind, nn.Linear(8, 24), nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.randn(2, 5, 5)) if bias else None

    def forward(self, x, lengths):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        place = torch.arange(5)
        open_ = (place >= 5 - lengths[:, None])[:, None, None, :]
        keep = open_ & (place <= place[:, None])
        if self.kind != "bool":
            keep = torch.where(keep, 0.0, INF if self.kind == "-inf" else torch.finfo(q.dtype).min).to(q.dtype)
        if self.bias is not None:
            keep = torch.where(keep, self.bias, INF) if self.kind == "bool" else keep + self.bias
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return self.out(y.transpose(1, 2).flatten(2)).square().mean()


def batch() -> dict[str, torch.Tensor]:
    x = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(1))
    return dict(x=x, lengths=torch.tensor([5, 1, 3, 0, 4, 2]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["bool", "-inf", "lowest"])
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "dp=2,tp=2", "dp=4"])
def test_left_padded_batch(kind, mesh):
    report = verify_model(LeftPadded(kind), batch(), mesh)
    assert report.match, str(report)


@pytest.mark.parametrize("kind", ["bool", "-inf"])
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2"])
def test_left_padded_batch_with_a_learned_bias(kind, mesh):
    """The bias has a gradient of its own."""
    report = verify_model(LeftPadded(kind, bias=True), batch(), mesh)
    assert report.match, str(report)


@pytest.mark.parametrize("kind", ["bool", "-inf", "lowest"])
def test_left_padded_batch_in_mixed_precision(kind):
    report = verify_model(LeftPadded(kind), batch(), "dp=2", precision="bf16")
    assert report.match, str(report)


def rank(number: int):
    from ..runtime.parity import assert_close, assert_same_gradients, device_mesh, pair

    for kind in ("bool", "-inf"):
        mine, whole = pair(LeftPadded(kind), device_mesh("dp=2"), batch(), strategy="ddp")
        for model in (mine, whole):
            loss = model(**batch())
            loss.backward()
        assert_close(mine(**batch()), whole(**batch()))
        assert_same_gradients(mine, whole)


def test_left_padded_batch_on_processes():
    gloo.run(2, rank)
