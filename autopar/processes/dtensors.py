"""Layouts as DTensor placements, and back.

DTensor applies placements in the order of the mesh's axes. Where a dim's own order differs (a ZeRO-sharded
column-parallel weight is cut by tp first), or the dim is cut inside parts, the axis gets a strided shard whose split
factor is what lies outside it.

No placement says zigzag. A DTensor around local values that are cut so would have its places in the order of the
devices, so none is made: `whole_of` gives such values in their own order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .. import _torch
from ..errors import InputError
from ..ir.layout import Layout, in_blocks, in_zigzag, local_part, straightened
from ..ir.mesh import Mesh


def placements_of(layout: Layout, mesh: Mesh) -> tuple:
    """Return one placement a mesh axis; of zigzag the one of plain blocks."""
    layout = in_blocks(layout)
    result: list[Placement] = []
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
    return tuple(result)


def layout_of(placements: Sequence, ndim: int, mesh: Mesh, name: str = "tensor") -> Layout:
    """Return the layout of a user's DTensor. Raises InputError for placements that autopar does not take as an
    input."""
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


def spec_of(layout: Layout, shape: Sequence[int], dtype: torch.dtype, mesh: Mesh, device_mesh):
    """Return what the DTensors of one global tensor have in common, for `_torch.as_dtensor`."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    return _torch.dtensor_spec(
        device_mesh, placements_of(layout, mesh), shape, stride, dtype, max(layout.parts, default=1) > 1
    )


def as_dtensor(local: torch.Tensor, shape: Sequence[int], layout: Layout, mesh: Mesh, device_mesh) -> DTensor:
    """Return a DTensor of global `shape` around this device's part of it, without communication."""
    return _torch.as_dtensor(local, spec_of(layout, shape, local.dtype, mesh, device_mesh))


def whole_of(local: torch.Tensor, shape: Sequence[int], layout: Layout, mesh: Mesh, device_mesh) -> torch.Tensor:
    """Return the whole of a tensor of which this device has the part `local`. All ranks call it together."""
    return straightened(as_dtensor(local, shape, layout, mesh, device_mesh).full_tensor(), layout, mesh)


def redistributed(tensor: DTensor, layout: Layout, mesh: Mesh, device_mesh) -> torch.Tensor:
    """Return the local part of a DTensor in another layout."""
    placements = placements_of(layout, mesh)
    if tuple(tensor.placements) == placements and not in_zigzag(layout):
        return tensor.to_local()
    if in_zigzag(layout) or any(
        map(_torch.is_strided_shard, (*tensor.placements, *placements))
    ):  # which torch moves right for some only
        here = dict(zip(mesh.names, device_mesh.get_coordinate()))
        return local_part(tensor.full_tensor(), layout, mesh, here)
    return tensor.redistribute(device_mesh, placements).to_local()
