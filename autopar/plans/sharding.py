"""Hold what the planner tells the lowering: a layout for every tensor of the joint graph, not how it was found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ..cost.hierarchy import Hierarchy
from ..cost.redistribute import Redistributor
from ..hardware.profile import Link
from ..ir.layout import Layout
from ..ir.mesh import Mesh


@dataclass(frozen=True)
class NodeSharding:
    """The decision for one op. A `Strategy` of autopar.rules has the same three fields and serves as well.

    inputs: one layout a tensor argument, in the order of `graph.tensor_arguments`.
    outputs: one a tensor output, in the order of `graph.values_of`.
    choice: per mesh axis the factor that it shards, for printing.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    choice: tuple[str, ...] = ()


@dataclass(frozen=True)
class Loop:
    """A collective that goes round beside the products that it feeds or sums up (passes/distribute/loop.py).

    kind: "all_gather", of what the products multiply, or "reduce_scatter", of what they give or of its sum.
    tensor, layout, phase: name of the node that is redistributed, to which layout, and in which phase.
    products: names of the op nodes.
    """

    kind: str
    tensor: str
    layout: Layout
    phase: str
    products: tuple[str, ...]


@dataclass(frozen=True)
class BesideExchange:
    """An exchange of experts' rows and the products that are computed while they travel
    (passes/distribute/beside_exchange.py): names of op nodes."""

    exchange: str
    products: tuple[str, ...]


@dataclass(frozen=True)
class Sharding:
    """All decisions for one joint graph.

    nodes: by name of an op node; an op that is not named here is replicated.
    leaves: by name of a placeholder or get_attr node, the layout in which its local value arrives; else replicated.
    outputs: per output of the graph, None where there is no tensor.
    kept: copies that the forward makes and the backward reuses, as (producer node, output index, layout). A backward
        op that wants another layout of a forward tensor and finds it not kept redistributes again from the producer's
        own layout: this is how ZeRO-3 gathers a parameter a second time. So does an op that is computed again.
    recomputed: names of the op nodes that the backward computes again instead of reading what they gave.
    on_host: placeholders whose local value arrives in the host's memory; what is their gradient leaves to there.
    hierarchy: collectives that go one tier of links after the other.
    loops: collectives that go round beside products.
    exchanges: exchanges of experts' rows that have products beside them.
    """

    mesh: Mesh
    links: Mapping[str, Link]
    memory_bytes_per_second: float
    nodes: Mapping[str, NodeSharding]
    leaves: Mapping[str, Layout]
    outputs: tuple[Layout | None, ...]
    kept: frozenset[tuple[str, int, Layout]] = field(default_factory=frozenset)
    recomputed: frozenset[str] = field(default_factory=frozenset)
    on_host: frozenset[str] = field(default_factory=frozenset)
    hierarchy: Hierarchy = field(default_factory=dict)
    loops: tuple[Loop, ...] = ()
    exchanges: tuple[BesideExchange, ...] = ()

    @cached_property
    def redistributor(self) -> Redistributor:
        """Return what finds the moves between layouts; the planner prices with the same links, so both see the same
        moves."""
        return Redistributor(self.mesh, dict(self.links), self.memory_bytes_per_second)
