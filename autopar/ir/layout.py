"""The layout of one tensor over a mesh: which axes shard which dim, and over which axes the value is partial.

`axis` is a mesh axis and `dim` a tensor dim. A dim may be sharded by several axes, outermost first: with dims[0] =
("tp", "dp") the dim is cut into tp blocks and each of them into dp blocks, so gathering dp leaves contiguous tp shards.
A cut of `size` into n follows torch's chunk: blocks of ceil(size / n), the last one shorter. Layouts that would leave a
device without elements are not legal, so only the last block of a cut is ever short.

`parts[d] > 1` means that dim d is a row of that many equal parts (a fused query-key-value weight has 3) and that each
part is sharded for itself: a device holds its block of every part. `parts[d] == ZIGZAG` means two parts, with the
blocks of the second in reverse order: of n devices the first holds the first and the last of 2 n blocks, the second
those beside them. Under a causal mask all such pairs of blocks of queries have the same keys before them.

An axis may shard rows (dim 0) not by blocks but by *owner*: a device has the rows of its own experts, a number of them
that run time says and that shapes put at its block's. Such an axis is also among the partial ones, as "rows". No move
leads there or away; `autopar::dispatch` and `combine` do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import StrategyError
from .mesh import Mesh

if TYPE_CHECKING:
    from torch import Tensor

ZIGZAG = -2  # the count of parts of a dim that is cut in zigzag
ROWS = "rows"  # how a tensor is partial over an axis on which rows are where their experts are


@dataclass(frozen=True, slots=True)
class Layout:
    """One tensor's placement. `dims[d]`: axes that shard dim d, outermost first. `partial`: pairs of an axis and "sum",
    "max" or "rows". `parts[d]`: see above, 1 if empty. Raises StrategyError on counts of parts for another number of
    dims."""

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[tuple[str, str], ...] = ()
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Make equal placements equal values: partial axes are sorted, and an unsharded dim has one part."""
        if not self.parts:
            object.__setattr__(self, "parts", (1,) * len(self.dims))
        elif len(self.parts) != len(self.dims):
            raise StrategyError(f"a layout of {len(self.dims)} dims has {len(self.parts)} counts of parts")
        elif any([n != 1 for n in self.parts]):
            object.__setattr__(self, "parts", tuple([n if axes else 1 for n, axes in zip(self.parts, self.dims)]))
        if len(self.partial) > 1:
            object.__setattr__(self, "partial", tuple(sorted(self.partial)))

    @staticmethod
    def replicated(ndim: int) -> Layout:
        """Return the layout of a tensor of `ndim` dims that every device holds whole."""
        return Layout(((),) * ndim)

    @property
    def is_replicated(self) -> bool:
        """Return whether every device has the whole tensor."""
        return not self.partial and not any(self.dims)

    @property
    def sharding_axes(self) -> tuple[str, ...]:
        """Return the mesh axes that cut a dim, in order of the dims."""
        return tuple(axis for axes in self.dims for axis in axes)

    def dim_of(self, axis: str) -> int | None:
        """Return the dim that `axis` shards, or None."""
        for d, axes in enumerate(self.dims):
            if axis in axes:
                return d
        return None

    def reduction_of(self, axis: str) -> str | None:
        """Return how the value is partial over `axis`: "sum" or "max", None if it is not."""
        for name, reduction in self.partial:
            if name == axis and reduction != ROWS:
                return reduction
        return None

    @property
    def owned_axes(self) -> tuple[str, ...]:
        """Return the axes over which rows are where their experts are."""
        return tuple(axis for axis, reduction in self.partial if reduction == ROWS)

    def text(self, mesh: Mesh | None = None) -> str:
        """Write the layout as `dp:S(0) tp:P`, axes outermost first in a dim; `S(0/3)` is sharded inside each of 3
        parts, `Z(0)` in zigzag, `E(0)` by the owner of a row's expert, `R` is replicated."""
        owned = self.owned_axes
        words = [
            (axis, f"{axis}:{'E' if axis in owned else 'Z' if n == ZIGZAG else 'S'}({d}{f'/{n}' if n > 1 else ''})")
            for d, (axes, n) in enumerate(zip(self.dims, self.parts))
            for axis in axes
        ]
        partial = [(axis, op) for axis, op in self.partial if op != ROWS]
        words += [(axis, f"{axis}:P" if op == "sum" else f"{axis}:P({op})") for axis, op in partial]
        return " ".join(word for _, word in words) or "R"

    def __str__(self) -> str:
        return self.text()

    @staticmethod
    def parse(text: str, ndim: int) -> Layout:
        """Read what `text` writes. Raises StrategyError with the accepted form."""
        dims: list[list[str]] = [[] for _ in range(ndim)]
        parts, partial, seen = [1] * ndim, [], set()
        for word in text.replace(",", " ").split():
            if word == "R" or word.endswith(":R"):
                continue
            match = re.fullmatch(r"(\w+):(?:([SEZ])\((-?\d+)(?:/(\d+))?\)|P(?:\((sum|max)\))?)", word)
            if not match:
                raise StrategyError(
                    f"cannot read {word!r} as a placement", fix='write "tp:S(0)", "dp:S(0) tp:S(1)" or "R"'
                )
            axis, how, dim, part, reduction = match.groups()
            if axis in seen:
                raise StrategyError(f"axis {axis!r} is placed twice in {text!r}", fix="name each axis once")
            seen.add(axis)
            if dim is None:
                partial.append((axis, reduction or "sum"))
            elif not -ndim <= int(dim) < ndim:
                raise StrategyError(
                    f"{word!r} names dim {dim} of a tensor with {ndim} dims", fix=f"use a dim below {ndim}"
                )
            else:
                d, count = int(dim) % ndim, ZIGZAG if how == "Z" else int(part or 1)
                if not count or (dims[d] and parts[d] != count):
                    raise StrategyError(f"{text!r} cuts dim {d} inside several numbers of parts", fix="write one")
                dims[d].append(axis)
                parts[d] = count
                partial += [(axis, ROWS)] if how == "E" else []
        return Layout(tuple(map(tuple, dims)), tuple(partial), tuple(parts))


def chunk(size: int, count: int, index: int | range) -> tuple[int, int]:
    """Return (start, stop) of block `index` when `size` is cut into `count` blocks of ceil(size / count); of a range of
    blocks, from the first to the last."""
    block = -(-size // count)
    first, last = (index.start, index.stop) if isinstance(index, range) else (index, index + 1)
    return min(first * block, size), min(last * block, size)


def dim_ranges(
    size: int, axes: Sequence[str], parts: int, mesh: Mesh, coordinate: Mapping[str, int]
) -> list[tuple[int, int]]:
    """Return the global (start, stop) ranges of one dim that the device at `coordinate` holds, one range a part."""
    whole = size // abs(parts)
    start, stop = 0, whole
    for axis in axes:
        low, high = chunk(stop - start, mesh.size(axis), coordinate[axis])
        start, stop = start + low, start + high
    if parts == ZIGZAG:
        return [(start, stop), (size - stop, size - start)]
    return [(p * whole + start, p * whole + stop) for p in range(parts)]


def local_ranges(
    shape: Sequence[int], layout: Layout, mesh: Mesh, coordinate: Mapping[str, int]
) -> list[list[tuple[int, int]]]:
    """Return for each dim the global (start, stop) ranges that the device at `coordinate` holds of a tensor of global
    `shape`."""
    return [
        dim_ranges(size, axes, parts, mesh, coordinate) if axes else [(0, size)]
        for size, axes, parts in zip(shape, layout.dims, layout.parts)
    ]


def fraction(layout: Layout, mesh: Mesh) -> float:
    """Return the share of a tensor's elements that a device holds."""
    return 1.0 / math.prod(mesh.size(a) for a in layout.sharding_axes)


def local_shape(shape: Sequence[int], layout: Layout, mesh: Mesh, coordinate: Mapping[str, int]) -> tuple[int, ...]:
    """Return the local shape on the device at `coordinate` of a tensor of global `shape`."""
    return tuple(
        size if not axes else sum(b - a for a, b in dim_ranges(size, axes, parts, mesh, coordinate))
        for size, axes, parts in zip(shape, layout.dims, layout.parts)
    )


def local_offset(shape: Sequence[int], layout: Layout, mesh: Mesh, coordinate: Mapping[str, int], dim: int) -> int:
    """Return the global index of the first local element along `dim` (which must have one part)."""
    return dim_ranges(shape[dim], layout.dims[dim], 1, mesh, coordinate)[0][0]


def local_part(tensor: Tensor, layout: Layout, mesh: Mesh, coordinate: Mapping[str, int]) -> Tensor:
    """Return the shard of a full tensor that the device at `coordinate` holds, a contiguous copy. Partial axes are
    ignored."""
    import torch

    for d, (axes, parts) in enumerate(zip(layout.dims, layout.parts)):
        if axes:
            ranges = dim_ranges(tensor.shape[d], axes, parts, mesh, coordinate)
            slices = [tensor.narrow(d, a, b - a) for a, b in ranges]
            tensor = slices[0] if len(slices) == 1 else torch.cat(slices, d)
    return tensor.clone(memory_format=torch.contiguous_format)


def in_zigzag(layout: Layout) -> bool:
    """Return whether a dim is cut in zigzag."""
    return ZIGZAG in layout.parts


def in_blocks(layout: Layout) -> Layout:
    """Return the layout with plain blocks in the place of zigzag, which are of the same sizes."""
    return replace(layout, parts=tuple(1 if n == ZIGZAG else n for n in layout.parts)) if in_zigzag(layout) else layout


def straightened(held: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """Return a whole tensor, given the parts of all devices one after the other, as plain blocks would be."""
    for d, (axes, parts) in enumerate(zip(layout.dims, layout.parts)):
        if parts == ZIGZAG:
            count = math.prod(mesh.size(axis) for axis in axes)
            places = [*range(0, 2 * count, 2), *range(2 * count - 1, 0, -2)]
            blocks = held.unflatten(d, (2 * count, -1))
            held = blocks.index_select(d, blocks.new_tensor(places, dtype=int)).flatten(d, d + 1)
    return held


def is_legal(shape: Sequence[int], layout: Layout, mesh: Mesh) -> bool:
    """Return whether every device gets at least one element, dims of several parts are cut evenly, and but in zigzag by
    one axis."""
    for size, axes, parts in zip(shape, layout.dims, layout.parts):
        is_several = len(axes) > 1 and parts != ZIGZAG
        if parts != 1 and (is_several or size % (parts * math.prod(mesh.size(a) for a in axes))):
            return False
        sizes = {size}
        for axis in axes:
            count, smaller = mesh.size(axis), set()
            for s in sizes:
                block = -(-s // count)
                if block * (count - 1) >= s:
                    return False
                smaller |= {block, s - block * (count - 1)}
            sizes = smaller
    return True


def is_partial_sum(layout: Layout, mesh: Mesh) -> bool:
    """Return whether the devices of some axis hold terms, of sums alone."""
    reductions = [reduction for axis, reduction in layout.partial if mesh.size(axis) > 1]
    return bool(reductions) and all(reduction == "sum" for reduction in reductions)


def is_even(shape: Sequence[int], layout: Layout, mesh: Mesh) -> bool:
    """Return whether all devices have local shapes of the same size."""
    return all(
        size % (parts * math.prod(mesh.size(a) for a in axes)) == 0
        for size, axes, parts in zip(shape, layout.dims, layout.parts)
    )


def largest_local_numel(shape: Sequence[int], layout: Layout, mesh: Mesh) -> int:
    """Return the number of elements on the device that holds most of them (the one at coordinate 0 along every
    axis)."""
    return math.prod(local_shape(shape, layout, mesh, dict.fromkeys(mesh.names, 0)))
