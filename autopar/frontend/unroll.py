"""Deep models traced fast, for planning: five of the equal blocks are traced, and the graph is unrolled to all of them.

    blocks = repeated_blocks_of(model)  # block_lists.py
    with blocks.shortened():
        captured = ...            # the joint graph of a model with blocks 0, 1, 2 and the last two
    whole = unroll(captured, blocks, ties)

The blocks of the short graph are zones: 0 is everything up to the first block's end, 4 all from the last block's start,
1 to 3 the ones between. Zones 1 to 3 must be the same but for a shift, forward and backward; copies of zone 2 then
stand for the blocks that were not traced. The result is node for node the graph of the whole model, so a plan of the
one fits the other. What does not look like this (blocks that differ, or that read more than their neighbours) is left
to a full trace.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping
from dataclasses import replace

from torch import fx

from .._torch import graph_module
from ..errors import CaptureError
from ..ir.graph import OutputRole, leaf_name, mark_phases, op_base_name, outputs_of, values_of
from ..ops.streams import STREAM, stream_of
from .block_lists import TRACED, RepeatedBlocks
from .block_names import BlockNames
from .export import Captured
from .repeated_blocks import BLOCKS, Compact

HEAD, TEMPLATE, TAIL = 0, 2, 4
Output = tuple[fx.Node, OutputRole]


def unroll(captured: Captured, blocks: RepeatedBlocks, ties: dict[str, str]) -> Captured:
    """Return the joint graph of the whole model, made from that of the shortened one. `ties` are those of the whole
    model.

    Raises CaptureError if the blocks are not alike but for a shift."""
    names = blocks.names
    zones = _Zones.of(captured.graph, names.with_count(TRACED))
    steps = zones.output_steps(captured.graph, names.count) if zones else None
    if zones is None or steps is None or captured.gathers or not zones.are_shifted():
        raise CaptureError(f"the blocks of {names.list_name} are not alike", fix="trace all of them")
    whole, few = (_Unrolled(captured.graph, zones, steps, more) for more in (names.count - TRACED, BLOCKS - TRACED))
    modules = [graph_module(captured.graph_module, unrolled.build()) for unrolled in (whole, few)]
    for module in modules:
        mark_phases(module.graph)
        module.graph.lint()
    compact = Compact(modules[1], names, {node: key for key, node in few.made.items()}, whole.made)
    return replace(captured, graph_module=modules[0], ties=ties, compact=compact)


class _Zones:
    """The nodes of a short graph by zone. `location[node]`: (zone, position) of the nodes of zones 1 to 3."""

    def __init__(
        self, names: BlockNames, members: dict[int, list[fx.Node]], tail: set[fx.Node], backward: set[fx.Node]
    ):
        self.names, self.members, self.tail, self.backward = names, members, tail, backward
        self.location = {node: (z, i) for z, nodes in members.items() for i, node in enumerate(nodes)}
        self.streams = 0  # random streams of a block: what numbers of one block and of the next differ by

    def zone(self, node: fx.Node) -> int:
        """Return the zone of a node; HEAD has all that is in no other."""
        return self.location[node][0] if node in self.location else TAIL if node in self.tail else HEAD

    @staticmethod
    def of(graph: fx.Graph, names: BlockNames) -> _Zones | None:
        """Find the zones of a short joint graph, None if its blocks are not all found in their order."""
        number = names.number
        nodes = list(graph.nodes)
        leaves = {n: number(n.meta["role"].name) for n in nodes if n.op in ("placeholder", "get_attr")}
        operations = [n for n in nodes if n.op == "call_function"]
        of_tangents = {n for n in leaves if n.meta["role"].kind == "tangent"}
        start = next((i for i, n in enumerate(operations) if of_tangents & set(n.all_input_nodes)), None)
        if start is None:
            return None
        forward, backward = operations[:start], operations[start:]
        block = {n: number(n.meta.get("module", "")) for n in forward} | leaves
        first = [next((i for i, n in enumerate(forward) if block[n] == z), None) for z in range(TRACED)]
        reads = [{block.get(a) for a in n.all_input_nodes} | {number(n.meta.get("module", ""))} for n in backward]
        last = [next((i for i, read in enumerate(reads) if z in read), None) for z in range(TRACED)]
        if None in first or None in last[1:]:
            return None
        last[0] = 2 * last[1] - last[2]  # what all blocks read in common may be made in the first
        if first != sorted(first) or last != sorted(last, reverse=True) or last[0] > len(backward):
            return None
        members = {
            z: [n for n in leaves if leaves[n] == z]
            + forward[first[z] : first[z + 1]]
            + backward[last[z] : last[z - 1]]
            for z in (1, 2, 3)
        }
        tail = {n for n in leaves if leaves[n] == TAIL} | {*forward[first[TAIL] :], *backward[: last[3]]}
        shared = _shared_by_zones(backward, of_tangents, members)
        members[3] = [n for n in members[3] if n not in shared]
        tail |= shared
        return _Zones(names, members, tail, set(backward))

    def are_shifted(self) -> bool:
        """Return whether zones 1, 2 and 3 are the same but for a shift, and read only themselves, their neighbours and
        what all read."""
        if len({len(nodes) for nodes in self.members.values()}) != 1:
            return False
        likes = list(zip(*(self.members[z] for z in (1, 2, 3))))
        self.streams = next((stream_of(b) - stream_of(a) for a, b, _ in likes if stream_of(a) is not None), 0)
        return all(self._agree(*nodes) for nodes in likes) and self._edges_read_neighbours()

    def _agree(self, one: fx.Node, two: fx.Node, three: fx.Node) -> bool:
        """Return whether a node of the template has its like on both sides."""
        if (
            two.op == "get_attr"
            or len({(n.op, n.target if n.op == "call_function" else "") for n in (one, two, three)}) > 1
        ):
            return False
        if len({str([(tuple(v.shape), v.dtype, v.stride()) for v in values_of(n)]) for n in (one, two, three)}) > 1:
            return False
        if len({self._constants(node) for node in (one, two, three)}) > 1:
            return False
        return all(
            self._shifted(before, here, 1) and self._shifted(here, after, 2)
            for before, here, after in zip(_arguments(one), _arguments(two), _arguments(three), strict=True)
        )

    def _constants(self, node: fx.Node) -> str:
        return constants_of(node, self.location[node][0] * self.streams)

    def _shifted(self, left: fx.Node, right: fx.Node, zone: int) -> bool:
        """Return whether what a node of `zone` reads and what its like in the next zone reads are the same or a shift
        apart."""
        a, b = self.location.get(left), self.location.get(right)
        if a and b:
            return b == (a[0] + 1, a[1])
        if a:  # the next zone's neighbour is the tail
            return a[0] == 3 and zone == 2 and right in self.tail
        if b:  # this zone's neighbour is the head
            return b[0] == 1 and zone == 1 and left not in self.tail
        return left is right

    def _edges_read_neighbours(self) -> bool:
        """Return whether head and tail read the zone next to them alone; the output may read all."""
        for node in {user for n in self.location for user in n.users} - self.location.keys():
            near = 3 if node in self.tail else 1
            if node.op != "output" and any(
                self.location[a][0] != near for a in node.all_input_nodes if a in self.location
            ):
                return False
        return True

    def output_steps(self, graph: fx.Graph, count: int) -> dict[fx.Node, int] | None:
        """Return how far apart the outputs of one of `count` blocks and of the next are, by value of zone 2; None if
        zones have not the same outputs, as far apart as the blocks that they are."""
        made = [(v, int(role.name)) for v, role in outputs_of(graph) if role.kind == "output" and v in self.location]
        numbers = {self.location[value]: number for value, number in made}
        steps = {}
        for at in {at for _, at in numbers}:
            one, two, three = (numbers.get((zone, at)) for zone in (1, TEMPLATE, 3))
            if one is None or two is None or three is None or three - two != (two - one) * (count - TAIL):
                return None
            steps[self.members[TEMPLATE][at]] = two - one
        return steps if len(numbers) == len(made) else None


def _shared_by_zones(
    backward: list[fx.Node], tangents: set[fx.Node], members: dict[int, list[fx.Node]]
) -> set[fx.Node]:
    """Return what the backward makes of tangents alone where it begins with zone 3, and the zones after it read too: a
    loss to which every block adds has the same gradient for all of them."""
    later, of_tangents = {*members[1], *members[2]}, set(tangents)
    for node in backward:
        if node.all_input_nodes and of_tangents.issuperset(node.all_input_nodes):
            of_tangents.add(node)
    shared = {n for n in members[3] if n in of_tangents and not later.isdisjoint(n.users)}
    for node in reversed(backward):  # and what that is made of
        if node in of_tangents and node in members[3] and not shared.isdisjoint(node.users):
            shared.add(node)
    return shared


def constants_of(node: fx.Node, streams: int) -> str:
    """Return the arguments that are no nodes as text, with a random stream as it would be so many streams before."""
    args = list(node.args)
    if stream_of(node) is not None:
        args[STREAM[node.target]] -= streams
    return str(fx.node.map_arg((args, dict(node.kwargs)), lambda a: "node"))


def _arguments(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return found


class _Unrolled:
    """A graph with `more` copies of zone 2. Blocks of it: 1 and 2, the copies, and zone 3 as the last. `steps`: see
    `_Zones.output_steps`."""

    def __init__(self, short: fx.Graph, zones: _Zones, steps: Mapping[fx.Node, int], more: int):
        self.short, self.zones, self.steps, self.more = short, zones, steps, more
        self.graph = fx.Graph()
        self.made: dict[tuple[Hashable, int], fx.Node] = {}

    def build(self) -> fx.Graph:
        """Build the unrolled graph: copies of zone 2 in order in the forward, in reverse in the backward."""
        # a list: torch's iterator over a graph's nodes starts anew when another node is made meanwhile
        for is_template, run in itertools.groupby(list(self.short.nodes), lambda n: self.zones.zone(n) == TEMPLATE):
            nodes = list(run)
            if not is_template:
                for node in nodes:
                    if node.op == "output":
                        self._output(node)
                    else:
                        self._emit(node, self._block(self.zones.zone(node)))
                continue
            for in_backward, part in itertools.groupby(nodes, lambda n: n in self.zones.backward):
                part = list(part)
                blocks = range(TEMPLATE, TEMPLATE + self.more + 1)
                for block in reversed(blocks) if in_backward else blocks:
                    for node in part:
                        self._emit(node, block)
        return self.graph

    def _block(self, zone: int) -> int:
        """Return the number of the block that stands where the zone does; the tail's is the last."""
        return zone + self.more if zone > TEMPLATE else zone

    def _zone(self, block: int) -> int:
        """Return the zone that the block is a copy of."""
        return max(min(block, TEMPLATE), block - self.more)

    def _read(self, argument: fx.Node, zone: int, block: int) -> fx.Node:
        """Return what a node of `zone`, emitted for `block`, reads in place of `argument`."""
        if argument not in self.zones.location:
            return self.made[argument, self._block(self.zones.zone(argument))]
        near, position = self.zones.location[argument]
        there = block + near - zone
        return self.made[self.zones.members[self._zone(there)][position], there]

    def _emit(self, node: fx.Node, block: int) -> None:
        zone = self.zones.zone(node)
        meta = dict(node.meta)
        if "role" in meta:
            meta["role"] = replace(meta["role"], name=self._renamed(meta["role"].name, zone, block))
        meta["module"] = self._renamed(meta.get("module", ""), zone, block)
        if node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda a: self._read(a, zone, block))
            new = self.graph.create_node(node.op, node.target, args, kwargs, name=op_base_name(node))
            if stream_of(node) is not None:
                new.update_arg(STREAM[node.target], stream_of(node) + (block - zone) * self.zones.streams)
        else:
            name = leaf_name(meta["role"]) if node.op == "placeholder" else node.name
            new = self.graph.create_node(node.op, name if node.op == "placeholder" else node.target, name=name)
        new.meta = meta
        self.made[node, block] = new

    def _output(self, node: fx.Node) -> None:
        values, roles = [], []
        entries = zip(node.args[0], node.meta["roles"])
        for zone, group in itertools.groupby(entries, lambda entry: self.zones.names.number(entry[1].name)):
            run, blocks = list(group), range(TEMPLATE, TEMPLATE + self.more + 1)
            if zone is None:
                for value, role in self._of_no_name(run, blocks):
                    values.append(value)
                    roles.append(role)
                continue
            for block in blocks if zone == TEMPLATE else [self._block(zone)]:
                for value, role in run:
                    values.append(self._read(value, zone, block))
                    roles.append(replace(role, name=self._renamed(role.name, zone, block)))
        self.graph.output(tuple(values)).meta = dict(node.meta, roles=roles)

    def _of_no_name(self, outputs: list[Output], blocks: range) -> list[Output]:
        """Return outputs that are not named after a block, wherever they are made; those of zone 2 for each of its
        copies, in the order of their positions."""
        found = []
        for value, role in outputs:
            if role.kind == "output" and value in self.steps:
                numbers = range(int(role.name), int(role.name) + self.steps[value] * len(blocks), self.steps[value])
                found += [(self.made[value, b], replace(role, name=str(at))) for b, at in zip(blocks, numbers)]
            else:
                found.append((self.made[value, self._block(self.zones.zone(value))], role))
        return sorted(found, key=lambda output: int(output[1].name) if output[1].kind == "output" else math.inf)

    def _renamed(self, name: str, zone: int, block: int) -> str:
        """Return the name with its block's number in the whole model."""
        number = self.zones.names.number(name)
        if number is None:
            return name
        return self.zones.names.renamed(name, self._block(number) if zone in (HEAD, TAIL) else block + number - zone)
