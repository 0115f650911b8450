"""Process groups for the logical names that a local graph uses: "dp", or "dp,tp" for several axes together."""

from __future__ import annotations

import torch.distributed as dist

from ..errors import MeshError
from ..mesh import Mesh


def check_world(mesh: Mesh, device_mesh) -> int:
    """This process's rank in the mesh. Raises MeshError if the mesh is not the whole world in order."""
    world = dist.get_world_size()
    ranks = device_mesh.mesh.flatten().tolist()
    if world != mesh.devices or ranks != list(range(world)):
        raise MeshError(
            f"the mesh has {mesh.devices} devices and the process group {world} ranks",
            mesh=mesh, fix=f"start {mesh.devices} processes, or use a mesh of {world} devices",
        )  # fmt: skip
    return dist.get_rank()


def bind(names: set[str], mesh: Mesh, device_mesh, rank: int) -> dict[str, str]:
    """Name of the process group of this rank for every logical name. Collective: all ranks call it with the same names."""
    bound = {}
    for name in sorted(names):
        axes = tuple(name.split(","))
        if len(axes) == 1 and device_mesh.mesh_dim_names:
            bound[name] = device_mesh.get_group(axes[0]).group_name
        elif len(mesh.group(axes, rank)) == mesh.devices:
            bound[name] = dist.group.WORLD.group_name
        else:
            groups = sorted({tuple(sorted(mesh.group(axes, r))) for r in range(mesh.devices)})
            for ranks in groups:
                group = dist.new_group(list(ranks))
                if rank in ranks:
                    bound[name] = group.group_name
    return bound
