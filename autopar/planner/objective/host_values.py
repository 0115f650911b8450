"""Values of blocks that wait on the host for the backward, of an evaluated plan: which may, what that costs and frees.

A value that an op of a block makes and that the backward reads may be copied to the host behind the op and brought back
before it is read (passes/distribute/save_on_host.py). The link to the host is a stream of its own, which goes one way
in the forward and the other in the backward. A device holds the value while it is copied; beside that the bytes are the
host's. The values of the last block stay where they are: they are read again at once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...ops import ATTENTION
from ...rules.expert_rows import WAYS
from ..problem.problem import Problem
from ..problem.vertices import Vertex

if TYPE_CHECKING:
    from ...ir.layout import Layout
    from .checkpoint_blocks import Blocks
    from .evaluate import Evaluation

ROWS = 2  # the dim of queries in what attention gives
LITTLE = 1 / 64  # of the largest value, below which a value stays on the device


@dataclass(frozen=True)
class HostValue:
    """A value of a block: `key` is that of Evaluation.saved. In the first `count` of its block's `copies` in the whole
    graph it waits on the host; `bytes_` of one copy, and the `seconds` that the link takes for it, one way. `reader`:
    the block that counts instead of its own, if it is saved for that one to compute again from."""

    key: tuple[int, int, Layout]
    bytes_: float
    seconds: float
    count: int = 1
    copies: int = 1
    reader: str = ""


def saved_on_host(e: Evaluation, values: Sequence[HostValue]) -> Evaluation:
    """Return a plan that has nothing on the host yet with these values there."""
    saved = dict(e.saved)
    for value in values:
        saved[value.key] -= value.bytes_ * value.count
    return replace(e, saved={key: bytes_ for key, bytes_ in saved.items() if bytes_ > 0.5}, on_host=tuple(values))


def saved_on_device(e: Evaluation) -> Evaluation:
    """Return the plan with the values that wait on the host back on the device."""
    saved = dict(e.saved)
    for value in e.on_host:
        saved[value.key] = saved.get(value.key, 0.0) + value.bytes_ * value.count
    return replace(e, saved=saved, on_host=())


def may_wait_on_host(blocks: Blocks, e: Evaluation, link_bytes_per_second: float) -> list[HostValue]:
    """Return the values that may wait on the host in an evaluated plan, each in all copies of its block: the largest
    ones first, of one size the same value of all blocks before another."""
    problem, copies = blocks.problem, blocks.problem.copies(e.first)
    last = next((blocks.block[v.index] for v in reversed(problem.vertices) if blocks.block[v.index]), "")
    readers = _readers(e)
    found = []
    for key, saved in e.saved.items():
        v, block = problem.vertices[key[0]], blocks.block[key[0]]
        bytes_ = blocks.pricer.saved_bytes(*key)
        if not block or not _may_be_copied(problem, e, v, key[1], key[2]):
            continue
        value = HostValue(key, bytes_, bytes_ / link_bytes_per_second)
        if abs(saved - bytes_ * copies[v.index]) < 0.5:  # else some copies compute it again
            if count := copies[v.index] - (block == last):
                found.append(replace(value, count=count, copies=copies[v.index]))
        elif len(readers[key]) == 1:
            ((reader, count),) = readers[key].items()
            if abs(saved - bytes_ * count) < 0.5:
                found.append(replace(value, count=count, copies=count, reader=reader))
    least = LITTLE * max((value.bytes_ for value in found), default=0.0)
    first: dict[tuple[int, int], int] = {}  # by class and output
    for value in sorted(found, key=lambda value: value.key[:2]):
        first.setdefault((problem.vertices[value.key[0]].cls, value.key[1]), value.key[0])

    def place(value: HostValue) -> tuple:
        v, output, _ = value.key
        return -value.bytes_, first[problem.vertices[v].cls, output], output, v

    return sorted((value for value in found if value.bytes_ > least), key=place)


def _readers(e: Evaluation) -> dict[tuple, dict[str, int]]:
    """Return, by key, in how many copies of which blocks a value is saved because they compute again from it."""
    found: dict[tuple, dict[str, int]] = defaultdict(dict)
    for block, levels in e.recomputed.items():
        for step, count in levels.values():
            for key, _ in step.needed:
                found[key][block] = max(count, found[key].get(block, 0))
    return found


def _may_be_copied(problem: Problem, e: Evaluation, v: Vertex, output: int, layout: Layout) -> bool:
    """Return whether a value is an op's own, as one call makes it, and no integers."""
    strategy = problem.choices(v.index).strategies[e.choice[v.index]]
    cuts_sequence = v.node.target in ATTENTION and bool(strategy.outputs[0].dims[ROWS])  # then it is several calls
    in_region = any(v.node in region.forward for region in problem.tiled_rows)
    return (
        v.node.target not in WAYS
        and layout == strategy.outputs[output]
        and not layout.partial
        and not layout.owned_axes
        and v.values[output].is_floating_point()
        and not cuts_sequence
        and not in_region
        and (v.index, output) not in problem.never_made
    )


def taken(values: Sequence[HostValue], bytes_: float, room: float = math.inf) -> list[HostValue]:
    """Return the first of these values that together are so many bytes, the last one in as few copies as that takes;
    fewer bytes if there are not so many, or no more `room`."""
    found = []
    for value in values:
        if bytes_ <= 0:
            break
        count = int(min(value.count, -(-bytes_ // value.bytes_), room // value.bytes_))
        if count:
            found.append(replace(value, count=count))
            bytes_ -= count * value.bytes_
            room -= count * value.bytes_
    return found


def written_out(values: Sequence[HostValue], match: Callable[[int, str, int], int]) -> Iterator[HostValue]:
    """Iterate over the values of every block of the whole graph. `match`: gives the vertex that a copy of a block has,
    or reads, in place of one of the compact graph."""
    for value in values:
        v, output, layout = value.key
        for copy in range(value.count):
            yield HostValue((match(v, value.reader, copy), output, layout), value.bytes_, value.seconds)
