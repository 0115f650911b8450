"""Hot experts on one device: what autopar/passes/distribute/exchange_rows.py emits, with the rows of the experts that
have most of them left where they are.

    counts   = all_gather(expert_counts(group, E));  hot = hot_experts(counts, E, h)
    copies   = all_reduce(copies_of(weight, hot, first))
    y        = grouped_mm(x, cat([weight, copies]), slots_of(group, hot, ...))
    dw       = grouped_mm_dw(x, grad, slots, ...)
    gradient = added_to_owners(dw, all_reduce(dw[-h:]), hot, first)

The counts of rows by expert tell a device also how many rows come from each other one, and of which experts, so that
they take the place of the message that says it. Copies are made again in the backward, whose products read the
matrices transposed, so that none waits for it. Their gradients are summed in fp32 where they are narrower. He et al.,
"FasterMoE", PPoPP 2022, section 4.2 (shadowing), for which experts are chosen and sent from the host.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from ..._torch import c10d
from ...errors import VerifyError
from ...ir.graph import bytes_of, describe
from ...ir.mesh import Mesh
from ...ops import autopar
from ...plans.sharding import NodeSharding
from ...rules.expert_rows import PRODUCTS
from .emit import Builder, Collective
from .exchange_rows import RowExchange

aten = torch.ops.aten
SUMMED = torch.float32  # the narrowest type in which gradients of copies are added up


class HotExchange(RowExchange):
    """Adds exchanges without the rows of hot experts, and the products of those with copies of their matrices. `most`:
    how many experts of a layer are hot, if it has as many."""

    def __init__(self, builder: Builder, mesh: Mesh, coordinate: Mapping[str, int], rank: int, nodes, most: int):
        super().__init__(builder, mesh, coordinate, rank, nodes)
        self.most = most
        self.grouped: dict[fx.Node, tuple[fx.Node, int, tuple[str, ...]]] = {}  # of the groups of rows at their experts

    def __call__(self, node: fx.Node, sharding: NodeSharding, x: fx.Node, group: fx.Node, experts: int) -> fx.Node:
        """Return the local value of a dispatch or combine."""
        made = super().__call__(node, sharding, x, group, experts)
        axes = self.owned_axes(sharding.outputs[0])
        if x is group and axes:  # it is their groups that are sent
            is_sent = bool(set(axes) & set(sharding.inputs[1].sharding_axes))
            self.grouped[made] = self.hot(group, axes, experts, is_sent), experts, axes
        return made

    def hot(self, group: fx.Node, axes: tuple[str, ...], experts: int, is_sent: bool) -> fx.Node:
        """Return the hot experts of a grouping; a device has a block of its rows if they are sent, else all."""
        return self._counted(group, axes, experts, is_sent)[1]

    def _counted(self, group: fx.Node, axes: tuple[str, ...], experts: int, is_sent: bool) -> tuple[fx.Node, fx.Node]:
        """Return the rows of each expert, by device if they are sent, and the hot experts."""
        key = (group, axes, "hot", is_sent)
        if key not in self.routes:
            counts = self.helper(group, autopar.expert_counts.default, group, experts)
            if is_sent:
                ways, moved = math.prod(map(self.mesh.size, axes)), bytes_of(counts.meta["val"])
                gather = c10d.all_gather_into_tensor.default
                started = self.helper(group, gather, counts, ways, ",".join(axes))
                self._mark(started, "all_gather", (ways - 1) * moved, ways * moved, axes, f"{group.name}_counts")
                counts = self.helper(group, c10d.wait_tensor.default, started)
            self.routes[key] = counts, self.helper(group, autopar.hot_experts.default, counts, experts, self.most)
        counts, hot = self.routes[key]
        return counts, hot

    def staying(self, group: fx.Node, axes: tuple[str, ...], experts: int) -> tuple[fx.Node, int]:
        """Return the experts whose rows stay where they are, and the device itself among those of a group."""
        return self.hot(group, axes, experts, True), self.place(axes)

    def hot_of_all(self, group: fx.Node, axes: tuple[str, ...], experts: int) -> tuple[fx.Node, ...]:
        """Return the experts whose rows stay where they are, of rows that all devices have."""
        return (self.hot(group, axes, experts, False),)

    def route(self, node: fx.Node, group: fx.Node, axes: tuple[str, ...], experts: int) -> tuple[fx.Node, ...]:
        """Return the order of rows by where they go and by expert, its inverse, and the counts of rows that are sent
        and received."""
        key = (group, axes, "sent")
        if key not in self.routes:
            firsts, home = self.firsts(axes, experts), self.place(axes)
            counts, hot = self._counted(group, axes, experts, True)
            order, inverse = self._ordered(group, experts, firsts, hot, home)
            found = self.helper(group, autopar.counts_beside_hot.default, counts, hot, firsts, home)
            sent, received, told = (self.helper(group, operator.getitem, found, i) for i in range(3))
            rows = self.helper(group, autopar.counts_on_host.default, sent, received)
            self.routes[key] = order, inverse, rows
            self.told[group, axes] = told, rows, -1
        return self.routes[key]

    def token_counts(self, group: fx.Node, axes: tuple[str, ...], sent: fx.Node, place: fx.Node) -> fx.Node:
        """Return the counts of tokens that are sent and received: which go where is known after what is told."""
        _, _, rows = self.routes[group, axes, "sent"]
        return self.helper(group, autopar.token_counts.default, sent, place, rows)

    def has_copies(self, node: fx.Node, sharding: NodeSharding) -> bool:
        """Return whether an op is a product of rows that are where their experts are."""
        return node.target in PRODUCTS and bool(self.owned_axes(sharding.inputs[0]))

    def product(self, node: fx.Node, sharding: NodeSharding, args: Sequence) -> list[fx.Node]:
        """Return the local value of such a product, or of a gradient of matrices. `args`: its arguments, local, the
        first of a device's experts last."""
        if args[2] not in self.grouped:
            raise VerifyError(
                f"{node.name} has rows at their experts, and nobody knows which of them are hot",
                node=describe(node),
                source=node.meta.get("source"),
                mesh=self.mesh,
                fix="give hot_experts=0",
            )
        hot, experts, axes = self.grouped[args[2]]
        if node.target is autopar.grouped_mm.default:
            first = args[3]
            slots = self._slots(args[2], hot, experts, first, args[1].meta["val"].shape[0])
            share = self._add(node, "share", autopar.copies_of.default, args[1], hot, first)
            copies = self._summed(node, share, axes)
            weight = self._add(node, "and_copies", aten.cat.default, [args[1], copies])
            return [self.builder.call(node.target, args[0], weight, slots, first, name=node.name)]
        own, first = args[3:5]
        slots = self._slots(args[2], hot, experts, first, own)
        every = own + len(hot.meta["val"])
        dw = self._add(node, "with_copies", node.target, args[0], args[1], slots, every, first)
        copies = self._add(node, "of_copies", aten.slice.Tensor, dw, 0, own, every)
        if copies.meta["val"].dtype.itemsize < SUMMED.itemsize:
            copies = self._add(node, "of_copies_wide", aten._to_copy.default, copies, dtype=SUMMED)
        copies = self._summed(node, copies, axes)
        return [self.builder.call(autopar.added_to_owners.default, dw, copies, hot, first, name=node.name)]

    def _slots(self, group: fx.Node, hot: fx.Node, experts: int, first: int, own: int) -> fx.Node:
        key = (group, "slots", first, own)
        if key not in self.routes:
            self.routes[key] = (self.helper(group, autopar.slots_of.default, group, hot, experts, first, own),)
        return self.routes[key][0]

    def _summed(self, node: fx.Node, share: fx.Node, axes: tuple[str, ...]) -> fx.Node:
        """Return a sum over devices."""
        moved, ways = bytes_of(share.meta["val"]), math.prod(map(self.mesh.size, axes))
        started = self._add(node, "copies_start", c10d.all_reduce.default, share, "sum", ",".join(axes))
        self._mark(started, "all_reduce", 2 * moved * (ways - 1) / ways, moved, axes, f"{node.name}_copies")
        return self._add(node, "copies", c10d.wait_tensor.default, started)

    def _add(self, node: fx.Node, what: str, target, *args, **kwargs) -> fx.Node:
        """Add an op beside a product, without its layout."""
        made = self.builder.call(target, *args, name=f"{node.name}_{what}", **kwargs)
        made.meta["part_of"] = node.name
        return made

    def _mark(self, started: fx.Node, kind: str, wire: float, tensor_bytes: float, axes, tensor: str) -> None:
        phase = started.meta.get("phase", "forward")
        started.meta["collective"] = Collective(kind, axes, wire, tensor, phase)
        started.meta["tensor_bytes"] = tensor_bytes
