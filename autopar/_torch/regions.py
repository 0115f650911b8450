"""Torch's private interfaces to what switches gradients and autocast on and off, in graphs and in the dispatcher.

Written for torch >= 2.11, < 2.16.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable

import torch
from torch import fx
from torch.utils._pytree import tree_flatten

aten = torch.ops.aten


@contextlib.contextmanager
def plain_regions():
    """Inside, an exported graph keeps a node where gradients or autocast are switched on or off, and all ops in one
    graph. As submodules, which torch makes of such regions, it loses a `no_grad` that begins inside of an
    `autocast`."""
    from torch._export.passes import replace_autocast_with_hop_pass as autocast
    from torch._export.passes import replace_set_grad_with_hop_pass as set_grad

    def unchanged(module, signature):
        return module, signature

    before = autocast.replace_autocast_with_hop_pass, set_grad.replace_set_grad_with_hop_pass
    autocast.replace_autocast_with_hop_pass = set_grad.replace_set_grad_with_hop_pass = unchanged
    try:
        yield
    finally:
        autocast.replace_autocast_with_hop_pass, set_grad.replace_set_grad_with_hop_pass = before


def grad_switch(node: fx.Node) -> bool | None:
    """Return True for a node that switches gradients on, False for one that switches them off, None for any other
    node."""
    return node.args[0] if node.op == "call_function" and node.target is torch._C._set_grad_enabled else None


def switches_grad(function) -> bool:
    """Return whether a function is the one that switches gradients on and off."""
    return function is torch._C._set_grad_enabled


def switch_grad(graph: fx.Graph, on: bool) -> fx.Node:
    """Add a node that switches gradients on or off where the graph is being written, and return it."""
    return graph.call_function(torch._C._set_grad_enabled, (on,))


def autocast_switch(node: fx.Node) -> tuple | None:
    """Return (device type, lower precision, whether it is on) of a node where autocast begins, () where it ends, None
    for others."""
    if node.op == "call_function" and node.target is torch.amp.autocast_mode._exit_autocast:
        return ()
    return (
        tuple(node.args[:3])
        if node.op == "call_function" and node.target is torch.amp.autocast_mode._enter_autocast
        else None
    )


def no_autocast():
    """Inside, autocast is off on every device."""
    return torch._C._DisableAutocast()


_AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def has_autocast_kernel(target, device: str) -> bool:
    """Return whether autocast does something with the arguments of an op, or may do it with those of the ops that it is
    made of."""
    keys = (_AUTOCAST_KEYS[device], "CompositeImplicitAutograd")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), key) for key in keys)


@functools.cache
def autocast_ops(device: str) -> frozenset:
    """Return the ATen ops that autocast of a type of device does something with."""
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
    found = [n for n in names if torch._C._dispatch_has_kernel_for_dispatch_key(n, _AUTOCAST_KEYS[device])]
    split = [n.removeprefix("aten::").partition(".") for n in found]
    return frozenset(getattr(getattr(aten, name), overload or "default") for name, _, overload in split)


@contextlib.contextmanager
def kernels_in_place_of(device: str, kernels: dict[object, Callable]):
    """Inside, autocast of a type of device runs these kernels in place of the ops."""
    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are replaced
        for op, kernel in kernels.items():
            library.impl(op, kernel, _AUTOCAST_KEYS[device], allow_override=True)
        yield


class _StandIn(torch.Tensor):
    """Shape, type and strides of a tensor on a device that need not be there; `run` does what is called with it."""

    @staticmethod
    def __new__(cls, value: torch.Tensor, device: str, run: Callable):
        return torch.Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device=device
        )

    def __init__(self, value: torch.Tensor, device: str, run: Callable):
        self.run = run

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        first = next(a for a in tree_flatten((args, kwargs))[0] if isinstance(a, cls))
        return first.run(func, args, kwargs or {})

    def __repr__(self, **options):
        return f"stand-in {tuple(self.shape)}"


def stand_in(value: torch.Tensor, device: str, run: Callable) -> torch.Tensor:
    """Return a tensor that looks like `value` on a device of this type; every op that gets to it is given to `run(op,
    args, kwargs)`."""
    return _StandIn(value, device, run)


def written(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that an op writes to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = dict(zip((a.name for a in schema.arguments), node.args)) | dict(node.kwargs)
    found = [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [
        n for value in found for n in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(n, fx.Node)
    ]


def without_dispatch_modes():
    """Return a context in which no TorchDispatchMode that was entered before sees an op."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()
