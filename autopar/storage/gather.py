"""One whole tensor out of the parts that ranks hold, whatever its layout. Collective: ranks call with the same
arguments but their own part, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..ir.layout import Layout, local_ranges, local_shape
from ..ir.mesh import Mesh
from ..processes import process_groups, watch
from ..processes.stage_mesh import StageMesh
from .tensor_file import Form, Ranges


@dataclass(frozen=True)
class Held:
    """A tensor of which every rank of a stage holds the part that `layout` says; `part()` gives it, the stage's ranks
    ask for it together. `pp_ranks`: those along the pipeline that hold it; `part` is None on the ranks of
    others."""

    form: Form
    layout: Layout
    part: Callable[[], Tensor] | None
    pp_ranks: tuple[int, ...] = (0,)

    def ranks_for(self, owner: int, stage: StageMesh) -> tuple[int, ...]:
        """Return the ranks that give their parts to `owner`: those of its own stage, if they hold the tensor."""
        return next((stage.ranks[p] for p in self.pp_ranks if owner in stage.ranks[p]), stage.ranks[self.pp_ranks[0]])


def of_all_stages(held: dict[str, Held], stage: StageMesh) -> dict[str, Held]:
    """Return what the stages hold together, in the same order on every rank."""
    if stage.pp_group is None:
        return held
    found: dict[str, Held] = {}
    everyone = stage.from_all_pp_ranks({name: (h.form, h.layout) for name, h in held.items()}, "what the stages hold")
    for pp_rank, theirs in enumerate(everyone):
        for name, (form, layout) in theirs.items():
            part = held[name].part if name in held else None
            earlier = found.get(name, Held(form, layout, part, ()))
            found[name] = replace(earlier, pp_ranks=(*earlier.pp_ranks, pp_rank))
    return found


def gather_to(owner: int, held: Held, stage: StageMesh) -> Tensor | None:
    """Return the whole tensor on rank `owner`, None on the others. The owner holds one part besides it, the others
    nothing. All ranks call it; those that neither hold a part nor get the whole do nothing."""
    rank, shape, ranks = dist.get_rank(), held.form.shape, held.ranks_for(owner, stage)
    part = held.part() if rank in ranks else None
    parts = _holders(held.layout, stage.mesh, ranks)
    if len(parts) == 1 and owner in ranks:
        return part if rank == owner else None
    like = part if part is not None else torch.empty(0, dtype=held.form.dtype, device=stage.device)
    whole = like.new_empty(shape) if rank == owner and len(parts) > 1 else None
    with watch.collective("a tensor gathered from its parts"):
        group = process_groups.tensor_group()
        for coordinate, holders in parts:
            sender = owner if owner in holders else holders[0]
            if rank == owner:
                received = part
                if sender != owner:
                    received = like.new_empty(local_shape(shape, held.layout, stage.mesh, coordinate))
                    watch.patiently(partial(dist.recv, received, sender, group=group))
                if whole is None:
                    return received
                copy_into(whole, received, local_ranges(shape, held.layout, stage.mesh, coordinate))
            elif rank == sender:
                watch.patiently(partial(dist.send, part.contiguous(), owner, group=group))
    return whole


def gather_everywhere(part: Tensor, shape: Sequence[int], layout: Layout, stage: StageMesh) -> Tensor:
    """Return the whole tensor on every rank of a stage, which call this together."""
    ranks = stage.ranks[stage.pp_rank]
    parts = _holders(layout, stage.mesh, ranks)
    if len(parts) == 1:
        return part
    rank, whole = dist.get_rank(), part.new_empty(tuple(shape))
    with watch.collective("a tensor gathered from its parts"):
        group = stage.group or process_groups.tensor_group()
        for coordinate, holders in parts:
            sent = (
                part.contiguous()
                if rank == holders[0]
                else part.new_empty(local_shape(shape, layout, stage.mesh, coordinate))
            )
            watch.patiently(partial(dist.broadcast, sent, holders[0], group=group))
            copy_into(whole, sent, local_ranges(shape, layout, stage.mesh, coordinate))
    return whole


def _holders(layout: Layout, mesh: Mesh, ranks: Sequence[int]) -> list[tuple[dict[str, int], list[int]]]:
    """Return for each different part the coordinate of its first holder, and all its holders. `ranks`: what the mesh's
    devices are."""
    axes = layout.sharding_axes
    found: dict[tuple[int, ...], tuple[dict[str, int], list[int]]] = {}
    for device, rank in enumerate(ranks):
        coordinate = mesh.coordinate(device)
        found.setdefault(tuple(coordinate[a] for a in axes), (coordinate, []))[1].append(rank)
    return list(found.values())


def copy_into(whole: Tensor, part: Tensor, ranges: Ranges) -> None:
    """Write a part where it belongs."""
    if not ranges:
        whole.copy_(part)
        return
    dim, at = len(ranges) - 1, 0
    for start, stop in ranges[dim]:
        copy_into(whole.narrow(dim, start, stop - start), part.narrow(dim, at, stop - start), ranges[:dim])
        at += stop - start


def plain(layout: Layout, mesh: Mesh) -> Layout:
    """Return the layout with the same dims cut by the same axes, as DTensor's `Shard` placements cut them."""
    return Layout(tuple(tuple(sorted(axes, key=mesh.names.index)) for axes in layout.dims))
