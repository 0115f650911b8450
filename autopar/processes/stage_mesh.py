"""The devices that run one stage together: the whole mesh, or a slice of it across the pipeline's axis."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch
from ..ir.mesh import Mesh
from ..plans.pipeline import ALONE
from ..plans.plan import Plan
from . import process_groups, watch


@dataclass(frozen=True)
class StageMesh:
    """`mesh`, and `device_mesh` of those of its devices that run what this rank runs. `coordinate`: of this rank in it.
    `pp_rank`: of this rank along the pipeline's axis, 0 without one. `ranks`: by pipeline rank, the world's ranks that
    are the mesh's devices, in order. `group`: the process group of those with this pipeline rank, None for all of the
    world; `pp_group`: of the ranks at this coordinate along the pipeline, None without one; `pp_host_group`: of the
    same, for what stages ask each other."""

    mesh: Mesh
    device_mesh: object
    coordinate: dict[str, int]
    pp_rank: int
    ranks: tuple[tuple[int, ...], ...]
    group: object = None
    pp_group: object = None
    pp_host_group: object = None

    @staticmethod
    def alone(mesh: Mesh, device_mesh) -> StageMesh:
        """Return the whole mesh, without a pipeline."""
        return StageMesh(mesh, device_mesh, mesh.coordinate(dist.get_rank()), 0, (tuple(range(mesh.devices)),))

    @staticmethod
    def of(plan: Plan, device_mesh) -> StageMesh:
        """Return the devices that run this rank's stage under a plan. All ranks call it together."""
        if plan.pipeline.ranks == 1:
            return StageMesh.alone(plan.mesh, device_mesh)
        rank, axis, mesh = dist.get_rank(), plan.pipeline.axis, plan.pipeline.mesh_of_stage(plan.mesh)
        coordinate = plan.mesh.coordinate(rank)
        asked = process_groups.bind([axis], plan.mesh, device_mesh, rank, "stages", on_host=True)
        host_group = _torch.group_of(asked[axis])
        pp_ranks = [plan.mesh.coordinate(r)[axis] for r in range(plan.mesh.devices)]
        ranks = tuple(
            tuple(r for r, p in enumerate(pp_ranks) if p == pp_rank) for pp_rank in range(plan.pipeline.ranks)
        )
        if mesh.names == (ALONE,):
            groups = process_groups.bind([axis], plan.mesh, device_mesh, rank)
            names = (*device_mesh.mesh_dim_names, ALONE)
            one = DeviceMesh(device_mesh.device_type, device_mesh.mesh.unsqueeze(-1), mesh_dim_names=names)
            pp_group = _torch.group_of(groups[axis])
            return StageMesh(mesh, one[ALONE], {ALONE: 0}, coordinate[axis], ranks, None, pp_group, host_group)
        together = ",".join(mesh.names)
        groups = process_groups.bind([axis, together], plan.mesh, device_mesh, rank)
        group, pp_group = _torch.group_of(groups[together]), _torch.group_of(groups[axis])
        here = {n: coordinate[n] for n in mesh.names}
        return StageMesh(mesh, device_mesh[mesh.names], here, coordinate[axis], ranks, group, pp_group, host_group)

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """Return, by rank of the world, its pipeline rank and the device of the mesh that it is there."""
        return {rank: (p, device) for p, ranks in enumerate(self.ranks) for device, rank in enumerate(ranks)}

    @property
    def device(self) -> torch.device:
        """Return the kind of device that the ranks have."""
        return torch.device(self.device_mesh.device_type)

    def from_all_pp_ranks(self, value: object, what: str) -> list:
        """Return what the ranks along the pipeline give, in order. All of them call it together."""
        if self.pp_group is None:
            return [value]
        everyone: list = [None] * len(self.ranks)
        with watch.collective(what):
            watch.patiently(lambda: dist.all_gather_object(everyone, value, group=self.pp_host_group))
        return everyone
