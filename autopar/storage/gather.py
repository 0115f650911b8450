"""One whole tensor out of the parts that ranks hold, whatever its layout. Collective: ranks call with the same
arguments but their own part, in the same order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
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

    def giver(self, owner: int, stage: StageMesh) -> int:
        """Return the pipeline rank whose ranks give their parts to `owner`: its own, if that holds the tensor."""
        pp_rank, _ = stage.places[owner]
        return pp_rank if pp_rank in self.pp_ranks else self.pp_ranks[0]


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
    rank, mesh = dist.get_rank(), stage.mesh
    pp_rank, axes = held.giver(owner, stage), _cut_by(held.layout, stage.mesh)
    part = held.part() if stage.pp_rank == pp_rank else None
    owners_pp_rank, device = stage.places[owner]
    owners = _on(axes, mesh.coordinate(device)) if owners_pp_rank == pp_rank else None  # of the part that it has itself
    if not axes and owners is not None:
        return part if rank == owner else None
    with watch.collective("a tensor gathered from its parts"):
        group = process_groups.tensor_group()
        if rank == owner:
            return _received(held, part, owners, stage, stage.ranks[pp_rank], group)
        here = _on(axes, stage.coordinate)
        if part is not None and here != owners and rank == stage.ranks[pp_rank][mesh.rank_at(here)]:
            watch.patiently(partial(dist.send, part.contiguous(), owner, group=group))
    return None


def _received(
    held: Held,
    part: Tensor | None,
    mine: dict[str, int] | None,
    stage: StageMesh,
    ranks: Sequence[int],
    group: dist.ProcessGroup,
) -> Tensor:
    """Return the whole tensor out of the parts that `ranks` send, on the rank that asked for it. `part`: what it holds
    itself, at the position `mine`, if it is one of them."""
    shape, mesh = held.form.shape, stage.mesh
    like = part if part is not None else torch.empty(0, dtype=held.form.dtype, device=stage.device)
    positions = _positions(held.layout, mesh)
    whole = like.new_empty(shape) if len(positions) > 1 else None
    received = like
    for position in positions:
        received, coordinate = like, dict.fromkeys(mesh.names, 0) | position
        if position != mine:
            received = like.new_empty(local_shape(shape, held.layout, mesh, coordinate))
            watch.patiently(partial(dist.recv, received, ranks[mesh.rank_at(position)], group=group))
        if whole is not None:
            copy_into(whole, received, local_ranges(shape, held.layout, mesh, coordinate))
    return received if whole is None else whole


def gather_everywhere(part: Tensor, shape: Sequence[int], layout: Layout, stage: StageMesh) -> Tensor:
    """Return the whole tensor on every rank of a stage, which call this together."""
    ranks, mesh = stage.ranks[stage.pp_rank], stage.mesh
    positions = _positions(layout, mesh)
    if len(positions) == 1:
        return part
    rank, whole = dist.get_rank(), part.new_empty(tuple(shape))
    with watch.collective("a tensor gathered from its parts"):
        group = stage.group or process_groups.tensor_group()
        for position in positions:
            holder, coordinate = ranks[mesh.rank_at(position)], dict.fromkeys(mesh.names, 0) | position
            sent = part.contiguous() if rank == holder else part.new_empty(local_shape(shape, layout, mesh, coordinate))
            watch.patiently(partial(dist.broadcast, sent, holder, group=group))
            copy_into(whole, sent, local_ranges(shape, layout, mesh, coordinate))
    return whole


def _cut_by(layout: Layout, mesh: Mesh) -> list[str]:
    """Return the axes that cut a tensor, in the order of the mesh."""
    return sorted(layout.sharding_axes, key=mesh.names.index)


def _on(axes: Sequence[str], coordinate: Mapping[str, int]) -> dict[str, int]:
    return {axis: coordinate[axis] for axis in axes}


def _positions(layout: Layout, mesh: Mesh) -> list[dict[str, int]]:
    """Return the position of each different part along the axes that cut the tensor, in order of the ranks that hold
    one first."""
    axes = _cut_by(layout, mesh)
    return [dict(zip(axes, position)) for position in itertools.product(*(range(mesh.size(axis)) for axis in axes))]


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
