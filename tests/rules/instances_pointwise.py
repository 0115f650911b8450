"""Instances of ops that work element by element, along a dim or reduce one, and of losses."""

from __future__ import annotations

import math

import torch

from autopar.rules.register import full_name
from autopar.rules.table import ACTIVATIONS, BINARY, INTEGER, POINTWISE_BACKWARDS, UNARY

from .instances import INSTANCES, between, mask, op, positional, real, whole
from .rule_check import zeros_node

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
for scale, zero_point in (
    (between(0.1, 0.3, 1, 6), None), (between(0.1, 0.3, 5, 1, 1), whole(5, 5, 1, 1).double() - 2),
    (between(0.2, 0.3), None),
):  # fmt: skip
    grid = (real(5, 4, 6), scale, zero_point, -8, 7)
    op("autopar.fake_quantize.default", *grid, 0.5)
    op("autopar.fake_quantize_bw.default autopar.fake_quantize_dscale.default", real(5, 4, 6), *grid)
op("bucketize.Tensor", real(5, 6), torch.tensor([-1.0, 0.0, 1.0]).double())

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
