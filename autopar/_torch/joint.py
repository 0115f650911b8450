"""Torch's private interfaces to the joint forward and backward graph of an exported forward.

Written for torch >= 2.11, < 2.16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import fx

from .recording import recorded_joint
from .regions import no_autocast

aten = torch.ops.aten


def joint_graph(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], decompositions: dict[object, Callable]
) -> tuple[fx.GraphModule, list, list]:
    """Return the joint forward and backward graph of an exported module, with one descriptor a placeholder and an
    output. Ops in `decompositions` are traced into what they stand for.

    Descriptors are tuples: ("parameter" | "buffer", name), ("input", index), ("tangent", output index),
    ("zero", "") of the tangent of a mutation, and ("output", index), ("gradient", parameter name), ("input_gradient",
    input index), ("mutation", name of a parameter or buffer), ("input_mutation", input index)."""
    table = decomposition_table() | decompositions
    # with mkldnn an LSTM layer would be one op that takes whole tensors only and is there on CPUs only
    with _without_mkldnn(), _without_linalg_checks(), torch.enable_grad(), no_autocast():
        try:
            return recorded_joint(module, inputs, table)
        except Exception:  # torch's trace takes more, and raises the errors that are told to users
            return traced_joint(module, inputs, table)


def traced_joint(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], decompositions: dict[object, Callable]
) -> tuple[fx.GraphModule, list, list]:
    """Return what `joint_graph` does, by torch's own trace, which writes to tensors as well."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    with contextlib.ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, module, tuple(inputs), {}, decompositions=decompositions)
    graph_module = joint.graph_module
    placeholders = [_describe_input(n.meta["desc"]) for n in graph_module.graph.nodes if n.op == "placeholder"]
    output = next(iter(reversed(graph_module.graph.nodes)))
    return graph_module, placeholders, [_describe_output(d) for d in output.meta["desc"]]


@contextlib.contextmanager
def _without_mkldnn():
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextlib.contextmanager
def _without_linalg_checks():
    """Inside, what torch.linalg does to raise for a matrix that cannot be inverted or factored is no effect that a
    graph keeps: such a matrix then gives what LAPACK leaves behind."""
    holder = torch._library.simple_registry.singleton.find("aten::_linalg_check_errors").effect
    before = holder.effect
    holder.register(None)
    try:
        yield
    finally:
        holder.register(before)


def decomposition_table() -> dict[object, Callable]:
    """Return the decompositions of ops whose single-node form hides a mean over a dim that should be shardable."""
    from torch._decomp import get_decompositions

    table = get_decompositions(
        [
            aten.mse_loss, aten.mse_loss_backward, aten.smooth_l1_loss, aten.smooth_l1_loss_backward, aten.huber_loss,
            aten.huber_loss_backward, aten.binary_cross_entropy, aten.binary_cross_entropy_backward,
            aten.binary_cross_entropy_with_logits, aten.soft_margin_loss, aten.soft_margin_loss_backward,
            aten.nll_loss_forward, aten.nll_loss_backward, aten.addmm, aten.addcmul, aten.addcdiv, aten.l1_loss,
        ]
    )  # fmt: skip
    return {**table, aten.mean.dim: _mean_dim, aten.mean.default: lambda x, dtype=None: _mean_dim(x, None, dtype=dtype)}


def _mean_dim(x, dim, keepdim=False, dtype=None):
    dims = list(range(x.dim())) if not dim else [d % x.dim() for d in dim]
    count = 1
    for d in dims:
        count *= x.shape[d]
    return torch.sum(x, dims, keepdim, dtype=dtype) / count


def _describe_input(desc) -> tuple[str, object]:
    kind = type(desc).__name__
    if kind == "ParamAOTInput":
        return "parameter", desc.target
    if kind == "BufferAOTInput":
        return "buffer", desc.target
    if kind == "PlainAOTInput":
        return "input", desc.idx
    if kind == "TangentAOTInput":
        is_mutation = type(desc.output).__name__ == "InputMutationAOTOutput"
        return ("zero", "") if is_mutation else ("tangent", getattr(desc.output, "idx", 0))
    raise RuntimeError(f"torch gave the joint graph an input of an unknown kind: {desc!r}")


def _describe_output(desc) -> tuple[str, object] | None:
    kind = type(desc).__name__
    if kind == "PlainAOTOutput":
        return "output", desc.idx
    if kind == "GradAOTOutput":
        source = desc.grad_of
        if type(source).__name__ == "ParamAOTInput":
            return "gradient", source.target
        return "input_gradient", getattr(source, "idx", 0)
    if kind == "InputMutationAOTOutput":
        source = desc.mutated_input
        return ("mutation", source.target) if hasattr(source, "target") else ("input_mutation", source.idx)
    return None
