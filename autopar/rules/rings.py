"""Read off an attention and its layouts which blocks of keys go round, and to which devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from ..ir.layout import ZIGZAG, Layout, dim_ranges
from ..ir.mesh import Mesh
from ..ops.ring import Block, Ring, ring_of
from .layers import ring_axes
from .reading import bound, tensors_by_name

KEYS = 2  # the dim of keys in k and v


@dataclass(frozen=True)
class Round:
    """One attention's way round over `axes`. `blocks`: the places of every device's keys among all."""

    axes: tuple[str, ...]
    blocks: tuple[Block, ...]
    causal: bool
    window: int
    zigzag: bool

    @property
    def ring(self) -> Ring:
        """Return what is sent where."""
        return ring_of(self.blocks, self.causal, self.window, self.zigzag)


def round_of(node: fx.Node, inputs: Sequence[Layout], mesh: Mesh, rank: int = 0) -> Round | None:
    """Return how keys go round an attention's devices, those around `rank`; None if no axis of several cuts them with
    the queries."""
    axes = tuple(a for a in ring_axes(node, inputs) if mesh.size(a) > 1)
    if not axes:
        return None
    given, layout = bound(node), inputs[list(tensors_by_name(node)).index("k")]
    keys, here = given["k"].meta["val"].shape[KEYS], mesh.coordinate(rank)
    places = [{**here, **{a: mesh.coordinate(r)[a] for a in axes}} for r in mesh.group(axes, rank)]
    blocks = tuple(tuple(dim_ranges(keys, layout.dims[KEYS], layout.parts[KEYS], mesh, at)) for at in places)
    return Round(axes, blocks, bool(given["causal"]), int(given["window"]), layout.parts[KEYS] == ZIGZAG)
