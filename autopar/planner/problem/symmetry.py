"""Repeated blocks: vertices that look the same for some steps around share one choice.

Weisfeiler-Lehman colours (Shervashidze et al., JMLR 12, 2011): a vertex starts with its own signature (op, shapes,
constants, phase; a parameter's name without digits) and takes in its neighbours' colours `radius` times. Couplings (a
gradient to its parameter) are edges too; without them a tied problem can be cheaper than any plan of the unfolded
graph. The number of classes does not grow with the number of blocks.
"""

from __future__ import annotations

from collections import defaultdict

from .vertices import Use, Vertex


def fold(vertices: list[Vertex], uses: list[Use], radius: int = 2) -> list[int]:
    """Return the class of every vertex, as any number equal for members of one class."""
    colours = _compress([v.signature for v in vertices])
    incoming: dict[int, list[tuple]] = defaultdict(list)
    outgoing: dict[int, list[tuple]] = defaultdict(list)
    for use in uses:
        incoming[use.consumer].append((use.slot, use.output, use.phase, use.producer))
        outgoing[use.producer].append((use.slot, use.output, use.phase, use.consumer))
    for _ in range(radius):
        colours = _compress(
            [
                (
                    colours[v.index],
                    tuple(sorted((*edge, colours[other]) for *edge, other in incoming[v.index])),
                    tuple(sorted((*edge, colours[other]) for *edge, other in outgoing[v.index])),
                )
                for v in vertices
            ]
        )
    return colours


def unfolded(vertices: list[Vertex], uses: list[Use]) -> list[int]:
    """Return a class of its own for every vertex."""
    return [v.index for v in vertices]


def _compress(keys: list) -> list[int]:
    """Return small numbers for keys, in order of first appearance, so that they do not depend on hashing."""
    numbers: dict = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
