"""Torch's private interfaces to what a trace must see or leave alone: its flag, its prints, transforms, checkpoints and
hooks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

LATE_IMPORTS = ("torch._dynamo", "torch.export._trace")  # what torch imports when it traces for the first time


def own_progress_lock() -> None:
    """Give the progress bar of torch's interpreters, which is not shown, a lock of this process alone: it would make
    one for several, which a process that is killed leaves behind."""
    from torch.fx.interpreter import tqdm

    if hasattr(tqdm, "set_lock"):  # else torch has none
        tqdm.set_lock(threading.RLock())


@contextlib.contextmanager
def as_if_eager(active: bool = True):
    """Inside, if `active`, `torch.compiler.is_compiling()` is False even while exporting."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = before and not active
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def as_if_exported():
    """Inside, `torch.compiler.is_compiling()` and `is_exporting()` are True."""
    before = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = before


def without_torch_functions():
    """Inside, neither classes of tensors nor modes are asked what a function of torch does."""
    return torch._C.DisableTorchFunction()


@contextlib.contextmanager
def moves_of_modules(moved: Callable[[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]], torch.nn.Module]):
    """Inside, `module.to(...)` and its kin return `moved(module, move)`; `move` does it to a tensor."""
    plain = torch.nn.Module._apply
    torch.nn.Module._apply = lambda self, move, recurse=True: moved(self, move)  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module._apply = plain  # type: ignore[method-assign]


def lazy_code():
    """Inside, the graphs that torch makes while it traces have no Python code before somebody calls them."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    return _use_lazy_graph_module(True)


@contextlib.contextmanager
def without_prints():
    """Inside, torch.export does not print the graph that it had when it failed."""
    import torch.export._trace as trace

    trace.print = lambda *args, **kwargs: None  # hides the builtin from this module alone
    try:
        yield
    finally:
        trace.__dict__.pop("print", None)


@contextlib.contextmanager
def transforms(entered: Callable[[str], object]):
    """Inside, `entered` is told the name of every transform of torch.func that begins: "torch.vmap", "torch.func.grad"
    (and vjp, jacrev) or "torch.func.jvp" (jacfwd too)."""
    from torch._functorch import eager_transforms, vmap

    entries = ((vmap, "vmap_increment_nesting", "torch.vmap"), (eager_transforms, "grad_increment_nesting",
                                                               "torch.func.grad"),
              (eager_transforms, "jvp_increment_nesting", "torch.func.jvp"))  # fmt: skip
    before = [getattr(module, function) for module, function, _ in entries]

    def noting(plain: Callable, name: str) -> Callable:
        return lambda *args, **kwargs: (entered(name), plain(*args, **kwargs))[1]

    try:
        for (module, function, name), plain in zip(entries, before):
            setattr(module, function, noting(plain, name))
        yield
    finally:
        for (module, function, _), plain in zip(entries, before):
            setattr(module, function, plain)


@contextlib.contextmanager
def plain_checkpoints():
    """Inside, `torch.utils.checkpoint.checkpoint(function, ...)` just calls the function."""
    from torch.utils import checkpoint

    def nothing(*args, **kwargs):
        yield

    before = checkpoint._checkpoint_without_reentrant_generator
    checkpoint._checkpoint_without_reentrant_generator = nothing
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = before


def functionalized(
    function: Callable[[list[torch.Tensor]], list[torch.Tensor]], tensors: list[torch.Tensor]
) -> tuple[list[torch.Tensor], bool]:
    """Return what a function returns, computed without writes, and whether it wrote to the tensors that it was
    given."""
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    around = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize))
    with around, FunctionalTensorMode():
        given: list[Any] = [FunctionalTensor.to_functional(tensor) for tensor in tensors]
        found: list[Any] = function(given)
        for tensor in (*given, *found):
            torch._sync(tensor)
        is_written = any(torch._functionalize_has_data_mutation(x.elem) for x in given)  # type: ignore[attr-defined]
        return [torch._from_functional_tensor(tensor.elem) for tensor in found], is_written


def hooks_of_all_modules() -> list[dict]:
    """Return the tables of hooks that run for every module."""
    from torch.nn.modules import module

    names = (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
    return [getattr(module, name) for name in names]


def move_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Register the hooks of one parameter with another one."""
    for hook in (old._backward_hooks or {}).values():
        new.register_hook(hook)
    for hook in (getattr(old, "_post_accumulate_grad_hooks", None) or {}).values():
        new.register_post_accumulate_grad_hook(hook)
