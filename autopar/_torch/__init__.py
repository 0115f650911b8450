"""The only place that touches torch's private interfaces, each behind a small function of autopar's own; those of
gradients and autocast that are switched on and off are in regions.py.

Written for torch >= 2.11, < 2.16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any, cast

import torch
import torch.distributed._functional_collectives  # noqa: F401  registers the fake kernels of the collectives
from torch import fx
from torch.fx.node import Target
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .compiling import compiler_errors, in_given_order
from .fakes import fake_mode, fake_tensor, fake_twin, is_fake, storage_key, weak_storage
from .flex import flex_attention_by
from .gradient_hooks import total_norm_through, unscale_through
from .groups import (
    abort_groups,
    broadcasts,
    collectives_on_their_way,
    default_store,
    group_of,
    set_group_timeout,
    start_all_to_all,
    start_exchange,
    waited_for,
)
from .inductor import InductorProgram, Replay, inductor_options, lower_as_collective
from .joint import joint_graph
from .regions import no_autocast, without_dispatch_modes
from .sizes import OpenSizes, export_open, open_mode, open_sizes, plain_size, run_open, size_of, traced_number
from .tracing import (
    LATE_IMPORTS,
    as_if_eager,
    as_if_exported,
    functionalized,
    hooks_of_all_modules,
    lazy_code,
    move_hooks,
    moves_of_modules,
    own_progress_lock,
    plain_checkpoints,
    transforms,
    without_prints,
    without_torch_functions,
)

__all__ = [
    "total_norm_through", "unscale_through", "abort_groups", "broadcasts", "collectives_on_their_way",
    "default_store", "group_of", "set_group_timeout", "start_all_to_all", "start_exchange", "waited_for",
    "fake_mode", "fake_tensor", "fake_twin", "is_fake", "storage_key", "weak_storage", "joint_graph",
    "compiler_errors", "in_given_order", "InductorProgram", "Replay", "inductor_options", "lower_as_collective",
    "TorchDispatchMode", "tree_flatten", "tree_map", "tree_unflatten", "no_autocast", "without_dispatch_modes",
    "OpenSizes", "traced_number", "export_open", "open_mode", "open_sizes", "plain_size", "run_open", "size_of",
    "as_if_eager", "as_if_exported", "functionalized", "hooks_of_all_modules", "lazy_code", "LATE_IMPORTS",
    "move_hooks", "moves_of_modules", "own_progress_lock", "flex_attention_by", "plain_checkpoints", "transforms",
    "without_prints", "without_torch_functions",
]  # fmt: skip

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


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
