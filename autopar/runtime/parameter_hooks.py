"""Hooks of parameters: they get a gradient as eager torch gives it, a plain whole tensor, and may give another one.

The gradient of a compiled model's parameter is a DTensor, which does not mix with a user's plain mask. A hook sees a
GlobalTensor, which is gathered when the hook reads it; what it returns, or writes into it, is cut again. So a hook runs
on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import _torch
from ..ir.layout import Layout, local_part
from ..processes.stage_mesh import StageMesh
from .outputs import GlobalTensor, plain


def give_whole_gradients(parameter: nn.Parameter, layout: Layout, stage: StageMesh) -> None:
    """Let `parameter.register_hook(hook)` mean that the hook gets the whole gradient."""
    register = parameter.register_hook

    def register_hook(hook: Callable[[Tensor], Tensor | None]):
        def on_whole(gradient: Tensor) -> Tensor | None:
            if any(p.is_partial() for p in gradient.placements):  # inside of no_sync
                return hook(gradient)
            whole = _torch.as_dtensor(_torch.local_of(gradient), gradient._spec, GlobalTensor)
            result = hook(whole)
            if result is None:
                result = whole.__dict__.get("_plain")  # which the hook may have written to
            if result is None:
                return None
            result = plain(result)
            if isinstance(result, DTensor):
                return result
            part = local_part(result, layout, stage.mesh, stage.coordinate).to(_torch.local_of(gradient).device)
            return _torch.as_dtensor(part.contiguous(), gradient._spec)

        return register(on_whole)

    parameter.register_hook = register_hook


def give_all_whole_gradients(module: nn.Module, layouts: Mapping[str, Layout], stage: StageMesh) -> None:
    """Let the hooks of all parameters of a module that has these layouts get whole gradients."""
    for name, parameter in module.named_parameters():
        give_whole_gradients(parameter, layouts[name], stage)
