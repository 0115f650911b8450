"""Random meshes, shapes and layouts for property tests, from a `random.Random` of a printed seed."""

from __future__ import annotations

from random import Random

from autopar.ir.layout import ZIGZAG, Layout, is_legal
from autopar.ir.mesh import Mesh


def random_mesh(random: Random, axes: int) -> Mesh:
    """`axes` axes of 2 to 4 devices, at most 24 in all."""
    while True:
        mesh = Mesh(("x", "y", "z")[:axes], tuple(random.choice((2, 2, 3, 4)) for _ in range(axes)))
        if mesh.devices <= 24:
            return mesh


def random_shape(random: Random, mesh: Mesh, ndim: int, even: bool) -> tuple[int, ...]:
    """Even: every cut leaves equal blocks, also inside 2 or 3 parts. Uneven: any size up to 13."""
    return tuple(6 * mesh.devices if even else random.randint(2, 13) for _ in range(ndim))


def random_layout(random: Random, shape: tuple[int, ...], mesh: Mesh, partial: tuple[str, ...] = (),
                  zigzag: bool = False) -> Layout:  # fmt: skip
    """A legal layout: each axis free, on a dim in any order, or partial, all with one of the `partial` reductions; with
    `zigzag` some dims are cut so."""
    while True:
        dims: list[list[str]] = [[] for _ in shape]
        reductions = []
        reduction = random.choice(partial) if partial else None
        for axis in random.sample(mesh.names, len(mesh.names)):
            choice = random.randint(-1, len(shape) - 1 + bool(reduction))
            if choice == len(shape):
                reductions.append((axis, reduction))
            elif choice >= 0:
                dims[choice].append(axis)
        parts = tuple(random.choice((1, 1, 1, 2, 3)) if len(axes) == 1 else 1 for axes in dims)
        parts = tuple(ZIGZAG if zigzag and random.random() < 0.3 else count for count in parts)
        layout = Layout(tuple(map(tuple, dims)), tuple(reductions), parts)
        if is_legal(shape, layout, mesh):
            return layout
