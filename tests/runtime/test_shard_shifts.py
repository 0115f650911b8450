"""Shards of sizes of one remainder are on lines with the shifts that are said, and a program's points tell them."""

from __future__ import annotations

import itertools
import random

from autopar.codegen.follow_size import SHIFTS, Differs, Line, is_sure, line_through
from autopar.ir.layout import Layout, is_legal, local_offset, local_shape
from autopar.ir.mesh import Mesh
from autopar.runtime.shard_shifts import least_of, shifts_of


def test_of_blocks():
    assert shifts_of(8, []) == {*SHIFTS} and least_of(8, []) == 0
    assert {1, -1} <= shifts_of(7, [2]) and {1, -3, 2} <= shifts_of(11, [4])
    assert {1, -1} <= shifts_of(7, [], 2)


def test_shards_are_found_again_among_two_sizes():
    """Lengths and offsets of every device, times another size or alone, at sizes that no program was made of."""
    seed = random.randrange(10**6)
    print("seed", seed)
    draw, told = random.Random(seed), 0
    for _ in range(60):
        ways = draw.choice([[2], [3], [4], [2, 2]])
        mesh = Mesh(tuple("ab"[: len(ways)]), tuple(ways))
        layout, period = Layout((mesh.names,)), mesh.devices
        size, other = draw.randint(2, 4 * period), draw.randint(2, 12)
        shifts = [shifts_of(size, ways), shifts_of(other, [])]
        least = least_of(size, ways)
        points = [(size + period * draw.randint(0, 30), other + draw.randint(0, 20)) for _ in range(3)]
        a, b, at = points
        legal = all(is_legal((n,), layout, mesh) for n, _ in points)
        if not legal or min(a[0], b[0]) < least or not is_sure((a, b), shifts):
            continue
        for rank, times in itertools.product(range(mesh.devices), (False, True)):
            place = mesh.coordinate(rank)
            for number in (
                lambda p: local_shape((p[0],), layout, mesh, place)[0],  # noqa: B023
                lambda p: local_offset((p[0],), layout, mesh, place, 0),  # noqa: B023
            ):
                found = {p: number(p) * (p[1] if times else 1) for p in points}
                try:
                    line = line_through({p: found[p] for p in (a, b)})
                except Differs:  # several lines are through the two
                    continue
                told += 1
                assert (line.at(at) if isinstance(line, Line) else line) == found[at], (ways, points, rank)
    assert told > 30
