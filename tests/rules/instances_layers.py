"""Instances of ops that layers are made of: products, vocabulary, attention, norms, convolutions, random numbers."""

from __future__ import annotations

import torch

from autopar.ops.nf4 import quantize

from .instances import between, op, real, whole

aten = torch.ops.aten
STATE = torch.tensor([5, 3])

# products
rows, matrices, group = real(7, 4), real(3, 4, 6), torch.tensor([2, 0, 0, 3, 2, 0, 2])  # none in 1, and one in no group
op("autopar.grouped_mm.default", rows, matrices, group)
op("autopar.grouped_mm_dw.default", rows, real(7, 6), group, 3)
op("autopar.dispatch.default", rows, group, 3)
op("autopar.dispatch.default", group, group, 3)
op("autopar.combine.default", rows, group, 3)
experts_of_tokens = torch.tensor([2, 0, 0, 1, 2, 1, 0, 2, 1, 2, 0, 1])
op("autopar.dispatch_tokens.default", real(6, 5), experts_of_tokens, 3)
op("autopar.combine_tokens.default", real(12, 5), experts_of_tokens, 3, 2, torch.float64)
op("mm", real(5, 6), real(6, 7))
op("mm", real(8, 4), real(4, 1))
op("bmm", real(4, 5, 6), real(4, 6, 7))
op("mv", real(5, 6), real(6))
op("dot", real(6), real(6))
op("addmm", real(7), real(5, 6), real(6, 7))
op("addmm", real(5, 1), real(5, 6), real(6, 7), beta=0.5, alpha=2)
op("baddbmm", real(4, 1, 7), real(4, 5, 6), real(4, 6, 7))
op("addmv", real(5), real(5, 6), real(6))
op("linear", real(4, 5, 6), real(7, 6))
op("linear", real(4, 5, 6), real(7, 6), real(7))
op("autopar.linear.default", real(4, 5, 6), real(7, 6))
op("autopar.linear.default", real(5, 6), real(8, 6))
op("autopar.linear_dx.default", real(4, 5, 6), real(6, 7))
op("autopar.matmul.default", real(4, 5, 3, 6), real(4, 5, 6, 7))
op("autopar.matmul.default", real(5, 3, 6), real(5, 6, 4))
op("autopar.linear_dw.default", real(4, 5, 6), real(4, 5, 7))

# quantized weights: tiles of 64 x 4 and 128 x 1 blocks, several of them in either dim, a stack of matrices, scales that
# are not quantized, codes of one byte
for shape, quant_type, block_size, double_quant in (
    ((384, 192), "nf4", 16, True), ((256, 48), "fp4", 16, True), ((2, 128, 64), "nf4", 4, True),
    ((5, 96), "nf4", 16, False), ((128, 32), "int8", 4, True), ((6, 24), "int8", 8, False),
):  # fmt: skip
    weight = quantize(real(*shape), quant_type, block_size, double_quant)
    parts = [weight.get(part) for part in ("packed", "absmax", "scale", "offset")]
    op("autopar.dequantize.default", *parts, quant_type, torch.float32)

# vocabulary
op("autopar.embedding.default", real(7, 6), whole(7, 4, 5), -1, 0)
op("autopar.embedding_dw.default", real(4, 5, 6), whole(7, 4, 5), 2, 0, 7)
rows = (real(4, 5, 7), whole(7, 4, 5))
op("autopar.vocab_loss.default", *rows, rows[0].amax(-1), 0)
op("autopar.vocab_loss_bw.default", real(4, 5), real(4, 5), *rows, rows[0].amax(-1), 0)
op("embedding", real(7, 6), whole(7, 4, 5))
op("embedding_dense_backward", real(4, 5, 6), whole(7, 4, 5), 7, 2, False)
op("embedding_dense_backward", real(4, 5, 6), whole(7, 4, 5), 7, -1, True)
log_p, target = real(5, 7).log_softmax(-1), whole(7, 5)
op("nll_loss_forward", log_p, target, None, 1, -100)
op("nll_loss_backward", real(), log_p, target, None, 1, -100, torch.tensor(5.0).double())
op("nll_loss2d_forward", real(5, 7, 2, 3), whole(7, 5, 2, 3), None, 1, -100)
op("nll_loss2d_backward", real(), real(5, 7, 2, 3), whole(7, 5, 2, 3), None, 1, -100, torch.tensor(30.0).double())

# CTC: samples with rows of targets of their own, and all targets in one row
log_p, lengths, sizes = real(6, 5, 4).log_softmax(-1), torch.tensor([6, 5, 6, 4, 6]), torch.tensor([2, 3, 1, 2, 0])
for targets in (whole(3, 5, 4) + 1, whole(3, 8) + 1):
    for zero_infinity in (True, False):
        op("autopar.ctc.default", log_p, targets, lengths, sizes, 0, zero_infinity)
        op("autopar.ctc_bw.default", real(5), log_p, targets, lengths, sizes, 0, zero_infinity)

# attention: equal heads (even and uneven), grouped heads, one key head; masks that broadcast
for b, h, h_kv, m, width in (
    (4, 5, 5, None, 4), (2, 6, 6, (2, 6, 3, 5), 4), (2, 8, 4, (2, 1, 3, 5), 4), (4, 6, 1, (1, 1, 3, 5), 4),
    (3, 6, 3, (3, 5), 4), (4, 6, 6, None, 2), (2, 6, 3, (3, 5), 7),
):  # fmt: skip
    q, k, v, s = real(b, h, 3, 4), real(b, h_kv, 5, 4), real(b, h_kv, 5, width), None if m is None else real(*m)
    op("autopar.attention.default", q, k, v, s, False, None)
    out, lse = torch.ops.autopar.attention(q, k, v, s, False, None)
    op("autopar.attention_bw.default", real(b, h, 3, width), q, k, v, out, lse, s, False, None)
keep = torch.ones(4, 1, 3, 5).tril().bool()  # which closes some queries of the second sample
keep[1, :, :, :2] = False
for s in (keep, torch.zeros(4, 1, 3, 5, dtype=torch.float64).masked_fill(~keep, float("-inf"))):
    q, k, v = real(4, 6, 3, 4), real(4, 6, 5, 4), real(4, 6, 5, 4)
    op("autopar.attention.default", q, k, v, s, False, None)
    out, lse = torch.ops.autopar.attention(q, k, v, s, False, None)
    op("autopar.attention_bw.default", real(4, 6, 3, 4), q, k, v, out, lse, s, False, None)
for h_kv, rows, columns, s in (  # causal: as many queries as keys, fewer, more; keys of a sample all closed
    (4, 7, 7, None), (2, 5, 9, None), (1, 9, 5, None),
    (2, 7, 7, torch.tensor([False] * 7 + [True] * 7).view(2, 1, 1, 7)),
    (4, 6, 6, real(6, 6)), (4, 6, 6, real(1, 1, 6)), (4, 6, 6, real(2, 1, 6, 6)),
):  # fmt: skip
    q, k, v = real(2, 4, rows, 4), real(2, h_kv, columns, 4), real(2, h_kv, columns, 4)
    op("autopar.attention.default", q, k, v, s, True, None)
    out, lse = torch.ops.autopar.attention(q, k, v, s, True, None)
    op("autopar.attention_bw.default", real(2, 4, rows, 4), q, k, v, out, lse, s, True, None)
for h_kv, ids in (  # documents: of each sample, of all alike
    (2, torch.tensor([[0, 0, 1, 1, 1, 2], [3, 3, 3, 3, 4, 4]])), (4, torch.tensor([[0, 1, 1, 1, 2, 2]])),
):  # fmt: skip
    q, k, v = real(2, 4, 6, 4), real(2, h_kv, 6, 4), real(2, h_kv, 6, 4)
    op("autopar.attention.default", q, k, v, None, True, None, 0, 0, 0, ids, ids)
    out, lse = torch.ops.autopar.attention(q, k, v, None, True, None, 0, 0, 0, ids, ids)
    op("autopar.attention_bw.default", real(2, 4, 6, 4), q, k, v, out, lse, None, True, None, 0, 0, 0, ids, ids)
for h_kv, causal, window in ((4, True, 3), (2, False, 2), (1, True, 9)):  # windows, of which the last is open to all
    q, k, v = real(2, 4, 7, 4), real(2, h_kv, 7, 4), real(2, h_kv, 7, 4)
    op("autopar.attention.default", q, k, v, None, causal, None, window=window)
    out, lse = torch.ops.autopar.attention(q, k, v, None, causal, None, window=window)
    op("autopar.attention_bw.default", real(2, 4, 7, 4), q, k, v, out, lse, None, causal, None, window=window)
for h_kv, m, causal, softcap, sinks in (  # what models write out: caps, sinks, learned masks of several forms
    (6, None, True, 0.5, real(6)), (2, (1, 6, 5, 7), False, 0.5, None), (6, (4, 1, 5, 7), True, 0.0, real(6)),
    (3, (6, 1, 7), False, 0.0, None), (6, (4, 6, 1, 1), False, 0.0, None),
):  # fmt: skip
    q, k, v, s = real(4, 6, 5, 4), real(4, h_kv, 7, 4), real(4, h_kv, 7, 4), None if m is None else real(*m)
    tail = s, causal, None, 0, 0, 0, None, None
    op("autopar.attention.default", q, k, v, *tail, sinks, softcap)
    out, lse = torch.ops.autopar.attention(q, k, v, *tail, sinks, softcap)
    op("autopar.attention_bw.default", real(4, 6, 5, 4), q, k, v, out, lse, *tail, True, softcap)
    if s is not None:
        op("autopar.attention_bias_bw.default", real(4, 6, 5, 4), q, k, v, out, lse, *tail, True, softcap)
        closed = s.masked_fill(torch.arange(s.numel()).view(s.shape) % 7 < 4, torch.finfo(s.dtype).min)
        op("autopar.even_gradient.default", real(4, 6, 5, 4), closed, 7)
    if sinks is not None:
        op("autopar.attention_sinks_bw.default", real(4, 6, 5, 4), out, lse, sinks)
for h_kv, m, causal, softcap, has_documents in (  # dropout of the weights, which are numbered as a whole
    (6, None, True, 0.0, False), (3, (4, 1, 5, 7), False, 0.5, False), (1, (1, 6, 5, 7), True, 0.0, False),
    (6, None, True, 0.0, True),
):  # fmt: skip
    rows, columns = (5, 5) if has_documents else (5, 7)
    ids = torch.tensor([[0, 0, 1, 1, 2]]) if has_documents else None
    q, k, v, s = real(4, 6, rows, 4), real(4, h_kv, columns, 4), real(4, h_kv, columns, 4), m and real(*m)
    tail, drops = (
        (s, causal, None, 0, 0, 0, ids, ids),
        (STATE, 0.4, 2, 0, [6 * rows * columns, rows * columns, columns, 1]),
    )
    op("autopar.attention.default", q, k, v, *tail, None, softcap, False, *drops)
    out, lse = torch.ops.autopar.attention(q, k, v, *tail, None, softcap, False, *drops)
    op("autopar.attention_bw.default", real(4, 6, rows, 4), q, k, v, out, lse, *tail, True, softcap, *drops)
    if s is not None:
        op("autopar.attention_bias_bw.default", real(4, 6, rows, 4), q, k, v, out, lse, *tail, True, softcap, *drops)
q, k, v = real(4, 6, 5, 4), real(4, 6, 5, 4), real(4, 6, 5, 4)
op("_scaled_dot_product_flash_attention_for_cpu", q, k, v, 0.0, True)
out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
op("_scaled_dot_product_flash_attention_for_cpu_backward", real(4, 6, 5, 4), q, k, v, out, lse, 0.0, True)

# norms
x = real(4, 5, 6)
w, b = real(6), real(6)
for weight, bias in ((w, b), (w, None), (None, None)):
    op("native_layer_norm", x, [6], weight, bias, 1e-5)
    _, mean, rstd = aten.native_layer_norm(x, [6], weight, bias, 1e-5)
    wanted = [True, weight is not None, bias is not None]
    op("native_layer_norm_backward", real(4, 5, 6), x, [6], mean, rstd, weight, bias, wanted)
op("native_layer_norm", real(4, 2, 3), [2, 3], real(2, 3), real(2, 3), 1e-5)
op("_fused_rms_norm", x, [6], w, 1e-5)
op("_fused_rms_norm_backward", real(4, 5, 6), x, [6], aten._fused_rms_norm(x, [6], w, 1e-5)[1], w, [True, True])
image = real(5, 6, 4, 3)
op("native_group_norm", image, w, b, 5, 6, 12, 2, 1e-5)
_, mean, rstd = aten.native_group_norm(image, w, b, 5, 6, 12, 2, 1e-5)
op("native_group_norm_backward", real(5, 6, 4, 3), image, mean, rstd, w, 5, 6, 12, 2, [True, True, True])
op("native_batch_norm _native_batch_norm_legit_functional", image, w, b, real(6), between(1, 2, 6), True, 0.1, 1e-5)
op("native_batch_norm", image, w, b, real(6), between(1, 2, 6), False, 0.1, 1e-5)
op("_native_batch_norm_legit", image, w, b, real(6), between(1, 2, 6), True, 0.1, 1e-5)
op("_native_batch_norm_legit.no_stats", image, w, b, True, 0.1, 1e-5)
op("_native_batch_norm_legit_no_training", image, w, b, real(6), between(1, 2, 6), 0.1, 1e-5)
_, mean, rstd = aten._native_batch_norm_legit.no_stats(image, w, b, True, 0.1, 1e-5)
op("native_batch_norm_backward", real(5, 6, 4, 3), image, w, None, None, mean, rstd, True, 1e-5, [True, True, True])

op("autopar.square_deviation.default", image, mean)
for weight, bias in ((w, b), (None, None)):
    op("autopar.batch_norm.default", image, mean, between(1, 2, 6), weight, bias, 60)
    op("autopar.batch_norm_dx.default", real(5, 6, 4, 3), image, mean, between(1, 2, 6), weight, real(6), real(6), 60)
op("autopar.batch_norm_sums.default", real(5, 6, 4, 3), image, mean, between(1, 2, 6))
op("autopar.batch_norm_sums.default", real(5, 6), real(5, 6), real(6), between(1, 2, 6))
for dim, sizes in ((0, (6, 1, 1)), (2, (1, 1, 4))):
    kernel, gain = real(6, 5, 4), between(1, 2, *sizes)
    op("_weight_norm_interface", kernel, gain, dim)
    op(
        "_weight_norm_interface_backward",
        real(6, 5, 4),
        kernel,
        gain,
        aten._weight_norm_interface(kernel, gain, dim)[1],
        dim,
    )

# convolution: plain, with bias, grouped, depthwise, transposed
for bias, transposed, groups, weight in (
    (None, False, 1, (8, 6, 3, 3)), (8, False, 1, (8, 6, 3, 3)), (8, False, 2, (8, 3, 3, 3)),
    (6, False, 6, (6, 1, 3, 3)), (None, True, 1, (6, 8, 3, 3)), (8, True, 2, (6, 4, 3, 3)),
):  # fmt: skip
    image, kernel = real(5, 6, 4, 3), real(*weight)
    rest = ([1, 1], [1, 1], [1, 1], transposed, [0, 0], groups)
    op("convolution", image, kernel, None if bias is None else real(bias), *rest)
    grad = torch.randn_like(aten.convolution(image, kernel, None, *rest))
    for wanted in ([True, True, True], [True, True, False], [False, True, True]):
        op("convolution_backward", grad, image, kernel, [grad.shape[1]] if wanted[2] else None, *rest, wanted)
image = real(5, 6, 4, 4)
op("max_pool2d_with_indices avg_pool2d", image, [2, 2], [2, 2])
op("_adaptive_avg_pool2d", image, [2, 2])
places = aten.max_pool2d_with_indices(image, [2, 2], [2, 2])[1]
op("max_pool2d_with_indices_backward", real(5, 6, 2, 2), image, [2, 2], [2, 2], [0, 0], [1, 1], False, places)
op("avg_pool2d_backward", real(5, 6, 2, 2), image, [2, 2], [2, 2], [0, 0], False, True, None)
op("_adaptive_avg_pool2d_backward", real(5, 6, 2, 2), image)
op("adaptive_max_pool2d", image, [2, 2])
op("adaptive_max_pool2d_backward", real(5, 6, 2, 2), image, aten.adaptive_max_pool2d(image, [2, 2])[1])
op("upsample_nearest2d", image, [8, 8])
op("upsample_bilinear2d", image, [8, 8], False)
op("upsample_nearest2d.vec", image, None, [2.0, 2.0])
op("upsample_bilinear2d.vec", image, [8, 8], True, None)
op("upsample_nearest2d_backward", real(5, 6, 8, 8), [8, 8], [5, 6, 4, 4])
op("upsample_bilinear2d_backward", real(5, 6, 8, 8), [8, 8], [5, 6, 4, 4], False)
op("reflection_pad2d replication_pad2d", image, [1, 1, 1, 1])
op("upsample_bicubic2d", image, [8, 8], False)
op("upsample_bicubic2d.vec", image, [8, 8], True, None)
op("upsample_bicubic2d_backward", real(5, 6, 8, 8), [8, 8], [5, 6, 4, 4], False)
op("im2col", image, [2, 2], [1, 1], [0, 0], [2, 2])
op("col2im", real(5, 24, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2])
op("grid_sampler_2d", image, between(-1, 1, 5, 3, 2, 2), 0, 0, False)
op("grid_sampler_2d_backward", real(5, 6, 3, 2), image, between(-1, 1, 5, 3, 2, 2), 0, 0, False, [True, True])
op("pixel_shuffle", real(5, 8, 3, 3), 2)
op("pixel_unshuffle", real(5, 3, 4, 4), 2)
op("avg_pool1d", real(5, 6, 4), [2], [2])
op("reflection_pad1d replication_pad1d", real(5, 6, 4), [1, 1])

# random numbers: whole tensors start at index 0
op("autopar.dropout.default", real(4, 5, 6), STATE, 0.4, 2, 0, [30, 6, 1])
op("autopar.dropout.default", real(8, 12), STATE, 0.4, 2, 0, [12, 1])
op(
    "autopar.uniform.default autopar.normal.default",
    STATE,
    [4, 5, 6],
    1,
    0,
    [30, 6, 1],
    dtype=torch.float64,
    device="cpu",
)
for own in (real(4, 6, 5, 4), real(2, 1, 3, 6)):  # of the first chunk of a row, which has no earlier keys
    op("autopar.with_earlier.default", own, 0)
    op("autopar.of_own.default", own, own.shape[2])
