"""Seconds an op takes on one device: a roofline on local shapes, max(seconds of computing, bytes / memory bandwidth).

Matrix products and attention take what kernels of their local size take (autopar/cost/product_seconds.py,
autopar/cost/attention.py): what tensor parallelism leaves of a small matrix is slower.

FLOPs count a multiply-add as two. Attention does 4 b h s t d forward (two matrix products) and 10 b h s t d backward
(five, the scores recomputed), half of it under a causal mask: Dao, FlashAttention-2, arXiv 2307.08691, section 4.1. A
launch is added and not max'ed, so that sharding a small op still shows. A graph runs

    eager      op by op, each of which reads and writes memory and costs `launch_seconds` of the profile
    compiled   by torch.compile, or in a CUDA graph: a pointwise op that follows a pointwise op is fused with it and
               costs neither a launch nor the traffic between the two, and launches are hidden but for the gap between
               kernels

 Where the computation of exp and its like is slower than memory (on CPUs), ops like gelu
take the time of their values.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .._torch import op_name
from ..hardware.profile import Hardware
from ..ir.graph import is_foreign, tensor_arguments, values_of
from ..ir.layout import ZIGZAG, Layout, fraction
from ..ir.mesh import Mesh
from ..ops import ATTENTION, attention_fused, autopar
from ..ops.attention_forms import lse_dtype
from ..ops.streams import STREAM
from ..rules import Strategy
from ..rules.reading import bound
from . import fp8
from .attention import Shape, attention_seconds, own_kernel, zigzag_seconds
from .expert_copies import CopyCost
from .product_seconds import ProductSeconds
from .products import PRODUCTS, Product, shapes_of
from .ring import ring_of
from .skew import Skew

aten = torch.ops.aten

EAGER, COMPILED = EXECUTIONS = ("eager", "compiled")
GAP_SECONDS = (
    5e-7  # between kernels of a CUDA graph: 3.4 us for kernels of 2.9 (NVIDIA, "Getting Started with CUDA Graphs")
)

FREE = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.t.default, aten.transpose.int,
    aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default,
    aten.select.int, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.detach.default,
    aten.alias.default, operator.getitem, autopar.with_earlier.default,
}  # fmt: skip

POINTWISE_NAMES = {
    "add", "sub", "mul", "div", "neg", "pow", "rsqrt", "sqrt", "exp", "log", "tanh", "sigmoid", "silu", "gelu", "relu",
    "where", "silu_backward", "gelu_backward", "tanh_backward", "sigmoid_backward", "threshold_backward", "_to_copy",
    "reciprocal", "abs", "eq", "ne", "le", "lt", "ge", "gt", "maximum", "minimum", "clamp", "clone", "masked_fill",
    "cos", "sin", "rsub", "logical_not", "logical_and", "logical_or", "bitwise_and", "bitwise_or", "bitwise_not",
    "full_like", "zeros_like", "ones_like", "erf", "sign", "round", "clamp_min", "clamp_max", "fake_quantize",
    "fake_quantize_bw", "fake_quantize_dscale",
}  # fmt: skip


# work of a value, in that of gelu by tanh, forward: measured on an x86 CPU (torch 2.13)
FUNCTIONS = {"gelu": 1.0, "gelu_backward": 1.35, "silu": 0.75, "silu_backward": 0.5} | dict.fromkeys(
    ("tanh", "sigmoid", "exp", "log", "erf", "sin", "cos", "rsqrt", "tanh_backward", "sigmoid_backward"), 0.3
)
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}  # the others run as fp32
GROUPED = {autopar.grouped_mm.default, autopar.grouped_mm_dw.default}

# numbers in fp32 that autopar/ops/vocab_loss.py writes and reads between its own kernels for each logit: the difference
# to the maximum, its exponential, that times a factor
INNER_PASSES = {autopar.vocab_loss.default: 4, autopar.vocab_loss_bw.default: 6}
INNER_BYTES = 4

# integer operations of autopar/ops/counter_rng.py, counted as FLOPs: 24 a word of four neighbours for dropout, one word
# a number else
OPS_PER_NUMBER = {autopar.dropout.default: 8.0, autopar.uniform.default: 28.0, autopar.normal.default: 36.0}


def is_pointwise(node: fx.Node) -> bool:
    """Return whether an op is one of POINTWISE_NAMES."""
    return node.op == "call_function" and op_name(node.target) in POINTWISE_NAMES


def flops_of(node: fx.Node) -> float:
    """Return the FLOPs of one op on global shapes; 0 for ops that are bound by memory."""
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
    if target in ATTENTION:
        is_forward = target is autopar.attention.default
        q, k, v = arguments[:3] if is_forward else arguments[1:4]
        queries, keys, causal = q.shape[2], k.shape[2], bool(bound(node)["causal"])
        share = Shape(1, 1, queries, keys, 1, 1, causal, _last_share(node, queries, keys), **_within(node)).open_share
        widths = (1 if is_forward else 3) * q.shape[-1] + (1 if is_forward else 2) * v.shape[-1]
        return 2.0 * math.prod(q.shape[:-1]) * k.shape[2] * widths * share
    if target is aten.convolution.default:
        weight = arguments[1]
        return 2.0 * outputs[0].numel() * (weight.numel() // weight.shape[0])
    if target is aten.convolution_backward.default:
        weight = arguments[2]
        return 4.0 * arguments[0].numel() * (weight.numel() // weight.shape[0])
    if target in STREAM:
        return OPS_PER_NUMBER[target] * outputs[0].numel()
    return _registered_flops(node) if is_foreign(node) else fp8.flops_of(node)


def _registered_flops(node: fx.Node) -> float:
    """Return the FLOPs that torch.utils.flop_counter.register_flop_formula was told, 0 if it was not."""
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(node.target.overloadpacket)
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda a: a.meta["val"])
    return float(formula(*args, **kwargs, out_val=node.meta["val"])) if formula else 0.0


def fused_inputs(node: fx.Node) -> list[bool]:
    """Return for each tensor argument whether it never reaches memory, a pointwise op feeding this pointwise op
    alone."""
    if not is_pointwise(node):
        return [False] * len(tensor_arguments(node))
    return [is_pointwise(a) and len(a.users) == 1 for a in tensor_arguments(node)]


@dataclass(frozen=True)
class _Work:
    """The common part of a node's prices, whatever its strategy: looked up once, as a target is slow to hash."""

    products: Callable[..., list[Product]] | None
    is_attention: bool
    kind: str  # of the products
    flops: float
    peak_flops_per_second: float
    element_bytes: int
    launch_seconds: float
    shapes: list[tuple[int, ...]]
    function_seconds: float  # of one device with the whole tensor
    inner_bytes: float  # of one device, between the kernels of the op itself
    inner_argument: int = 0  # whose layout says what a device has of them
    of_attention: Mapping[str, Any] = field(default_factory=dict)  # fields of a Shape: a window, what no kernel serves


class ComputeCost:
    """Prices ops on one device of a Hardware. It remembers nodes: their `meta` must not change while it is in use.
    `skew`: of the rows of experts, of which a device takes `expert_capacity` times the average at a time, if that is
    given; `copies`: the price of copies of hot experts, if there are any."""

    def __init__(
        self,
        hardware: Hardware,
        execution: str = EAGER,
        skew: Skew = Skew(),
        expert_capacity: float | None = None,
        copies: CopyCost | None = None,
    ):
        self.hardware, self.fuses, self.skew = hardware, execution == COMPILED, skew
        self.expert_capacity, self.copies = expert_capacity, copies
        self.launch_seconds = min(hardware.launch_seconds, GAP_SECONDS) if self.fuses else hardware.launch_seconds
        self._product_seconds = ProductSeconds(hardware)
        self._works: dict[fx.Node, _Work | None] = {}

    def seconds(self, node: fx.Node, strategy: Strategy, mesh: Mesh, local_bytes: float) -> float:
        """Return the seconds of an op on one device under a strategy; `local_bytes` are what it reads and writes."""
        work = self._works[node] if node in self._works else self._work(node)
        if work is None:
            return 0.0
        compute = self._compute_seconds(node, work, strategy, mesh) if work.flops else 0.0
        if work.function_seconds:
            compute = work.function_seconds * fraction(strategy.outputs[0], mesh)
        if work.inner_bytes:
            local_bytes += work.inner_bytes * fraction(strategy.inputs[work.inner_argument], mesh)
        return max(compute, local_bytes / self.hardware.reached_memory_bytes_per_second) + work.launch_seconds

    def copy_seconds(self, local_bytes: float) -> float:
        """Return the seconds of a kernel that reads and writes so many bytes on one device."""
        return local_bytes / self.hardware.reached_memory_bytes_per_second + self.launch_seconds

    def _work(self, node: fx.Node) -> _Work | None:
        """Look up what the prices of an op have in common; return None for an op that does nothing."""
        self._works[node] = None
        if node.target not in FREE:
            value, flops = values_of(node)[0], flops_of(node)
            is_fp8, kind = node.target in fp8.PRODUCTS, fp8.kind_of(node, self.hardware)
            wide = "fp32" if is_fp8 and value.dtype.itemsize < fp8.WIDE_BYTES else DTYPE_NAMES.get(value.dtype, "fp32")
            without, within = self._without_kernel(node), _within(node)
            if without and not self.hardware.kernels.multiprocessors:  # GPUs multiply in the type of the queries
                wide = DTYPE_NAMES.get(lse_dtype(value.dtype), "fp32")
            peak = self.hardware.peak_flops_per_second("fp8" if kind else wide) if flops else 0.0
            kernels = self.hardware.kernels
            launch = 0.0 if self.fuses and any(fused_inputs(node)) else self.launch_seconds
            functions = FUNCTIONS.get(op_name(node.target), 0.0) if kernels.functions_per_second else 0.0
            self._works[node] = _Work(
                PRODUCTS.get(node.target),
                node.target in ATTENTION,
                kind or ("grouped" if node.target in GROUPED else "dense"),
                flops,
                peak,
                1 if kind else fp8.WIDE_BYTES if is_fp8 else value.element_size(),
                launch,
                shapes_of(node) if flops else [],
                functions and functions * value.numel() / kernels.functions_per_second,
                *_inner(node, self.hardware),
                of_attention={**without, **within},
            )
        return self._works[node]

    def _without_kernel(self, node: fx.Node) -> dict[str, Any]:
        """Return what a Shape says of an attention that no kernel of torch may serve, nothing of others."""
        if node.target not in ATTENTION:
            return {}
        given = bound(node)
        drops, caps = given["state"] is not None, bool(given["softcap"])
        wants_mask = node.target is autopar.attention_bias_bw.default
        if not (drops or caps or wants_mask):
            return {}
        q, k, v = (given[name].meta["val"] for name in ("q", "k", "v"))
        dmask = given["mask"].meta["val"] if wants_mask else None
        if self.hardware.kernels.multiprocessors and attention_fused.serves(q, k, v, dmask):
            return own_kernel(node.target is autopar.attention.default, drops, caps, wants_mask)
        wide = lse_dtype(q.dtype)
        speed = self.hardware.peak_flops_per_second(DTYPE_NAMES.get(wide, "fp32")) * self.hardware.flops_efficiency
        draw_seconds = OPS_PER_NUMBER[autopar.dropout.default] / speed if drops else 0.0
        return {"score_bytes": wide.itemsize, "draw_seconds": draw_seconds}

    def _compute_seconds(self, node: fx.Node, work: _Work, strategy: Strategy, mesh: Mesh) -> float:
        if not work.products and not work.is_attention:
            reached = work.peak_flops_per_second * self.hardware.flops_efficiency * self.hardware.sustained
            return work.flops / strategy.ways / reached
        sizes, layouts = mesh.axis_sizes, (*strategy.inputs, *strategy.outputs)
        local = [_local_shape(shape, layout, sizes) for shape, layout in zip(work.shapes, layouts)]
        peak = work.peak_flops_per_second
        if work.is_attention:
            forward = node.target is autopar.attention.default
            q, k, v = local[:3] if forward else local[1:4]
            queries, keys = work.shapes[0][2], work.shapes[1 if forward else 2][2]  # a gradient is as long as queries
            share = q[2] / queries * _last_share(node, queries, keys)
            causal = bool(node.args[4 if forward else 7])
            shape = Shape(q[0], q[1], q[2], k[2], q[3], v[3], causal, share, q[1] != k[1], **work.of_attention)
            if (ring := ring_of(node, strategy, mesh)) is not None:
                return ring.seconds(shape, peak, forward, mesh, self.hardware)
            if causal and layouts[0 if forward else 1].parts[2] == ZIGZAG:
                return zigzag_seconds(self.hardware, peak, shape, forward)
            return attention_seconds(self.hardware, peak, shape, forward)
        if work.kind == "grouped":
            depth, columns = local[0][1], local[1 if node.target is autopar.grouped_mm_dw.default else 3][1]
            local[0][0] = math.ceil(
                work.flops / strategy.ways / (2 * depth * columns)
            )  # rows of its groups, if balanced
        return sum(self._product_seconds(p, peak, work.element_bytes, work.kind) for p in work.products(*local))


def _last_share(node: fx.Node, queries: int, keys: int) -> float:
    """Return the share of all tokens that the queries of an attention are: of a chunk of a sequence less than all, as
    its keys are those of the tokens before as well."""
    return queries / keys if bound(node)["first"] else 1.0


def _within(node: fx.Node) -> dict[str, Any]:
    """Return what a Shape says of an attention that has a window, nothing of others."""
    window = bound(node)["window"] if node.target in ATTENTION else 0
    return {"window": window} if window else {}


def _inner(node: fx.Node, hardware: Hardware) -> tuple[float, int]:
    """Return the bytes that go through memory between the kernels of an op itself, and the argument that they are as
    large as."""
    passes = next((many for target, many in INNER_PASSES.items() if target is node.target), 0)
    if not passes:
        return fp8.inner_bytes(node, hardware), 0
    logits = 0 if node.target is autopar.vocab_loss.default else 2
    return float(passes * INNER_BYTES * tensor_arguments(node)[logits].meta["val"].numel()), logits


def _local_shape(shape: Sequence[int], layout: Layout, axis_sizes: Mapping[str, int]) -> list[int]:
    """Return the local shape on the devices that hold most."""
    local = []
    for size, axes in zip(shape, layout.dims):
        for axis in axes:
            size = -(-size // axis_sizes[axis])
        local.append(size)
    return local
