"""The only place that touches torch's private interfaces, each behind a small function of autopar's own; those of
gradients and autocast that are switched on and off are in regions.py.

Written for torch >= 2.11, < 2.16.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, cast

import torch
import torch.distributed._functional_collectives  # noqa: F401  registers the fake kernels of the collectives
from torch import fx
from torch.fx.node import Target
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .compiling import compiler_errors, in_given_order
from .gradient_hooks import total_norm_through, unscale_through
from .groups import broadcasts, default_store, group_of, set_group_timeout
from .regions import no_autocast, without_dispatch_modes
from .sizes import OpenSizes, export_open, open_mode, open_sizes, plain_size, run_open, size_of
from .tracing import (
    as_if_eager,
    as_if_exported,
    functionalized,
    hooks_of_all_modules,
    lazy_code,
    move_hooks,
    moves_of_modules,
    plain_checkpoints,
    transforms,
    without_prints,
    without_torch_functions,
)

__all__ = [
    "total_norm_through", "unscale_through", "broadcasts", "default_store", "group_of", "set_group_timeout",
    "compiler_errors", "in_given_order", "TorchDispatchMode", "tree_flatten", "tree_map", "tree_unflatten",
    "no_autocast", "without_dispatch_modes", "OpenSizes", "export_open", "open_mode", "open_sizes", "plain_size",
    "run_open", "size_of", "as_if_eager", "as_if_exported", "functionalized", "hooks_of_all_modules", "lazy_code",
    "move_hooks", "moves_of_modules", "plain_checkpoints", "transforms", "without_prints", "without_torch_functions",
]  # fmt: skip

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def fake_mode() -> Any:
    """Return a mode in which tensors have shapes and dtypes but no storage."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_tensor(mode, shape, stride, offset: int, dtype, device, base: torch.Tensor | None = None) -> torch.Tensor:
    """Return a fake tensor of a mode, made without asking any op; it is a view of `base`, or in memory of its own."""
    from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

    with in_kernel_invocation_manager(mode):
        value = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if base is not None:
            value.set_(base.untyped_storage(), offset, shape, stride)
        return FakeTensor(mode, value, device)


def fake_twin(tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor of the form of another one, in the same memory; of one with open sizes it takes a twentieth
    of the time of `fake_tensor`."""
    from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

    mode, device = cast(FakeTensor, tensor).fake_mode, tensor.device
    with in_kernel_invocation_manager(mode):
        return FakeTensor(mode, aten.detach.default(tensor), device)


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that is equal for tensors in the same memory, while they live."""
    return tensor.untyped_storage()._cdata


def weak_storage(tensor: torch.Tensor) -> object:
    """Return what keeps the `storage_key` of a tensor from being given to another, and does not keep its memory."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())


def graph_module(root, graph: fx.Graph, name: str = "GraphModule") -> fx.GraphModule:
    """Return a GraphModule whose Python is compiled when it is first called: most are only rewritten."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph, name)


def compile_code(module: fx.GraphModule) -> None:
    """Compile the Python of a module that `graph_module` made now, so that its `forward` is its own."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    _LazyGraphModule.force_recompile(module)


def is_data_dependent(error: BaseException) -> bool:
    """Return whether tracing failed because Python asked for the values of a tensor."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode))


def is_of_higher_order_op(error: BaseException) -> bool:
    """Return whether tracing failed at an op that has graphs of its own, such as torch.cond."""
    return type(error).__name__ == "UncapturedHigherOrderOpError"


def has_unknown_number(value: object) -> bool:
    """Return whether a traced value is a number, or has a size, that is known only when the graph runs."""
    if isinstance(value, (tuple, list)):
        return any(map(has_unknown_number, value))
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes)


def has_no_value(value: object) -> bool:
    """Return whether a tensor, or the truth of a traced number, exists only while something is traced."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    if isinstance(value, torch.SymBool):
        return value.node.maybe_as_bool() is None
    if isinstance(value, FunctionalTensor):
        value = torch._from_functional_tensor(value.elem)
    return isinstance(value, FakeTensor) and value.constant is None


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


def joint_graph(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], decompositions: dict[object, Callable]
) -> tuple[fx.GraphModule, list, list]:
    """Return the joint forward and backward graph of an exported module, with one descriptor a placeholder and an
    output. Ops in `decompositions` are traced into what they stand for.

    Descriptors become plain tuples: ("parameter" | "buffer", name), ("input", index), ("tangent", output index),
    ("zero", "") of the tangent of a mutation, and ("output", index), ("gradient", parameter name), ("input_gradient",
    input index), ("mutation", name of a parameter or buffer), ("input_mutation", input index)."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    # with mkldnn an LSTM layer would be one op that takes whole tensors only and is there on CPUs only
    checks = _without_mkldnn(), _without_linalg_checks()
    with contextlib.ExitStack() as stack, checks[0], checks[1], torch.enable_grad(), no_autocast():
        joint = aot_export_joint_with_descriptors(
            stack, module, tuple(inputs), {}, decompositions=decomposition_table() | decompositions
        )
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


def is_fake(tensor: object) -> bool:
    """Return whether a tensor exists only while something is traced."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def schema_of(target: Target) -> torch.FunctionSchema:
    """Return the schema of the op that a node calls."""
    return cast(torch._ops.OpOverload, target)._schema


def schema_names(target: Target) -> list[str]:
    """Return the names of an op's arguments."""
    return [argument.name for argument in schema_of(target).arguments]


def op_name(target: Target) -> str:
    """Return an ATen op's name without namespace and overload, "" for anything else."""
    return getattr(target, "_opname", "")


def op_text(target: Target) -> str | None:
    """Return the full name of an op, `aten::add.Tensor`, None for what is none."""
    return (
        f"{target.namespace}::{target._opname}.{target._overloadname}"
        if isinstance(target, torch._ops.OpOverload)
        else None
    )


def op_of_text(text: str) -> torch._ops.OpOverload | None:
    """Return the op of a full name, None if none is registered."""
    namespace, _, rest = text.partition("::")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return getattr(packet, overload, None)


def rename(node: fx.Node, name: str) -> None:
    """Give a node (and a placeholder's argument) a name of our own."""
    node._rename(name)
    if node.op == "placeholder":
        node.target = node.name


def strided_shard(dim: int, split_factor: int):
    """Return the placement of a dim that is sharded inside each of `split_factor` blocks."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def is_strided_shard(placement) -> bool:
    """Return whether a placement of DTensor shards a dim that another axis has cut before."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, _StridedShard)


def dtensor_spec(device_mesh, placements, shape, stride, dtype: torch.dtype, is_in_parts: bool = False):
    """Return what a DTensor is apart from its local values; made once, it serves every step. `is_in_parts`: strided
    shards are of what lies in parts; torch would read those of two axes on one dim as another order of the axes."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    known: dict[str, Any] = {"use_strided_shard_as_shard_order": False} if is_in_parts else {}
    known = {
        name: value for name, value in known.items() if name in DTensorSpec.__dataclass_fields__
    }  # torch 2.13 has it
    meta = TensorMeta(torch.Size(shape), tuple(stride), dtype)
    return DTensorSpec(device_mesh, tuple(placements), tensor_meta=meta, **known)


def as_dtensor(local: torch.Tensor, spec, kind: type | None = None) -> torch.Tensor:
    """Return a DTensor of a spec around local values, as `DTensor.from_local` does, at a thirtieth of its time and
    without autograd: its `__init__` does nothing but turn torch.compile off. `kind` is a class of DTensors."""
    from torch.distributed.tensor import DTensor

    return DTensor.__new__(kind or DTensor, local, spec, requires_grad=False)


def without_torch_function():
    """Inside, functions of torch do not ask the classes of their arguments."""
    return torch._C.DisableTorchFunctionSubclass()


def local_of(dtensor) -> torch.Tensor:
    """Return the local values of a DTensor themselves: what is written to it shows here, and the other way round."""
    return dtensor._local_tensor


def locals_of(dtensors) -> list[torch.Tensor]:
    """Return the local values of many DTensors themselves."""
    return list(map(_LOCAL, dtensors))


_LOCAL = attrgetter("_local_tensor")


def set_local(dtensor, local: torch.Tensor) -> None:
    """Let `local`, of the same form, hold the values of a DTensor from here on; what held them before is left as it
    is."""
    dtensor._local_tensor = local


def write_local(dtensor, local: torch.Tensor) -> None:
    """Write to the local values of a DTensor, so that autograd sees that the DTensor has changed."""
    dtensor._local_tensor.copy_(local)
    torch.autograd.graph.increment_version(dtensor)


def release_saved(ctx) -> None:
    """Let an autograd.Function's context forget its saved tensors before its backward runs, unless the graph is
    retained."""
    if hasattr(ctx, "maybe_clear_saved_tensors"):
        ctx.maybe_clear_saved_tensors()


@functools.cache
def outside_dynamo(function: Callable) -> Callable:
    """Return a function that torch.compile leaves as it is, without loading the compiler before it is asked for."""
    return torch._disable_dynamo(function)


def accumulates(node) -> bool:
    """Return whether the backward that runs now adds to the `.grad` of a leaf, given its AccumulateGrad node;
    `torch.autograd.grad` only returns gradients."""
    if node is None:  # of a tensor that requires no gradient
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch refuses the question under torch.autograd.grad
        return False


def keeps_graph() -> bool:
    """Return whether the backward that runs now may run again (retain_graph=True)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def is_in_backward() -> bool:
    """Return whether autograd is running on this thread."""
    return torch._C._current_graph_task_id() != -1


def op_handle(op: torch._ops.OpOverload) -> Callable:
    """Return what an op calls in C++, without its own Python."""
    return op._op


def overloads_of(op: object) -> list[torch._ops.OpOverload]:
    """Return the overloads of an op of torch.ops, or of what torch.library.custom_op made; none of anything else."""
    op = getattr(op, "_opoverload", op)
    if isinstance(op, torch._ops.OpOverloadPacket):
        return [getattr(op, name) for name in op.overloads()]
    return [op] if isinstance(op, torch._ops.OpOverload) else []
