"""Tell the blocks of a model apart in the order in which ops run: where a copy may start that is there in time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

_BLOCK = re.compile(r"^(.*?\.?\d+)(?:\.|$)")


@lru_cache(100_000)
def block_of(module: str) -> str:
    """Return the block of a module, its name up to the first number: `"model.layers.3.mlp"` -> `"model.layers.3"`; ""
    outside of module lists."""
    match = _BLOCK.match(module)
    return match.group(1) if match else ""


def blocks_in_order(modules: Sequence[str], is_backward: bool) -> list[str]:
    """Return the block of each op of a phase, given their modules: the module itself outside of blocks. In the backward
    what is in no module, as are sums of gradients, belongs to the block whose backward it follows."""
    found: list[str] = []
    for module in modules:
        follows = is_backward and not module and found
        found.append(found[-1] if follows else block_of(module) or module)
    return found


def one_ahead(blocks: Sequence[object]) -> list[int]:
    """Return, by position, where the block begins that comes before that of the op; 0 for the first block."""
    result, before = [], 0
    for start, end in _ranges(blocks):
        result += [before] * (end - start)
        before = start
    return result


def one_behind(blocks: Sequence[object]) -> list[int]:
    """Return, by position, where the block ends that follows on that of the op: the position after its last op."""
    ranges = _ranges(blocks)
    result: list[int] = []
    for (start, end), (_, following) in zip(ranges, [*ranges[1:], (0, len(blocks))]):
        result += [following] * (end - start)
    return result


def _ranges(blocks: Sequence[object]) -> list[tuple[int, int]]:
    ranges, start = [], 0
    for _, group in groupby(blocks):
        end = start + len(list(group))
        ranges.append((start, end))
        start = end
    return ranges
