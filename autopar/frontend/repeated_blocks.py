"""A deep model's joint graph with few of its equal blocks, which is what the planner works on: its time does not grow
with depth.

Of eight blocks two stand for many. Numbered from 0, with `first` copies of block 2 and `last` of block 5:

    0  1  2 x first  3  4  5 x last  6  7        first + last = count - 6

Blocks 1 to 3 decide alike, and so do 4 to 6; where both decide alike the split is of no consequence, and where they do
not, the border between 3 and 4 is counted once. Costs are counted by copies, so they are those of the whole graph.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from torch import fx

from .block_names import BlockNames

BLOCKS = 8
FIRST, LAST = 2, 5  # blocks that stand for many


@dataclass(frozen=True)
class Compact:
    """The blocks of a list, which have these `names`, in eight. `origins`: by node of the small graph, its origin and
    the number of its block (0 or 7 for what lies before or after the blocks). `whole`: the node of the whole graph by
    origin and number of its block there."""

    graph_module: fx.GraphModule
    names: BlockNames
    origins: Mapping[fx.Node, tuple[Hashable, int]] = field(repr=False)
    whole: Mapping[tuple[Hashable, int], fx.Node] = field(repr=False)

    @property
    def graph(self) -> fx.Graph:
        """Return the joint graph of few blocks."""
        return self.graph_module.graph

    @property
    def small_names(self) -> BlockNames:
        """Return the names of the eight blocks."""
        return self.names.with_count(BLOCKS)

    @property
    def most(self) -> int:
        """Return how many blocks of the whole model blocks 2 and 5 stand for together."""
        return self.names.count - BLOCKS + 2

    def block(self, node: fx.Node) -> int:
        """Return the number of a node's block in the small graph."""
        return self.origins[node][1]

    def is_inner(self, block: int) -> bool:
        """Return whether a block of the small graph lies between the first and the last, which have all that is before
        and after the blocks."""
        return 0 < block < BLOCKS - 1

    def stands_for(self, block: int, first: int) -> range:
        """Return the numbers in the whole model of the blocks that a block of the small graph stands for; block 2
        stands for `first`."""
        if block == FIRST:
            return range(FIRST, FIRST + first)
        if block == LAST:
            return range(FIRST + first + 2, self.names.count - 2)
        number = (
            block
            if block < FIRST
            else block - FIRST - 1 + FIRST + first
            if block < LAST
            else block - BLOCKS + self.names.count
        )
        return range(number, number + 1)

    def nodes(self, node: fx.Node, first: int) -> list[fx.Node]:
        """Return the nodes of the whole graph that a node of the small one stands for."""
        origin, block = self.origins[node]
        return [self.whole[origin, number] for number in self.stands_for(block, first)]

    def modules(self, module: str, first: int) -> list[str]:
        """Return the modules of the whole model that one of the small graph stands for."""
        block = self.small_names.number(module)
        if block is None:
            return [module]
        return [self.small_names.renamed(module, number) for number in self.stands_for(block, first)]
