"""`state_dict` and `load_state_dict` of a compiled model: plain Shard placements go out, any placement or whole tensors
come in.

A part that DTensor calls a strided shard (a fused weight cut inside its parts, a dim cut by axes in another order than
the mesh's) is not what tools outside of autopar expect, so it is moved: all ranks call `state_dict` together.

Under a pipeline a rank gives and takes the tensors of its own stages, as DTensors on the mesh of a stage. What it is
given besides, of other stages, it passes over, so that every rank can load the whole model's state dict.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from .. import _torch
from ..errors import InputError
from ..ir.layout import Layout, local_part
from ..processes.dtensors import as_dtensor, layout_of, placements_of
from ..processes.stage_mesh import StageMesh
from .gather import gather_everywhere, plain


def translate_states(
    module: nn.Module, layouts: Mapping[str, Layout], stage: StageMesh, elsewhere: Collection[str] = ()
) -> None:
    """Let a module with DTensor parameters in these layouts give and take state dicts as the docstring of this file
    says. `elsewhere`: what other stages have."""

    def give(_, state: dict, prefix: str, __) -> None:
        for name, layout in layouts.items():
            target = plain(layout, stage.mesh)
            if target != layout and prefix + name in state:
                state[prefix + name] = moved(state[prefix + name], layout, target, stage)

    def take(_, state: dict, prefix: str, *__) -> None:
        for name in elsewhere:
            state.pop(prefix + name, None)
        for name, layout in layouts.items():
            if (value := state.get(prefix + name)) is not None:
                state[prefix + name] = laid_out(name, value, module.get_parameter(name), layout, stage)

    module.register_state_dict_post_hook(give)
    module.register_load_state_dict_pre_hook(take)


def moved(tensor: DTensor, layout: Layout, target: Layout, stage: StageMesh) -> DTensor:
    """Return a tensor in another layout than its own."""
    whole = gather_everywhere(_torch.local_of(tensor).detach(), tensor.shape, layout, stage)
    return _part(whole, target, stage)


def laid_out(name: str, value: Tensor, parameter: DTensor, layout: Layout, stage: StageMesh) -> Tensor:
    """Return a whole tensor, or a DTensor in any placement, laid out as the parameter is; one of another shape stays as
    it is, for torch to report. Raises InputError for a DTensor on other ranks than the stage's."""
    if tuple(value.shape) != tuple(parameter.shape):
        return value
    if not isinstance(value, DTensor):
        return _part(value.detach(), layout, stage)
    if tuple(ranks := value.device_mesh.mesh.flatten().tolist()) != stage.ranks[stage.pp_rank]:
        raise InputError(
            f"{name} is a DTensor of ranks {ranks}, and here ranks {[*stage.ranks[stage.pp_rank]]} have it",
            fix="load tensors that are whole, full_tensor(), or those of this rank's state_dict()",
        )
    if tuple(value.placements) == placements_of(layout, stage.mesh):
        return value
    if any(isinstance(p, Partial) or _torch.is_strided_shard(p) for p in value.placements):
        return _part(value.full_tensor().detach(), layout, stage)
    given = layout_of(value.placements, value.dim(), stage.mesh)
    return moved(value, given, layout, stage)


def _part(whole: Tensor, layout: Layout, stage: StageMesh) -> DTensor:
    local = local_part(whole, layout, stage.mesh, stage.coordinate).to(stage.device)
    return as_dtensor(local, whole.shape, layout, stage.mesh, stage.device_mesh)
