"""Count the rows that a device gets of each mixture of experts, in a forward.

How many rows an exchange of run-time sizes brings is on the host anyway, and where a device picks rows out of all they
are as many as it picks: counting waits for no device and sends nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, fx

from .._torch import op_handle
from ..ops import autopar

SENT, TOLD, PICKED = autopar.counts_on_host.default, autopar.told_on_host.default, autopar.own_rows.default
SENT_IN_ROUNDS, PICKED_BY_BLOCK = autopar.counts_in_rounds.default, autopar.own_rows_by_block.default
COUNTING = SENT, TOLD, PICKED, SENT_IN_ROUNDS, PICKED_BY_BLOCK
AT: Mapping[object, int] = {TOLD: 0, PICKED_BY_BLOCK: 1}  # which of the results is a count
LATEST = 64  # forwards whose rows are remembered


def layers_of(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return the nodes of a local graph that count rows, in order, with the layer that each does it for."""
    return {node: node.meta.get("module") or "model" for node in graph.nodes if node.target in COUNTING}


def rows_in(counts: Tensor) -> int:
    """Return the rows of a device of what a node says on the host, by device: first what is sent, then what comes."""
    return int(counts[1].sum())


def by_layer(layers: Iterable[str], rows: Iterable[list[int]]) -> dict[str, list[int]]:
    """Return by layer the rows of each forward, given those of the nodes that count. A layer that groups its rows
    several times, as where products are cut over different axes, is counted by its first grouping."""
    found: dict[str, list[int]] = {}
    for layer, counts in zip(layers, rows):
        found.setdefault(layer, counts)
    return found


class RowCounter:
    """Counts the rows of one forward graph as it runs: `begin` it, then its ops are `functions` in place of torch's."""

    def __init__(self, graph: fx.Graph):
        self.layers = [*layers_of(graph).values()]
        self.results: list[deque[Tensor | int]] = [deque(maxlen=LATEST) for _ in self.layers]
        self.next = 0

    def begin(self) -> None:
        """Begin a forward, also where the one before it did not end."""
        self.next = 0

    def functions(self) -> Mapping[object, Callable]:
        """Return what is called in the place of the ops that count."""
        return {op: partial(self._count, op_handle(op), op) for op in COUNTING}

    def _count(self, function: Callable, op: object, *arguments) -> Any:
        result = function(*arguments)
        rows = len(result) if op is PICKED else result
        self.results[self.next].append(result[AT[op]] if op in AT else rows)
        self.next += 1
        return result

    def rows(self) -> dict[str, list[int]]:
        """Return by layer the rows of each of the latest forwards."""
        counts = ([x if isinstance(x, int) else rows_in(x) for x in results] for results in self.results)
        return by_layer(self.layers, counts)
