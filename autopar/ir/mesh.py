"""The device mesh: named axes with sizes. Plain data; no process group is needed to plan for one.

Ranks are numbered as in `torch.distributed.device_mesh.DeviceMesh`: row-major, so the last axis varies fastest and its
neighbours are the closest devices.

A part of an axis is named by what it says of a position on the axis: `dp%4` has four neighbours, `dp//4` one of each
four. Collectives that go tier by tier run over such parts.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from ..errors import MeshError

NOT_DATA = (
    "tp",
    "cp",
    "sp",
    "ep",
    "pp",
)  # names of axes that do not carry the batch, where no strategy gives them roles

PART = r"(?://|%)([1-9]\d*)(?!\w)"  # of an axis, after its name
SEQUENCE_AXIS = "cp"  # the name of an axis that carries the sequence


@dataclass(frozen=True)
class Mesh:
    """Named axes, outermost first. `Mesh.parse("dp=2,tp=4")` has 8 devices."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.names or len(self.names) != len(self.sizes):
            raise MeshError(
                f"a mesh needs one size per axis, got names {self.names} and sizes {self.sizes}",
                fix="write dp=2,tp=2 or the like",
            )
        if len(set(self.names)) != len(self.names):
            raise MeshError(f"axis names must differ, got {self.names}", fix="name each axis once, such as dp=2,tp=2")
        if any(not isinstance(s, int) or s < 1 for s in self.sizes):
            raise MeshError(f"axis sizes must be positive integers, got {self}", fix="write sizes of 1 or more")

    @staticmethod
    def parse(text: str, devices: int | None = None) -> Mesh:
        """Read a mesh from text such as "dp=2,tp=4". One size may be -1: what the other axes leave of `devices`, by
        default of the processes that torchrun started. Raises MeshError on anything else."""
        pairs = [part.strip() for part in str(text).split(",") if part.strip()]
        found = [m.groups() for part in pairs if (m := re.fullmatch(r"([A-Za-z_]\w*)\s*=\s*(-1|\d+)", part))]
        if not pairs or len(found) < len(pairs):
            raise MeshError(f"cannot read {text!r} as a mesh", fix='write axes as name=size, such as "dp=2,tp=4"')
        return Mesh._filled(tuple(name for name, _ in found), tuple(int(size) for _, size in found), devices)

    @staticmethod
    def _filled(names: tuple[str, ...], sizes: tuple[int, ...], devices: int | None = None) -> Mesh:
        """Return a mesh in which a single size of -1 is what the others leave of the devices."""
        given = [size for size in sizes if size != -1]
        if len(given) != len(sizes) - 1 or any(not isinstance(size, int) or size < 1 for size in given):
            return Mesh(names, sizes)  # or what is wrong with it
        others = math.prod(given)
        written = ",".join(f"{name}={size}" for name, size in zip(names, sizes))
        devices = devices or int(os.environ.get("WORLD_SIZE", 0))
        if not devices:
            raise MeshError(
                f"the -1 in {written} needs the number of devices, which is not known",
                fix="write the size, say --devices N, or start with torchrun",
            )
        if devices % others:
            raise MeshError(
                f"{devices} devices cannot be split as {written}: {others} does not divide {devices}",
                fix="choose axes whose product divides the number of devices",
            )
        return Mesh(names, tuple(devices // others if size == -1 else size for size in sizes))

    @staticmethod
    def of(mesh: object) -> Mesh:
        """Return a Mesh from a Mesh, text, a dict of sizes by name, or a torch DeviceMesh. Raises MeshError on anything
        else."""
        if isinstance(mesh, Mesh):
            return mesh
        if isinstance(mesh, str):
            return Mesh.parse(mesh)
        if isinstance(mesh, dict):
            return Mesh._filled(tuple(mesh), tuple(mesh.values()))
        if hasattr(mesh, "mesh_dim_names") and hasattr(mesh, "mesh"):
            sizes = tuple(mesh.mesh.shape)
            return Mesh(tuple(mesh.mesh_dim_names or (f"axis{i}" for i in range(len(sizes)))), sizes)
        raise MeshError(f"cannot read a {type(mesh).__name__} as a mesh", fix='pass a DeviceMesh or "dp=2,tp=2"')

    @cached_property
    def devices(self) -> int:
        """Return the number of devices."""
        return math.prod(self.sizes)

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        """Return the size of each axis by its name."""
        return dict(zip(self.names, self.sizes))

    def size(self, axis: str) -> int:
        """Return the number of devices along `axis`, or a part of one. Raises MeshError if there is no such axis."""
        return (self.axis_sizes if axis in self.axis_sizes else self.with_parts((axis,)).axis_sizes)[axis]

    def split(self, axis: str, inner: int) -> Mesh:
        """Return the mesh, its ranks numbered alike, with two axes for one: `axis//inner` has one device of each block
        of `inner` neighbours, `axis%inner` those of a block. Raises MeshError if there is no such axis, or `inner` does
        not divide its size."""
        size, i = self.size(axis), self.names.index(axis)
        if size % inner:
            raise MeshError(f"blocks of {inner} do not fill axis {axis}", mesh=self, fix=f"use a divisor of {size}")
        names, sizes = (f"{axis}//{inner}", f"{axis}%{inner}"), (size // inner, inner)
        return Mesh(self.names[:i] + names + self.names[i + 1 :], self.sizes[:i] + sizes + self.sizes[i + 1 :])

    def with_parts(self, axes: tuple[str, ...]) -> Mesh:
        """Return the mesh, split so that all these are axes of it. Raises MeshError if one is no part of an axis."""
        mesh = self
        for axis in axes:
            while axis not in mesh.names:
                found = [(name, m) for name in mesh.names if (m := re.match(re.escape(name) + PART, axis))]
                if not found:
                    names = ", ".join(self.names)
                    raise MeshError(f"the mesh has no axis {axis!r}", mesh=self, fix=f"use one of {names}")
                mesh = mesh.split(found[0][0], int(found[0][1][1]))
        return mesh

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the position of `rank` along every axis. Raises MeshError if there is no such rank."""
        if not 0 <= rank < self.devices:
            raise MeshError(f"there is no rank {rank} in a mesh of {self.devices} devices", mesh=self)
        position = {}
        for name, size in zip(reversed(self.names), reversed(self.sizes)):
            position[name] = rank % size
            rank //= size
        return {name: position[name] for name in self.names}

    def rank_at(self, position: Mapping[str, int]) -> int:
        """Return the rank at a position along some axes, the first one along the others."""
        rank = 0
        for name, size in zip(self.names, self.sizes):
            rank = rank * size + position.get(name, 0)
        return rank

    def group(self, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along `axes`, or parts of axes, in the order of `axes` (the
        first slowest)."""
        first = self.first_of_group(axes, rank)
        return tuple(first + offset for offset in self._offsets(axes))

    def first_of_group(self, axes: tuple[str, ...], rank: int) -> int:
        """Return the first rank of the group of `rank` along `axes`, or parts of axes, in the time that it takes to
        count the axes."""
        if not 0 <= rank < self.devices:
            raise MeshError(f"there is no rank {rank} in a mesh of {self.devices} devices", mesh=self)
        return rank - sum(rank // stride % size * stride for stride, size in self._strides(axes))

    def groups(self, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
        """Return all groups along `axes`, each in order of rank, in the order of their first ranks."""
        offsets = sorted(self._offsets(axes))
        firsts = (rank for rank in range(self.devices) if self.first_of_group(axes, rank) == rank)
        return [tuple(first + offset for offset in offsets) for first in firsts]

    def _strides(self, axes: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
        """Return for each of `axes`, or parts of axes, how far apart neighbours on it are, and its size."""
        if axes not in self._known_strides:
            mesh, stride, found = self.with_parts(axes), 1, {}
            for name, size in zip(reversed(mesh.names), reversed(mesh.sizes)):
                found[name], stride = (stride, size), stride * size
            self._known_strides[axes] = tuple(found[axis] for axis in axes)
        return self._known_strides[axes]

    def _offsets(self, axes: tuple[str, ...]) -> list[int]:
        """Return what a group's ranks are above its first one, in the order of `axes`."""
        steps = [range(0, stride * size, stride) for stride, size in self._strides(axes)]
        return [sum(step) for step in itertools.product(*steps)]

    @cached_property
    def _known_strides(self) -> dict[tuple[str, ...], tuple[tuple[int, int], ...]]:
        return {}

    def __str__(self) -> str:
        return ",".join(f"{n}={s}" for n, s in zip(self.names, self.sizes))


def joined(parts: Iterable[str]) -> tuple[str, ...]:
    """Return the axes that these make up, in the order of a mesh: `dp`, `tp` of `dp//4`, `dp%4` and `tp`."""
    axes: list[str] = []
    for part in parts:
        axes.append(part)
        while (m := re.fullmatch(r"(.+)%(\d+)", axes[-1])) and axes[-2:-1] == [f"{m[1]}//{m[2]}"]:
            axes[-2:] = [m[1]]
    return tuple(axes)


def whole_axis(part: str) -> str:
    """Return the axis of a mesh that this is, or a part of."""
    return re.split("//|%", part)[0]
