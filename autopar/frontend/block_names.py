"""The numbers and names of blocks: how the modules of a list make up blocks that follow each other.

    0 .. first-1  |  first .. first+period-1  |  ...  |  the rest         modules of the list
       block 0    |          block 1          |  ...  |  block count-1

The blocks between the first and the last are equal. A model whose first layers differ has them in block 0; where
layers of several kinds alternate, one period of them is a block.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class BlockNames:
    """The division of the list with this qualified name into `count` blocks."""

    list_name: str
    count: int
    first: int = 1
    period: int = 1

    def with_count(self, count: int) -> BlockNames:
        """Return the same division of a list with fewer or more of the equal blocks."""
        return replace(self, count=count)

    def number_of_module(self, module: int) -> int:
        """Return the number of the block that a module of the list belongs to."""
        return max(0, min(1 + (module - self.first) // self.period, self.count - 1))

    def number(self, name: str) -> int | None:
        """Return the number of the block that a qualified name lies in, None if it lies in none."""
        match = self._pattern.match(name)
        return self.number_of_module(int(match.group(1))) if match else None

    def renamed(self, name: str, block: int) -> str:
        """Return the name, which lies in a block, of the same in the block with another number; a block that is the
        last one is that of a list of another length."""
        match, number = self._pattern.match(name), self.number(name)
        assert match is not None and number is not None
        module = int(match.group(1)) + (block - number) * self.period
        return f"{self.list_name}.{module}{name[match.end() :]}"

    @cached_property
    def _pattern(self) -> re.Pattern:
        return re.compile(rf"{re.escape(self.list_name)}\.(\d+)(?=\.|$)")


def by_block(names: BlockNames, values: Mapping[str, T]) -> list[dict[str, T]]:
    """Return named values of every block, by what their names would be in block 1; those of no block are left out."""
    found: list[dict[str, T]] = [{} for _ in range(names.count)]
    for name, value in values.items():
        if (number := names.number(name)) is not None:
            found[number][names.renamed(name, 1)] = value
    return found
