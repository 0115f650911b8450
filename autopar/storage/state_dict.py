"""`state_dict` and `load_state_dict` of a compiled model: plain Shard placements go out, any placement or whole tensors come in.

A part that DTensor calls a strided shard (a fused weight cut inside its parts, a dim cut by axes in another order than the mesh's)
is not what tools outside of autopar expect, so it is moved: all ranks call `state_dict` together.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from .. import _torch
from ..layout import Layout, local_part
from ..mesh import Mesh
from ..runtime.dtensors import as_dtensor, layout_of, placements_of
from .gather import gather_everywhere, plain


def translate_states(module: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh, device_mesh) -> None:
    """Let a module with DTensor parameters in these layouts give and take state dicts as said above."""

    def give(_, state: dict, prefix: str, __) -> None:
        for name, layout in layouts.items():
            target = plain(layout, mesh)
            if target != layout and prefix + name in state:
                state[prefix + name] = moved(state[prefix + name], layout, target, mesh, device_mesh)

    def take(_, state: dict, prefix: str, *__) -> None:
        for name, layout in layouts.items():
            if (value := state.get(prefix + name)) is not None:
                state[prefix + name] = laid_out(value, module.get_parameter(name), layout, mesh, device_mesh)

    module.register_state_dict_post_hook(give)
    module.register_load_state_dict_pre_hook(take)


def moved(tensor: DTensor, layout: Layout, target: Layout, mesh: Mesh, device_mesh) -> DTensor:
    """A tensor from one layout in another."""
    whole = gather_everywhere(_torch.local_of(tensor).detach(), tensor.shape, layout, mesh)
    return _part(whole, target, mesh, device_mesh)


def laid_out(value: Tensor, parameter: DTensor, layout: Layout, mesh: Mesh, device_mesh) -> Tensor:
    """A whole tensor, or a DTensor in any placement, as the parameter's are; one of another shape stays as it is, for torch to
    report."""
    if tuple(value.shape) != tuple(parameter.shape):
        return value
    if not isinstance(value, DTensor):
        return _part(value.detach(), layout, mesh, device_mesh)
    if tuple(value.placements) == placements_of(layout, mesh):
        return value
    if any(isinstance(p, Partial) or _torch.is_strided_shard(p) for p in value.placements):
        return _part(value.full_tensor().detach(), layout, mesh, device_mesh)
    given = layout_of(value.placements, value.dim(), mesh)
    return moved(value, given, layout, mesh, device_mesh)


def _part(whole: Tensor, layout: Layout, mesh: Mesh, device_mesh) -> DTensor:
    local = local_part(whole, layout, mesh, mesh.coordinate(dist.get_rank())).to(torch.device(device_mesh.device_type))
    return as_dtensor(local, whole.shape, layout, mesh, device_mesh)
