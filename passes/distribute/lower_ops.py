"""Replace canonical `autopar::*` ops of a local graph by the ATen ops that they stand for, and ATen ops that say how
many rows there are where only run time knows. Rows of experts are sorted once for several products (sort_rows.py).

A custom op costs 4 to 10 microseconds of dispatch a call, an ATen op about 3. The planner needs the canonical forms;
once shapes are local they have served. An op is replaced only where the ATen op gives the same values with the same
strides, so nothing else in the graph has to change.
"""

from __future__ import annotations

import torch
from torch import fx

from ...ir.graph import values_of
from ...ops import autopar, packed_linear
from ...rules.reading import bound
from .emit import Builder
from .sort_rows import sort_rows

aten = torch.ops.aten


def lower_ops(local: fx.GraphModule) -> fx.GraphModule:
    """Lower the canonical ops of a local graph in place and return the same module."""
    graph, builder = sort_rows(local).graph, None
    for node in list(graph.nodes):
        lower = LOWERINGS.get(node.target) if node.op == "call_function" else None
        if lower is None:
            continue
        builder = builder or Builder(graph, values_of(node)[0].fake_mode)
        builder.meta = {k: node.meta[k] for k in ("phase", "module", "source") if k in node.meta}
        with graph.inserting_before(node):
            new = lower(builder.call, node, *node.args, **node.kwargs)
        if new is not None and _same_form(node, new):
            # The node keeps its name and its fake value, with which views of it share storage (the partition looks).
            node.target, node.args, node.kwargs = new.target, new.args, new.kwargs
            node.meta.pop("sharding", None)
    graph.eliminate_dead_code()
    graph.lint()
    local.recompile()
    return local


def _same_form(old: fx.Node, new: fx.Node) -> bool:
    """Return whether all outputs agree in shape, dtype and strides. The strides of an attention's log-sum-exp matter to
    nobody: it goes from one attention kernel to another, or joins that of other keys."""
    for index, (a, b) in enumerate(zip(values_of(old), values_of(new), strict=True)):
        free = old.target is autopar.attention.default and index == 1 and _only_for_attention(old, index)
        if (a.shape, a.dtype) != (b.shape, b.dtype) or (a.stride() != b.stride() and not free):
            return False
    return True


def _only_for_attention(node: fx.Node, index: int) -> bool:
    readers = [user for item in node.users if item.args[1] == index for user in item.users]
    takes_any = (
        autopar.attention_bw.default, aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        autopar.join_attention.default, autopar.block_lse.default, autopar.attention_sinks_bw.default,
    )  # fmt: skip
    return all(user.target in takes_any for user in readers)


# Each lowering adds nodes and returns the last of them, or None to keep the canonical op.


def _linear(call, node, x, weight):
    if weight.target is autopar.dequantize.default:
        packed, absmax, scale, offset, quant_type, _ = weight.args
        if packed_linear.takes(_shape(x), _shape(packed), quant_type, x.meta["val"].device):
            return call(autopar.packed_linear.default, x, packed, absmax, scale, offset, quant_type)
    return call(aten.linear.default, x, weight)


def _linear_dx(call, node, grad, weight):
    return call(aten.matmul.default, grad, weight)


def _linear_dw(call, node, grad, x):
    grad, x = (t if _dim(t) == 2 else call(aten.reshape.default, t, [-1, _shape(t)[-1]]) for t in (grad, x))
    return call(aten.mm.default, call(aten.t.default, grad), x)


def _matmul(call, node, a, b):
    return call(aten.matmul.default, a, b)


def _embedding(call, node, weight, index, padding_idx, offset):
    if offset == 0 and _shape(weight)[0] == weight.meta["global"].shape[0]:
        return call(aten.embedding.default, weight, index, padding_idx)


def _embedding_dw(call, node, grad, index, padding_idx, offset, rows):
    if offset == 0 and rows == node.meta["global"].shape[0]:
        return call(aten.embedding_dense_backward.default, grad, index, rows, padding_idx, False)


def _attention(call, node, q, k, v, mask, causal, scale, *_, **__):
    if _is_plain(node, q, k, v, mask):
        flash = aten._scaled_dot_product_flash_attention_for_cpu.default
        return call(flash, q, k, v, 0.0, causal, scale=scale)


def _attention_bw(call, node, grad, q, k, v, out, lse, mask, causal, scale, *_, **__):
    if _is_plain(node, q, k, v, mask):
        flash = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return call(flash, grad, q, k, v, out, lse, 0.0, causal, scale=scale)


def _slice_backward(call, node, grad, sizes, dim, start, end, step):
    if node.meta["layout"].owned_axes:  # there are as many rows as run time says, and `sizes` has those of a block
        zeros = call(aten.zeros_like.default, call(aten.slice.Tensor, grad, dim, 0, 1))
        wide = call(aten.expand.default, zeros, [-1, *sizes[1:]])
        return call(aten.slice_scatter.default, wide, grad, dim, start, end, step)


SPECIAL = (
    "first",
    "group",
    "documents",
    "sinks",
    "softcap",
    "state",
    "window",
)  # arguments that the CPU kernel does not take


def _is_plain(node, q, k, v, mask) -> bool:
    """Return whether the CPU kernel takes an attention as it is: rows without gaps (it does not look), no heads
    of several sizes, nothing `SPECIAL`, no mask (which the op converts; of a query that it closes the kernel
    says another log-sum-exp)."""
    given = bound(node)
    if any(given.get(name) for name in SPECIAL) or any(t.meta["val"].stride(-1) != 1 for t in (q, k, v)):
        return False
    equal = _shape(k)[1] == _shape(v)[1] and _shape(q)[-1] == _shape(v)[-1]
    return q.meta["val"].device.type == "cpu" and equal and mask is None


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _dim(node: fx.Node) -> int:
    return node.meta["val"].dim()


LOWERINGS = {
    autopar.linear.default: _linear,
    autopar.linear_dx.default: _linear_dx,
    autopar.linear_dw.default: _linear_dw,
    autopar.matmul.default: _matmul,
    autopar.embedding.default: _embedding,
    autopar.embedding_dw.default: _embedding_dw,
    autopar.attention.default: _attention,
    autopar.attention_bw.default: _attention_bw,
    aten.slice_backward.default: _slice_backward,
}
