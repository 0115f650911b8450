"""Instances of every op in the table of rules: INSTANCES[name] is a list of (args, kwargs) on small real tensors.

Sizes are even and uneven over 2 and 3 devices, and factors of one op differ in size where equality could hide a mix-up.
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch
import transformers.integrations.moe  # noqa: F401  (registers transformers::*)

import autopar.ops  # noqa: F401  (registers autopar::*)
from autopar.rules.table import ACTIVATIONS, BINARY, INTEGER, POINTWISE_BACKWARDS, UNARY, full_name

from .rule_check import zeros_node

INSTANCES: dict[str, list[tuple[tuple, dict]]] = defaultdict(list)
generator = torch.Generator().manual_seed(0)


def real(*size: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def between(low: float, high: float, *size: int) -> torch.Tensor:
    return torch.rand(size, generator=generator, dtype=torch.float64) * (high - low) + low


def whole(high: int, *size: int) -> torch.Tensor:
    return torch.randint(0, high, size, generator=generator)


def mask(*size: int) -> torch.Tensor:
    return whole(2, *size).bool()


def op(names: str, *args, **kwargs) -> None:
    """One instance of each of the named ops, written as in the table."""
    for name in names.split():
        INSTANCES[full_name(name)].append((args, kwargs))


def overload(full: str):
    namespace, name, kind = full.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), kind)


def positional(full: str) -> list[str]:
    return [str(a.type) for a in overload(full)._schema.arguments if not a.has_default_value() and not a.kwarg_only]


# element by element: arguments are made from the schema, with broadcasting on the second tensor
ABOVE_ONE = ("acosh", "igamma", "special_zeta")
ROUNDING = ("ceil", "floor", "frac", "trunc", "round", "round.decimals")
PREDICATES = ("is", "eq.", "ne.", "lt.", "le.", "gt.", "ge.", "logical")
OPTIONS = {
    "round.decimals": {"decimals": 1},
    "clamp": {"min": -0.5, "max": 0.5},
    "clamp.Tensor": {"min": between(-1, 0, 6)},
    "logit_backward": {"eps": 0.1},
    "div.Tensor_mode": {"rounding_mode": "floor"},
    "div.Scalar_mode": {"rounding_mode": "trunc"},
}


def pointwise_instance(name: str) -> None:
    full = full_name(name)
    integers = name in INTEGER.split() + ["bitwise_not"]
    shapes = [(5, 1, 6), (4, 6), (1,)]
    if name.endswith("backward") or "_backward" in name or name in ("_prelu_kernel", "polar"):
        shapes = [(5, 4, 6)] * 3
    args: list = []
    for kind in positional(full):
        if kind == "Tensor":
            shape = shapes[sum(isinstance(a, torch.Tensor) for a in args)]
            args.append(whole(7, *shape) + 1 if integers else between(0.05, 0.95, *shape) * (whole(2, *shape) * 2 - 1))
        elif kind == "bool":
            args.append(False)
        else:
            args.append(2 if integers else 0.3 + 0.4 * sum(isinstance(a, float) for a in args))
    if name in ("native_dropout_backward", *(n for n in POINTWISE_BACKWARDS.split() if n.startswith("fake"))):
        args[1] = mask(5, 4, 6)
    if name == "log_sigmoid_backward":
        args[2] = torch.exp(-args[1].abs())
    if name in ABOVE_ONE:
        args = [a.abs() + 1 for a in args]
    if name in ROUNDING:
        args[0] = 5 * args[0]
    if name.startswith(PREDICATES):
        choice = torch.tensor([-1.0, 0.0, 0.3, math.inf, -math.inf, math.nan], dtype=torch.float64)
        args = [choice[whole(6, *a.shape)] if isinstance(a, torch.Tensor) else a for a in args]
    INSTANCES[full].append((tuple(args), OPTIONS.get(name, {})))


for name in (UNARY + ACTIVATIONS + BINARY + INTEGER + POINTWISE_BACKWARDS).split():
    pointwise_instance(name)

op("neg positive alias clone detach lift_fresh_copy zeros_like ones_like empty_like", real(5, 6))
op("mul.Scalar div.Scalar", real(5, 6), 2.5)
op("real imag _conj _conj_physical", torch.complex(real(5, 6), real(5, 6)))
op("full_like fill.Scalar", real(5, 6), 3.0)
op("fill.Tensor", real(5, 6), real())
op("add.Tensor sub.Tensor mul.Tensor div.Tensor", real(5, 1, 6), real(4, 6))
op("rsub.Tensor copy", real(5, 6), real(6))
op("add.Tensor sub.Tensor", real(5, 6), real(5, 6), alpha=2)
op("add.Tensor mul.Tensor div.Tensor", real(5, 6), 2.0)
op("mul.Tensor", mask(5, 6), real(5, 1))
op("mul.Tensor", whole(4, 5, 6), whole(4, 6))
op("add.Tensor", zeros_node(5, 6), real(5, 6))
op("addcmul addcdiv", real(5, 6), real(5, 1), between(1, 2, 6), value=0.5)
op("lerp.Scalar", real(5, 6), real(6), 0.3)
op("lerp.Tensor", real(5, 6), real(6), real(5, 1))
op("where.self", mask(5, 6), real(5, 6), real(6))
op("where.self", mask(5, 6), real(5, 6), zeros_node())
op("where.ScalarOther", mask(5, 6), real(5, 6), 0.0)
op("where.ScalarOther", mask(5, 6), real(6), 2.0)
op("where.ScalarSelf", mask(5, 6), 0, real(5, 6))
op("where.Scalar", mask(5, 6), 1.0, 2.0)
op("masked_fill.Scalar", real(5, 6), mask(5, 1), 0)
op("masked_fill.Scalar", real(5, 6), mask(6), -3.0)
op("masked_fill.Tensor", real(5, 6), mask(5, 1), real())
op("_to_copy", real(5, 6, dtype=torch.float32), dtype=torch.float64)
op("_to_copy", real(5, 6), dtype=torch.float32)
op("_to_copy", real(5, 6), dtype=torch.int64)
op("prims.convert_element_type.default", real(5, 6, dtype=torch.float32), torch.float64)
op("fake_quantize_per_tensor_affine_cachemask", real(5, 6).float(), 0.1, 0, -8, 7)
scales = between(0.05, 0.2, 6).float()
op("fake_quantize_per_channel_affine_cachemask", real(5, 6).float(), scales, torch.zeros(6).int(), 1, -8, 7)
op("bucketize.Tensor", real(5, 6), torch.tensor([-1.0, 0.0, 1.0]).double())

# products
rows, matrices, ends = real(7, 4), real(3, 4, 6), torch.tensor([2, 5, 7])
op("transformers.grouped_mm_fallback.default", rows, matrices, ends)
op("transformers.grouped_mm_fallback_backward.default", rows, matrices, ends, real(7, 6))
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

# reductions; an empty list of dims means all of them, except to all.dims and any.dims
x = real(4, 5, 6)
for dims in ([1], [0, -1], [], None):
    op("sum.dim_IntList mean.dim var.correction std.correction var_mean.correction std_mean.correction", x, dims)
    op("linalg_vector_norm", x, 2, dims)
    op("all.dims", whole(9, 4, 5, 6) > 0, dims)
    op("any.dims", whole(20, 4, 5, 6) == 0, dims)
op("sum.dim_IntList mean.dim", x, [1], True)
op("sum.dim_IntList", whole(9, 4, 5, 6), [1, 2])
op("sum.dim_IntList sum", mask(4, 5, 6), *())
INSTANCES["aten.sum.dim_IntList"][-1] = ((mask(4, 5, 6), [0], True), {})
op("sum mean max min amax amin prod argmax argmin norm.Scalar", x)
op("amax amin logsumexp", x, [1])
op("amax", x, [0, 2], True)
op("amax amin", x, [])
op("amax", whole(9, 4, 5), [0])
op("argmax argmin max.dim min.dim median.dim mode prod.dim_int", x, 1)
op("max.dim", x, -1, True)
op("kthvalue", x, 2, 1)
op("aminmax", x, dim=1)
op("all any", mask(4, 5))
op("all.dim", whole(9, 4, 5) > 0, 1)
op("any.dim", whole(5, 4, 5) == 0, 1)
op("norm.ScalarOpt_dim", x, 2, [1])
op("histc", between(0, 4, 6, 5), 4, 0, 4)
op("histc", real(6), 4)
op("count_nonzero.dim_IntList", whole(3, 4, 5, 6), [1])

# along a dim
op("_softmax _log_softmax", x, -1, False)
op("_safe_softmax", x, 1)
op("_softmax_backward_data _log_softmax_backward_data", x, real(4, 5, 6), 1, torch.float64)
op("cumsum cumprod cummax cummin logcumsumexp argsort", x, 1)
op("sort", x)
op("sort.stable argsort.stable", x, stable=True, dim=1)
op("topk", x, 2)
op("topk", x, 3, 1)
op("glu", x, -1)
op("glu_backward", real(4, 5, 3), x, -1)
op("linalg_cross", real(4, 3, 5), real(4, 3, 5), dim=1)
op("flip", x, [1])
op("roll", x, [1], [2])
op("roll", x, [1])
op("tril triu", x)
op("constant_pad_nd", x, [0, 0, 1, 2])
op("constant_pad_nd", x, [1, -1], 3.0)

# losses
for reduction in (0, 1, 2):
    op("mse_loss smooth_l1_loss huber_loss soft_margin_loss", real(5, 6), real(5, 6), reduction=reduction)
    grad = real(5, 6) if reduction == 0 else real()
    op("mse_loss_backward soft_margin_loss_backward", grad, real(5, 6), real(5, 6), reduction)
    op("smooth_l1_loss_backward huber_loss_backward", grad, real(5, 6), real(5, 6), reduction, 1.0)
    p = between(0.1, 0.9, 5, 6)
    op("binary_cross_entropy binary_cross_entropy_with_logits", p, between(0, 1, 5, 6), reduction=reduction)
    op("binary_cross_entropy_backward", grad, p, between(0, 1, 5, 6), None, reduction)

# attention: equal heads (even and uneven), grouped heads, one key head; masks that broadcast
aten = torch.ops.aten
for b, h, h_kv, m in (
    (4, 5, 5, None), (2, 6, 6, (2, 6, 3, 5)), (2, 8, 4, (2, 1, 3, 5)), (4, 6, 1, (1, 1, 3, 5)), (3, 6, 3, (3, 5)),
):  # fmt: skip
    q, k, v, s = real(b, h, 3, 4), real(b, h_kv, 5, 4), real(b, h_kv, 5, 4), None if m is None else real(*m)
    op("autopar.attention.default", q, k, v, s, False, None)
    out, lse = torch.ops.autopar.attention(q, k, v, s, False, None)
    op("autopar.attention_bw.default", real(b, h, 3, 4), q, k, v, out, lse, s, False, None)
q, k, v = real(4, 6, 5, 4), real(4, 6, 5, 4), real(4, 6, 5, 4)
op("_scaled_dot_product_flash_attention_for_cpu", q, k, v, 0.0, True)
out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
op("_scaled_dot_product_flash_attention_for_cpu_backward", real(4, 6, 5, 4), q, k, v, out, lse, 0.0, True)

# norms
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
    op("_weight_norm_interface_backward", real(6, 5, 4), kernel, gain, aten._weight_norm_interface(kernel, gain, dim)[1], dim)

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

# views
op("view _unsafe_view reshape", real(4, 5, 12), [4, 5, 3, 4])
op("view reshape", real(4, 5, 3, 4), [4, 5, -1])
op("flatten.using_ints", real(4, 5, 6), 0, 1)
op("unflatten.int", real(4, 12), -1, [3, 4])
op("permute", x, [2, 0, 1])
op("transpose.int", x, -1, 0)
op("t", real(5, 6))
op("t", real(5))
op("unsqueeze", x, -1)
op("unsqueeze", x, 1)
op("squeeze", real(4, 1, 5))
op("squeeze.dim", real(4, 1, 5), 1)
op("squeeze.dim", real(4, 2, 5), 1)
op("squeeze.dims", real(4, 1, 5, 1), [1, -1])
op("expand", real(4, 1, 6), [3, -1, 5, 6])
op("repeat", real(4, 1, 6), [2, 1, 5, 3])
op("repeat", real(4, 6), [3, 1])
op("view_as_complex", real(5, 6, 2))
op("view_as_real", torch.complex(real(5, 6), real(5, 6)))

# Fourier transforms
op("_fft_c2c", torch.complex(real(4, 5, 6), real(4, 5, 6)), [1], 0, True)
op("_fft_r2c", real(4, 5, 6), [2], 0, True)
op("_fft_c2r", torch.complex(real(4, 5, 4), real(4, 5, 4)), [2], 0, 6)

# pieces and places
for dim, size in ((1, 4), (1, 5), (0, 5), (-1, 3)):
    op("split.Tensor unsafe_split.Tensor", real(5, 12, 3), size, dim)
for sizes in ([4, 4, 4], [6, 6], [3, 9], [12]):
    op("split_with_sizes unsafe_split_with_sizes split_with_sizes_copy", real(5, 12), sizes, 1)
op("cat", [real(5, 4), real(5, 4), real(5, 4)], 1)
op("cat", [real(5, 4), real(5, 3)], -1)
op("cat", [real(6, 5), zeros_node(6, 5)])
op("stack", [real(5, 6), real(5, 6)], 1)
op("unbind.int", real(5, 3, 6), 1)
for start, end, step in (
    (0, 4, 1), (4, 8, 1), (8, 99, 1), (-4, 2**63 - 1, 1), (2, 6, 1), (0, 12, 1), (0, 12, 2), (6, 12, 1), (3, 4, 1),
):  # fmt: skip
    op("slice.Tensor", real(5, 12), 1, start, end, step)
    piece = real(5, 12)[:, slice(start if start >= 0 else 12 + start, end, step)]
    op("slice_backward", torch.randn_like(piece), [5, 12], 1, start, end, step)
    op("slice_scatter", real(5, 12), torch.randn_like(piece), 1, start, end, step)
op("slice.Tensor", real(5, 6))
op("select.int", real(5, 4, 6), 1, 2)
op("select_backward", real(5, 6), [5, 4, 6], 1, -1)
op("select_scatter", real(5, 4, 6), real(5, 6), 1, 2)
op("index_select", real(5, 4, 6), 1, whole(4, 8))
op("index_add", real(5, 4, 6), 1, whole(4, 7), real(5, 7, 6))
op("index_copy", real(5, 4, 6), 1, torch.tensor([2, 0]), real(5, 2, 6))
op("gather", real(4, 5, 6), 1, whole(5, 4, 8, 6))
op("gather", real(4, 5, 6), -1, whole(6, 3, 5, 1))
op("gather", real(4, 5, 6), 2, whole(6, 1, 5, 1))
place = torch.argsort(real(4, 5, 6), 1)[:, :3]
op("scatter.src scatter_add", real(4, 5, 6), 1, place, real(4, 3, 6))
op("scatter.src", real(4, 5, 6), 1, place[:2], real(4, 3, 6))
op("scatter_add", zeros_node(4, 5, 6), 1, place, real(4, 3, 6))
op("scatter.value", real(4, 5, 6), 1, place, 0)
op("scatter.value", real(4, 5, 6), 1, place, 2.0)
op("scatter_reduce.two", real(4, 5, 6), 1, place, real(4, 3, 6), "amax")
op("scatter_reduce.two", real(4, 5, 6), 1, place, real(4, 3, 6), "sum")
for indices in (
    [whole(4, 7)], [None, whole(5, 8)], [whole(4, 5, 1), whole(5, 8)], [whole(4, 6), None, whole(6, 6)], [whole(4)],
):  # fmt: skip
    op("index.Tensor _unsafe_index.Tensor", real(4, 5, 6), indices)
for accumulate in (False, True):
    for source in (real(7, 5, 6), zeros_node(7, 5, 6)):
        op("index_put _unsafe_index_put", source, [torch.tensor([3, 0, 6, 1])], real(4, 5, 6), accumulate)
        op("index_put", source, [None, torch.tensor([4, 0])], real(2, 6), accumulate)
        op("index_put", source, [torch.tensor([4, 0]), torch.tensor([[4], [1], [0], [2]])], real(6), accumulate)
op("index_put", zeros_node(7, 6), [whole(7, 4, 5)], real(4, 5, 6), True)

# made from nothing
op("zeros ones empty.memory_format", [5, 6], dtype=torch.float64)
op("full", [5, 6], 3.0)
op("new_zeros new_ones new_empty", real(5, 6), [5, 6])
op("new_zeros", real(3), [5, 6])
op("new_full", real(3), [5, 6], 2.0)
op("scalar_tensor", 2.0)
op("arange", 6)
op("arange.start", 1, 8)
op("arange.start_step", 2, 17, 2)
op("arange.start_step", 9, 2, -1)
op("arange.start_step", 0.0, 1.0, 0.1)
op("eye", 5)
op("linspace", 0, 1, 5)

# random numbers: whole tensors start at index 0
STATE = torch.tensor([5, 3])
op("autopar.dropout.default", real(4, 5, 6), STATE, 0.4, 2, 0, [30, 6, 1])
op("autopar.dropout.default", real(8, 12), STATE, 0.4, 2, 0, [12, 1])
op("autopar.uniform.default autopar.normal.default", STATE, [4, 5, 6], 1, 0, [30, 6, 1], dtype=torch.float64, device="cpu")
