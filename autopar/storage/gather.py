"""One whole tensor out of the parts that ranks hold, whatever its layout. Collective: every rank calls with the same arguments
but its own part, in the same order."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from ..layout import Layout, local_ranges, local_shape
from ..mesh import Mesh
from ..runtime import watch
from .tensor_file import Ranges


def gather_to(owner: int, part: Tensor, shape: Sequence[int], layout: Layout, mesh: Mesh) -> Tensor | None:
    """The whole tensor on rank `owner`, None on the others. The owner holds one part besides it, the others nothing."""
    rank = dist.get_rank()
    if layout.is_replicated:
        return part if rank == owner else None
    whole = part.new_empty(tuple(shape)) if rank == owner else None
    with watch.meeting("a tensor gathered from its parts"):
        for coordinate, holders in _holders(layout, mesh):
            sender = owner if owner in holders else holders[0]
            if rank == owner:
                received = part
                if sender != owner:
                    received = part.new_empty(local_shape(shape, layout, mesh, coordinate))
                    dist.recv(received, sender)
                _place(whole, received, local_ranges(shape, layout, mesh, coordinate))
            elif rank == sender:
                dist.send(part.contiguous(), owner)
    return whole


def gather_everywhere(part: Tensor, shape: Sequence[int], layout: Layout, mesh: Mesh) -> Tensor:
    """The whole tensor on every rank."""
    if layout.is_replicated:
        return part
    rank, whole = dist.get_rank(), part.new_empty(tuple(shape))
    with watch.meeting("a tensor gathered from its parts"):
        for coordinate, holders in _holders(layout, mesh):
            sent = part.contiguous() if rank == holders[0] else part.new_empty(local_shape(shape, layout, mesh, coordinate))
            dist.broadcast(sent, holders[0])
            _place(whole, sent, local_ranges(shape, layout, mesh, coordinate))
    return whole


def _holders(layout: Layout, mesh: Mesh) -> list[tuple[dict[str, int], list[int]]]:
    """For each different part the coordinate of its first holder, and all its holders."""
    axes, found = layout.sharding_axes, {}
    for rank in range(mesh.devices):
        coordinate = mesh.coordinate(rank)
        found.setdefault(tuple(coordinate[a] for a in axes), (coordinate, []))[1].append(rank)
    return list(found.values())


def _place(whole: Tensor, part: Tensor, ranges: Ranges) -> None:
    """Write a part where it belongs."""
    if not ranges:
        whole.copy_(part)
        return
    dim, at = len(ranges) - 1, 0
    for start, stop in ranges[dim]:
        _place(whole.narrow(dim, start, stop - start), part.narrow(dim, at, stop - start), ranges[:dim])
        at += stop - start


def is_plain(layout: Layout, mesh: Mesh) -> bool:
    """Whether parts are the blocks that DTensor's `Shard` placements say: cut in the order of the mesh's axes, in one part."""
    return layout == plain(layout, mesh)


def plain(layout: Layout, mesh: Mesh) -> Layout:
    """The same dims cut by the same axes as DTensor's `Shard` placements cut them."""
    return Layout(tuple(tuple(sorted(axes, key=mesh.names.index)) for axes in layout.dims))
