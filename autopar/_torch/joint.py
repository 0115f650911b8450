"""Torch's private interfaces to the joint forward and backward graph of an exported forward.

Written for torch >= 2.11, < 2.16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from .recording import Leaf, NotRecorded, RecordedForward, Recorder
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
    with _without_mkldnn(), _without_linalg_checks(), no_autocast():
        # torch's trace takes more, and raises the errors that are told to users
        with contextlib.suppress(Exception), torch.enable_grad():
            return recorded_joint(module, inputs, table)
        with torch.enable_grad():  # a forward that could not be recorded to its end may have switched gradients off
            return traced_joint(module, inputs, table)


def recorded_joint(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], decompositions: dict[object, Callable]
) -> tuple[fx.GraphModule, list, list]:
    """Return what `joint_graph` does, by a recorder, in 40 % of the time of torch's own trace. Raises NotRecorded
    for a graph that cannot be recorded, and whatever its ops raise on fake tensors."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._guards import detect_fake_mode

    mode: Any = detect_fake_mode(list(inputs))
    recorder = Recorder(mode, decompositions)
    try:
        with mode, enable_python_dispatcher():
            return _recorded(recorder, module, inputs)
    finally:
        recorder.forget()


def _recorded(
    recorder: Recorder, module: fx.GraphModule, inputs: Sequence[torch.Tensor]
) -> tuple[fx.GraphModule, list, list]:
    parameters, buffers = (named(remove_duplicate=False) for named in (module.named_parameters, module.named_buffers))
    state = {name: recorder.add_leaf(("parameter", name), tensor) for name, tensor in parameters}
    state |= {name: recorder.add_leaf(("buffer", name), tensor) for name, tensor in buffers}
    given = [recorder.add_leaf(("input", at), tensor) for at, tensor in enumerate(inputs)]
    with recorder:
        outputs = tree_leaves(RecordedForward(module, state, recorder).run(*given))
    if not all(isinstance(x, torch.Tensor) for x in outputs) or any(map(recorder.is_of_leaf, outputs)):
        raise NotRecorded("an output is no tensor, or lies in the memory of an input")
    leaves = [*recorder.leaves]
    written = [leaf for leaf in leaves if recorder.node(leaf.tensor) is not leaf.placeholder]
    if any(leaf.has_gradient for leaf in written):
        raise NotRecorded("a tensor with a gradient is written to")
    roots = {at: x for at, x in enumerate(outputs) if x.requires_grad}
    wanted = [leaf for leaf in leaves if leaf.has_gradient] if roots else []
    tangents = [
        recorder.add_leaf(("tangent", at), torch.empty(x.shape, dtype=x.dtype, device=x.device))
        for at, x in roots.items()
    ]
    gradients: Sequence[torch.Tensor | None] = ()
    if wanted:
        with recorder:
            gradients = torch.autograd.grad(
                [*roots.values()], [leaf.tensor for leaf in wanted], tangents, allow_unused=True
            )
    placeholders = [leaf.told for leaf in recorder.leaves]
    graph_module = recorder.finish([*(leaf.tensor for leaf in written), *outputs, *gradients])
    told = [*(_told("mutation", leaf) for leaf in written), *(("output", at) for at in range(len(outputs)))]
    return graph_module, placeholders, [*told, *(_told("gradient", leaf) for leaf in wanted)]


def _told(what: str, leaf: Leaf) -> tuple[str, Any]:
    """Return what is told of the gradient of a leaf, or of what was written to it."""
    kind, name = leaf.told
    return (f"input_{what}" if kind == "input" else what), name


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
    """Return the decompositions of ops whose single-node form hides a mean over a dim that should be shardable, or, as
    log_sigmoid's, keeps for the backward on CPUs what it does not on GPUs."""
    from torch._decomp import get_decompositions

    table = get_decompositions(
        [
            aten.mse_loss, aten.mse_loss_backward, aten.smooth_l1_loss, aten.smooth_l1_loss_backward, aten.huber_loss,
            aten.huber_loss_backward, aten.binary_cross_entropy, aten.binary_cross_entropy_backward,
            aten.binary_cross_entropy_with_logits, aten.soft_margin_loss, aten.soft_margin_loss_backward,
            aten.nll_loss_forward, aten.nll_loss_backward, aten.addmm, aten.addcmul, aten.addcdiv, aten.l1_loss,
            aten.log_sigmoid_forward, aten.log_sigmoid_backward,
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
