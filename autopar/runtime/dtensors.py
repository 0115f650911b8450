"""Layouts as DTensor placements, and back.

DTensor applies placements in the order of the mesh's axes. Where a dim's own order differs (a ZeRO-sharded column-parallel weight
is cut by tp first), or the dim is cut inside parts, the axis gets a strided shard whose split factor is what lies outside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .. import _torch
from ..errors import InputError
from ..layout import Layout
from ..mesh import Mesh


def placements_of(layout: Layout, mesh: Mesh) -> list:
    """One placement a mesh axis."""
    result = []
    for axis in mesh.names:
        d, reduction = layout.dim_of(axis), layout.reduction_of(axis)
        if reduction:
            result.append(Partial(reduction))
        elif d is None:
            result.append(Replicate())
        else:
            order = layout.dims[d]
            later = set(mesh.names[mesh.names.index(axis) + 1 :])
            factor = layout.parts[d] * math.prod(mesh.size(a) for a in order[: order.index(axis)] if a in later)
            result.append(Shard(d) if factor == 1 else _torch.strided_shard(d, factor))
    return result


def layout_of(placements: Sequence, ndim: int, mesh: Mesh, name: str = "tensor") -> Layout:
    """The layout of a user's DTensor. Raises InputError for placements that autopar does not take as an input."""
    dims: list[tuple[str, ...]] = [()] * ndim
    for axis, placement in zip(mesh.names, placements):
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard) or _torch.is_strided_shard(placement):
            raise InputError(
                f"{name} has placement {placement} over axis {axis}", fix="use Shard or Replicate placements"
            )
        dims[placement.dim] = (*dims[placement.dim], axis)
    return Layout(tuple(dims))


def as_dtensor(local: torch.Tensor, shape: Sequence[int], layout: Layout, mesh: Mesh, device_mesh) -> DTensor:
    """A DTensor of global `shape` around this device's part of it, without communication."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, device_mesh, placements_of(layout, mesh), run_check=False, shape=torch.Size(shape), stride=stride
    )
