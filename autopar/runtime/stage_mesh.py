"""The devices that run one stage together: the whole mesh, or a slice of it across the pipeline's axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..mesh import Mesh
from ..pipeline_plan import ALONE, inside
from ..plan import Plan


@dataclass(frozen=True)
class StageMesh:
    """`mesh`, and `device_mesh` of those of its devices that run what this rank runs. `coordinate`: of this rank in it. `place`: of
    this rank along the pipeline's axis, 0 without one."""

    mesh: Mesh
    device_mesh: object
    coordinate: dict[str, int]
    place: int = 0

    @staticmethod
    def of(plan: Plan, device_mesh) -> StageMesh:
        """All ranks call it together."""
        coordinate = plan.mesh.coordinate(dist.get_rank())
        if plan.pipeline is None:
            return StageMesh(plan.mesh, device_mesh, coordinate)
        axis = plan.pipeline.axis
        mesh = inside(plan.mesh, axis)
        if mesh.names == (ALONE,):
            names = (*device_mesh.mesh_dim_names, ALONE)
            one = DeviceMesh(device_mesh.device_type, device_mesh.mesh.unsqueeze(-1), mesh_dim_names=names)
            return StageMesh(mesh, one[ALONE], {ALONE: 0}, coordinate[axis])
        return StageMesh(mesh, device_mesh[mesh.names], {n: coordinate[n] for n in mesh.names}, coordinate[axis])
