"""Check that bodies of ops allocate at most what `workspace_bytes` says, and at least a tenth less."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from autopar.ops import (
    attention,
    attention_blocks,
    attention_gpu,
    attention_window,
    attention_workspace,
    autopar,
    canonical,
    counter_rng,
    fp8,
    fp8_linear,
    grouped,
    vocab_loss,
    workspace,
)  # fmt: skip
from autopar.ops.attention_dropout import WeightDropout

from ..helpers.fake_allocations import counted, nbytes
from .test_attention_gpu import BF16, CALLS, FP32, FP64, both, seq_major

SLACK_BYTES = 64 * 1024  # small tensors of a number a row


def check(said: int, results, count, most: float = 1.1) -> None:
    found = count.peak_bytes - nbytes(results)
    assert found <= said + SLACK_BYTES, (found, said)
    assert said <= most * found + SLACK_BYTES, (found, said)


def inside(arguments) -> int:
    """Return the bytes that the kernel of a backward allocates for these arguments of `attention_bw`."""
    _, q, k, v, _, _, mask, *rest = arguments
    causal = rest[0] if rest else False
    form = attention_gpu.form_of(q, k, v, mask, causal).name
    (b, h, s, _), t = q.shape, k.shape[2]
    return attention_workspace._inside(
        form, b, h, s, t, attention_workspace._width(q, v), q.dtype.itemsize, h != k.shape[1]
    )


LARGE = [
    (1, 32, 8, 4096, 4096, 128, 128, BF16, True), (1, 8, 8, 2048, 2048, 80, 80, BF16, True),
    (1, 8, 8, 2048, 2048, 36, 36, BF16, False), (1, 8, 8, 2048, 2048, 192, 128, BF16, True),
    (1, 8, 2, 2048, 2048, 128, 128, FP32, True), (2, 8, 2, 2048, 2048, 64, 64, BF16, False, (2, 1, 1, 2048)),
    (2, 8, 8, 2048, 2048, 64, 64, BF16, False, (2, 1, 2048, 2048)),
]  # fmt: skip


@pytest.mark.parametrize("call", [*LARGE, *(call for calls in CALLS.values() for call in calls)])
def test_attention(call):
    causal = call[8]
    for results, arguments, count in both(*call, *[None] * (10 - len(call)), lambda x: inside([*x, causal])):
        op = autopar.attention.default if len(results) == 2 else autopar.attention_bw.default
        check(workspace.workspace_bytes(op, *arguments, causal, None), results, count)


@pytest.mark.parametrize("heads, kv_heads, rows, columns, causal", [
    (8, 8, 4096, 4096, True), (8, 2, 4096, 4096, False), (8, 2, 2048, 16384, True), (4, 4, 1024, 4096, False),
])  # fmt: skip
def test_documents(heads, kv_heads, rows, columns, causal):
    """A range of the queries has a mask, keys have gradients in a wide type; without documents it is far less."""

    def make(backward):
        q, k, v = (seq_major(1, h, n, 64, BF16, "cuda") for h, n in ((heads, rows), *[(kv_heads, columns)] * 2))
        ids = [torch.empty(1, n, dtype=torch.int64, device="cuda") for n in (rows, columns)]
        lse = torch.empty(1, heads, rows, dtype=FP32, device="cuda")
        tensors = (
            seq_major(1, heads, rows, 64, BF16, "cuda"),
            q,
            k,
            v,
            seq_major(1, heads, rows, 64, BF16, "cuda"),
            lse,
        )
        return [*(tensors if backward else (q, k, v)), None, causal, None, columns - rows, 0, 0, *ids]

    of_range = attention_workspace._inside("efficient", 1, heads, min(rows, 2048), columns, 64, 2, heads != kv_heads)
    for body, op in ((attention.attention, autopar.attention), (attention.attention_bw, autopar.attention_bw)):
        make_them = partial(make, op is autopar.attention_bw)
        results, arguments, count = counted(body._init_fn, make_them, lambda _: of_range)
        check(workspace.workspace_bytes(op.default, *arguments), results, count)


@pytest.mark.parametrize("heads, kv_heads, length, window, causal, masked", [
    (8, 8, 8192, 512, True, False), (8, 2, 8192, 512, False, False), (8, 2, 16384, 4096, True, False),
    (4, 4, 8192, 1000, False, True),
])  # fmt: skip
def test_windows(heads, kv_heads, length, window, causal, masked):
    """A range of the queries has a mask over the keys that its windows reach, and copies of those alone."""

    def make(backward):
        q, k, v = (seq_major(1, h, length, 64, BF16, "cuda") for h in (heads, kv_heads, kv_heads))
        out, lse = torch.empty_like(q), torch.empty(1, heads, length, dtype=FP32, device="cuda")
        mask = torch.empty(1, 1, 1, length, dtype=BF16, device="cuda") if masked else None
        return [*((q, q, k, v, out, lse) if backward else (q, k, v)), mask, causal, None]

    rows = attention_window.rows_of(window)
    columns = rows + (1 if causal else 2) * (window - 1)
    of_range = attention_workspace._inside("efficient", 1, heads, rows, columns, 64, 2, heads != kv_heads)
    for body, op in ((attention.attention, autopar.attention), (attention.attention_bw, autopar.attention_bw)):
        make_them = partial(make, op is autopar.attention_bw)
        results, arguments, count = counted(partial(body._init_fn, window=window), make_them, lambda _: of_range)
        check(workspace.workspace_bytes(op.default, *arguments, window=window), results, count)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 1)])
def test_blocks(causal, heads, kv_heads):
    """Without a kernel, in fp64: on a CPU, whose fake copies need no CUDA."""
    q, *kv = (seq_major(1, n, 2048, 64, FP64, "meta") for n in (heads, kv_heads, kv_heads))
    lse = torch.empty(1, heads, 2048, dtype=FP64, device="meta")
    form = attention_gpu.form_of(q, *kv, None, causal)
    assert form.name == "blocks"
    tail = (None, causal, 0.125)

    def cpu(*values):
        return lambda: [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in values]

    results, _, count = counted(lambda *x: form.forward(*x, *tail), cpu(q, *kv))
    check(workspace.workspace_bytes(autopar.attention.default, q, *kv, *tail), results, count)
    results, _, count = counted(lambda *x: form.backward(*x, *tail), cpu(q, q, *kv, q, lse))
    check(workspace.workspace_bytes(autopar.attention_bw.default, q, q, *kv, q, lse, *tail), results, count)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("length", [1023, 2048, 2044, 2047])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_that_drop_weights(causal, length, monkeypatch):
    """Bools and what draws them stand beside a block; at lengths of four one word serves four weights."""
    monkeypatch.setitem(counter_rng.BLOCK_NUMEL, "cpu", counter_rng.BLOCK_NUMEL["cuda"])
    q, k, v = (torch.empty(1, n, length, 64, dtype=FP64, device="meta") for n in (4, 2, 2))
    strides = counter_rng.contiguous_strides((1, 4, length, length))
    drops, dropout = (None, 0.1, 0, 0, strides), WeightDropout(3, 0, tuple(strides), 2**13)
    tail = (None, causal, 0.125, 0, 0, 0, None, None)
    attend, attend_backward = (
        partial(f, dropout=dropout) for f in (attention_blocks.forward, attention_blocks.backward)
    )

    def cpu(*shapes):
        return lambda: [torch.empty(shape, dtype=FP64) for shape in shapes]

    results, _, count = counted(lambda *x: attend(*x, None, causal, 0.125), cpu(q.shape, k.shape, v.shape))
    said = workspace.workspace_bytes(autopar.attention.default, q, k, v, *tail, None, 0.0, False, *drops)
    check(said, results, count)
    shapes = q.shape, q.shape, k.shape, v.shape, q.shape, q.shape[:3]
    results, _, count = counted(lambda *x: attend_backward(*x, None, causal, 0.125), cpu(*shapes))
    arguments = q, q, k, v, q, q[..., 0], *tail, False, 0.0, *drops
    said = workspace.workspace_bytes(autopar.attention_bw.default, *arguments)
    check(said, results, count)


@pytest.mark.parametrize("shape, whole", [
    ((16, 1024, 1024), None), ((64, 1024, 1024), None), ((4096, 4095), (4096, 4097)), ((3, 5), None),
])  # fmt: skip
def test_dropout(shape, whole, monkeypatch):
    """The bytes that draw are bounded, however large the tensor is."""
    monkeypatch.setitem(counter_rng.BLOCK_NUMEL, "cpu", counter_rng.BLOCK_NUMEL["cuda"])  # of fake ones, which index
    monkeypatch.setattr(counter_rng, "key_and_start", lambda *_: (3, 0))  # of a state that has values
    constants = 0.1, 0, 0, counter_rng.contiguous_strides(whole or shape)

    def make():
        return [torch.empty(shape, dtype=BF16), torch.empty(2, dtype=torch.int64), *constants]

    results, arguments, count = counted(counter_rng.dropout._init_fn, make)
    said = workspace.workspace_bytes(autopar.dropout.default, *arguments)
    check(said, results, count, most=1.1 if whole is None else 1.3)  # rows that begin inside of a word take some more
    assert said <= 72 * 2**21


@pytest.mark.parametrize("rows, vocabulary", [((4096,), 32000), ((2, 1024), 16032), ((7,), 50257)])
def test_loss(rows, vocabulary):
    def row(dtype=FP32):
        return torch.empty(rows, dtype=dtype, device="cuda")

    def logits():
        return torch.empty(*rows, vocabulary, dtype=BF16, device="cuda")

    for body, op, make in (
        (vocab_loss.vocab_loss, autopar.vocab_loss, lambda: [logits(), row(torch.int64), row(), 0]),
        (vocab_loss.vocab_loss_bw, autopar.vocab_loss_bw, lambda: [row(), row(), logits(), row(torch.int64), row(), 0]),
    ):
        results, arguments, count = counted(body._init_fn, make)
        check(workspace.workspace_bytes(op.default, *arguments), results, count)


def test_embedding():
    def make():
        return [torch.empty(1000, 256, dtype=BF16), torch.empty(4, 512, dtype=torch.int64), -1, 0]

    results, arguments, count = counted(canonical.embedding._init_fn, make)
    check(workspace.workspace_bytes(autopar.embedding.default, *arguments), results, count)

    def make_backward():
        return [torch.empty(4, 512, 256, dtype=BF16), torch.empty(4, 512, dtype=torch.int64), -1, 0, 1000]

    results, arguments, count = counted(canonical.embedding_dw._init_fn, make_backward)
    check(workspace.workspace_bytes(autopar.embedding_dw.default, *arguments), results, count)


def test_an_op_without():
    assert workspace.workspace_bytes(torch.ops.aten.mm.default, None, None) == 0


@pytest.mark.parametrize("dtype, k, n", [(BF16, 512, 256), (FP32, 510, 256)])
def test_grouped_products(dtype, k, n, monkeypatch):
    """Products are made by the kernel, or one by one, as if all groups had as many rows."""
    monkeypatch.setattr(grouped, "_ranges", lambda ends: [(i, 512 * i, 512 * i + 512) for i in range(8)])

    def rows(width):
        return torch.empty(4096, width, dtype=dtype)

    def group():
        return torch.empty(4096, dtype=torch.int64)

    for body, op, make in (
        (grouped.grouped_mm, autopar.grouped_mm, lambda: [rows(k), torch.empty(8, k, n, dtype=dtype), group(), 0]),
        (grouped.grouped_mm_dw, autopar.grouped_mm_dw, lambda: [rows(k), rows(n), group(), 8, 0]),
    ):
        results, arguments, count = counted(body._init_fn, make)
        check(workspace.workspace_bytes(op.default, *arguments), results, count)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("name", ["rows", "columns", "blocks", "tensor"])
def test_quantization_to_fp8(name, dtype):
    def make():
        x = torch.empty(4096, 2048, dtype=dtype, device="cuda")
        return [x, torch.empty((), device="cuda"), "e4m3"] if name == "tensor" else [x]

    results, arguments, count = counted(getattr(fp8, f"fp8_{name}")._init_fn, make)
    check(workspace.workspace_bytes(getattr(autopar, f"fp8_{name}").default, *arguments), results, count)


def test_products_in_fp8(monkeypatch):
    """Codes that add up along their other dim are copied in its order."""
    monkeypatch.setattr(fp8_linear, "_has_kernel", lambda *_: True)

    def make(*shapes):
        step = torch.empty((), device="cuda")
        return [x for shape in shapes for x in (torch.empty(shape, dtype=torch.uint8, device="cuda"), step)]

    for name, shapes in (("dx", ((4096, 1024), (1024, 2048))), ("dw", ((4096, 1024), (4096, 2048)))):
        body = getattr(fp8_linear, f"fp8_linear_{name}")._init_fn
        results, arguments, count = counted(body, lambda s=shapes: [*make(*s), "e5m2", BF16])
        said = workspace.workspace_bytes(getattr(autopar, f"fp8_linear_{name}").default, *arguments)
        check(said, results, count)
