"""Seconds an op takes on one device: a roofline on local shapes, max(FLOPs / peak, bytes / memory bandwidth).

FLOPs count a multiply-add as two. Attention does 4 b h s t d forward (two matrix products) and 10 b h s t d backward (five, the
scores recomputed), half of it under a causal mask: Dao, FlashAttention-2, arXiv 2307.08691, section 4.1. A launch costs
`launch_seconds` on top, added and not max'ed, so that sharding a small op still shows; a pointwise op that follows a pointwise
op is fused with it and costs neither its launch nor the traffic between the two.
"""

from __future__ import annotations

import math
import operator

import torch
from torch import fx

from .._torch import op_name
from ..graph import tensor_arguments, values_of
from ..ops_random import STREAM

aten, autopar = torch.ops.aten, torch.ops.autopar

FREE = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.t.default, aten.transpose.int,
    aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default,
    aten.select.int, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.detach.default,
    aten.alias.default, operator.getitem,
}  # fmt: skip

POINTWISE_NAMES = {
    "add", "sub", "mul", "div", "neg", "pow", "rsqrt", "sqrt", "exp", "log", "tanh", "sigmoid", "silu", "gelu", "relu", "where",
    "silu_backward", "gelu_backward", "tanh_backward", "sigmoid_backward", "threshold_backward", "_to_copy", "reciprocal", "abs",
    "eq", "ne", "le", "lt", "ge", "gt", "maximum", "minimum", "clamp", "clone", "masked_fill", "cos", "sin", "rsub", "logical_not",
    "logical_and", "logical_or", "bitwise_and", "bitwise_or", "bitwise_not", "full_like", "zeros_like", "ones_like", "erf", "sign",
    "round", "clamp_min", "clamp_max", "fake_quantize", "fake_quantize_bw", "fake_quantize_dscale",
}  # fmt: skip


# integer operations of autopar/ops_random.py, counted as FLOPs: 24 a word of four neighbours for dropout, one word a number else
OPS_PER_NUMBER = {autopar.dropout.default: 8.0, autopar.uniform.default: 28.0, autopar.normal.default: 36.0}


def is_pointwise(node: fx.Node) -> bool:
    return node.op == "call_function" and op_name(node.target) in POINTWISE_NAMES


def flops_of(node: fx.Node) -> float:
    """FLOPs of one op on global shapes; 0 for ops that are bound by memory."""
    arguments = [a.meta["val"] for a in tensor_arguments(node)]
    outputs = values_of(node)
    target = node.target
    if target in (autopar.linear.default, autopar.linear_dx.default):
        weight = arguments[1]
        return 2.0 * arguments[0].numel() * (weight.numel() // arguments[0].shape[-1])
    if target is autopar.linear_dw.default:
        return 2.0 * outputs[0].numel() * (arguments[0].numel() // arguments[0].shape[-1])
    if target in (aten.mm.default, aten.bmm.default, autopar.matmul.default):
        return 2.0 * outputs[0].numel() * arguments[0].shape[-1]
    if target is autopar.grouped_mm.default:
        return 2.0 * outputs[0].numel() * arguments[0].shape[1]
    if target is autopar.grouped_mm_dw.default:
        return 2.0 * arguments[0].numel() * arguments[1].shape[1]
    if target in (aten.addmm.default, aten.baddbmm.default):
        return 2.0 * outputs[0].numel() * arguments[1].shape[-1]
    if target in (autopar.attention.default, autopar.attention_bw.default):
        is_forward = target is autopar.attention.default
        q, k, v = arguments[:3] if is_forward else arguments[1:4]
        causal = node.args[4] if is_forward else node.args[7]
        widths = (1 if is_forward else 3) * q.shape[-1] + (1 if is_forward else 2) * v.shape[-1]
        return 2.0 * math.prod(q.shape[:-1]) * k.shape[2] * widths * (0.5 if causal else 1.0)
    if target is aten.convolution.default:
        weight = arguments[1]
        return 2.0 * outputs[0].numel() * (weight.numel() // weight.shape[0])
    if target is aten.convolution_backward.default:
        weight = arguments[2]
        return 4.0 * arguments[0].numel() * (weight.numel() // weight.shape[0])
    if target in STREAM:
        return OPS_PER_NUMBER[target] * outputs[0].numel()
    return 0.0


def fused_inputs(node: fx.Node) -> list[bool]:
    """Per tensor argument: whether it never reaches memory, a pointwise op feeding this pointwise op alone."""
    if not is_pointwise(node):
        return [False] * len(tensor_arguments(node))
    return [is_pointwise(a) and len(a.users) == 1 for a in tensor_arguments(node)]


class ComputeCost:
    """Prices ops on one device of a Hardware."""

    def __init__(self, hardware):
        self.hardware = hardware

    def seconds(self, node: fx.Node, flops: float, ways: int, local_bytes: float) -> float:
        """`flops` are global and divided by `ways`; `local_bytes` are what the device reads and writes."""
        if node.target in FREE:
            return 0.0
        compute = flops / ways / self.hardware.reached_flops_per_second(_dtype_name(node)) if flops else 0.0
        launch = 0.0 if any(fused_inputs(node)) else self.hardware.launch_seconds
        return max(compute, local_bytes / self.hardware.reached_memory_bytes_per_second) + launch


def _dtype_name(node: fx.Node) -> str:
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
    return names.get(values_of(node)[0].dtype, "fp32")


def fraction(layout, mesh) -> float:
    """Share of a tensor's elements that a device holds."""
    return 1.0 / math.prod(mesh.size(a) for a in layout.sharding_axes)
