"""Find what the backward of a block recomputes instead of reading it saved: minimum cuts at rising prices of memory.

Every op of the block, and every transfer into it that the backward does not make anyway, is made again or not. Making
one again takes its seconds, and needs what it reads: saved, there anyway, or made again in turn. With L seconds a byte
the cheapest set is a minimum cut,

    min  sum seconds(i) of what is made again  +  L * sum bytes(x) of values that are needed and not made again,

where a value is needed that the backward reads or that something made again reads. From L = 0 to the highest the sets
grow from nothing to the whole block; those that are best at some price, each held to contain the one before, are the
steps that a block can take. (Herrmann et al., arXiv 1911.13214, choose among all sets of a chain; a cut takes any
graph, for one block at a time.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from ..problem.multipliers import Prices
from ..problem.tiled import NEVER_BYTES
from .evaluate import Evaluation, Transfer
from .modes import RESIDENT_LEAVES

if TYPE_CHECKING:
    from .checkpoint_blocks import Blocks

SELECTIVE, FULL = "selective", "full"
Key = tuple  # of Evaluation.saved: (vertex, output, layout)
SCALE, NEVER = 10**9, 10**15  # capacities are whole numbers: of a block's seconds, and of what is not to be cut
LITTLE = 1e-6  # of the cost, less than which a cut gains nothing


@dataclass(frozen=True)
class Recomputation:
    """The bytes freed and the seconds spent by taking one block of an evaluated plan one step further; `copies` blocks
    of the whole graph are like it. `alive_bytes`: of those freed, what one micro-batch holds again in its backward.
    `freed`: what need not be saved, `needed`: what has to be instead, both with the bytes of all copies.
    `recomputed`: vertices computed twice from then on, in `compute_seconds` more than before; `moved`: transfers of the
    forward that the backward makes for this alone. `price`: priced seconds a byte."""

    block: str
    level: str
    freed: tuple[tuple[Key, float], ...]
    needed: tuple[tuple[Key, float], ...]
    freed_bytes: float
    alive_bytes: float
    compute_seconds: float
    copies: int
    recomputed: frozenset[int]
    moved: tuple[Transfer, ...]
    price: float

    @property
    def seconds(self) -> float:
        """Return the seconds of compute and of transfers that the step adds in one copy."""
        return self.compute_seconds + sum(t.seconds for t in self.moved)


def key_of(transfer: Transfer) -> Key:
    """Return the key of the copy that a transfer makes."""
    return transfer.producer, transfer.output, transfer.target


class Moves:
    """The transfers of an evaluation, as blocks see them. `in_backward`: copies that the backward makes anyway, or that
    all passes of a step share; `readers`: forward vertices that read another layout of something that is not a
    parameter; `alone`: by block, transfers whose copies it alone reads."""

    def __init__(self, e: Evaluation, blocks: Blocks):
        kinds = [v.kind for v in blocks.problem.vertices]
        micro_batches = blocks.pricer.micro_batches
        self.in_backward = {key_of(t) for t in e.transfers if t.phase == "backward" or t.times < micro_batches}
        self.readers: set[int] = set()
        self.alone: dict[str, list[Transfer]] = defaultdict(list)
        for t in e.transfers:
            if t.phase == "forward":
                consumer_blocks = {blocks.block[c] for c in t.consumers}
                if len(consumer_blocks) == 1:
                    self.alone[consumer_blocks.pop()].append(t)
                if kinds[t.producer] != "parameter":
                    self.readers.update(t.consumers)


@dataclass
class _Value:
    """A tensor in one layout, with the bytes of one copy. `maker` makes it again, if something may; `readers` read it
    if they are made again themselves."""

    bytes_: float
    maker: int | None
    is_saved: bool
    readers: list[int] = field(default_factory=list)


class Rematerialization:
    """One block of an evaluated plan. Sets hold numbers of `elements`: vertices, and transfers."""

    def __init__(self, blocks: Blocks, e: Evaluation, block: str, moves: Moves, prices: Prices):
        self.blocks, self.problem, self.e, self.block, self.moves = blocks, blocks.problem, e, block, moves
        self.ops = blocks.members[block]
        copies = self.problem.copies(e.first)
        self.copies = copies[self.ops[0]]
        transfers = [  # but those of what other blocks make, if those have other copies: of these not all are read here
            t for t in moves.alone[block] if key_of(t) not in moves.in_backward and copies[t.producer] == self.copies
        ]
        self.elements: list[int | Transfer] = [*self.ops, *transfers]
        self.number = {v: i for i, v in enumerate(self.ops)} | {
            key_of(t): i for i, t in enumerate(transfers, len(self.ops))
        }
        compute = prices.compute("backward")
        self.seconds = [self._compute(v) * compute for v in self.ops]
        self.seconds += [replace(t, phase="backward").priced(prices, e.micro_batches) for t in transfers]
        self.values: dict[Key, _Value] = {}
        self.reads: list[list[Key]] = [[] for _ in self.elements]
        for v in self.ops:
            for output in range(len(self.problem.vertices[v].values)):
                self._save((v, output, self._source(v, output)), self.number[v])
            for (p, o), layout in zip(self.problem.vertices[v].inputs, self._strategy(v).inputs):
                self._read(self.number[v], p, o, layout)
        for i, t in enumerate(transfers, len(self.ops)):
            self._save(key_of(t), i)
            self._read(i, t.producer, t.output, t.source)

    def _strategy(self, v: int):
        return self.problem.choices(v).strategies[self.e.choice[v]]

    def _compute(self, v: int) -> float:
        return float(self.problem.choices(v).seconds[self.e.choice[v]])

    def _source(self, vertex: int, output: int):
        """Return the layout in which a vertex hands an output on."""
        return self._strategy(vertex).outputs[output]

    def _save(self, key: Key, maker: int) -> None:
        if key in self.e.saved:
            self.values[key] = _Value(self.e.saved[key] / self.copies, maker, True)

    def _read(self, reader: int, p: int, o: int, layout) -> None:
        """Record what an element needs, unless it is there anyway."""
        key, source = (p, o, layout), self._source(p, o)
        maker = self.number.get(p if layout == source else key)
        is_leaf = self.problem.vertices[p].kind in RESIDENT_LEAVES
        is_there = (
            is_leaf
            if layout == source
            else key in self.moves.in_backward or key in self.e.retained and key not in self.e.saved
        )
        if is_there or maker is None and key in self.e.saved:
            return
        if key not in self.values:
            is_never_made = (p, o) in self.problem.never_made  # so that whoever reads it makes it
            bytes_ = NEVER_BYTES if is_never_made else self.blocks.pricer.saved_bytes(*key)
            self.values[key] = _Value(bytes_, maker, False)
        self.values[key].readers.append(reader)
        self.reads[reader].append(key)

    # sets

    def at(self, level: str) -> frozenset[int]:
        """Return the set that a level makes again."""
        return self._full() if level == FULL else self._selective()

    def chain(self) -> list[tuple[str, frozenset[int]]]:
        """Return growing sets with their levels, each the cheapest at some price; the last is that of `full`. Blocks
        that decide alike have the same ones."""
        graph = tuple(self.seconds), tuple((x.bytes_, x.maker, x.is_saved, *x.readers) for x in self.values.values())
        chains = self.blocks.chains
        if graph not in chains:
            full = self._full()
            between = self._between(frozenset(), full)
            chains[graph] = [*((str(i), found) for i, found in enumerate(between, 1)), (FULL, full)]
        return chains[graph]

    def _between(self, low: frozenset[int], high: frozenset[int]) -> list[frozenset[int]]:
        """Return the sets between `low` and `high` that are cheaper than both at some price, in order."""
        (seconds, bytes_), (more, fewer) = self.cost(low), self.cost(high)
        if fewer >= bytes_ or len(high) - len(low) < 2:
            return []
        price = (more - seconds) / (bytes_ - fewer)
        found = self._cut(price, low, high)
        between, left = self.cost(found)
        if between + price * left >= (seconds + price * bytes_) * (1 - LITTLE) or found in (low, high):
            return []
        return [*self._between(low, found), found, *self._between(found, high)]

    def cost(self, made: frozenset[int]) -> tuple[float, float]:
        """Return the priced seconds, and the bytes that are saved, of one copy of the block if `made` is made again."""
        bytes_ = sum(
            x.bytes_
            for x in self.values.values()
            if x.maker not in made and (x.is_saved or not _apart(x.readers, made))
        )
        return sum(self.seconds[i] for i in made), bytes_

    def _cut(self, price: float, low: Collection[int], high: Collection[int]) -> frozenset[int]:
        """Return the cheapest set at a price in seconds a byte that contains `low` and is part of `high`."""
        from ortools.graph.python import max_flow

        tails, heads, capacities = [], [], []

        def arc(tail: int, head: int, capacity: float) -> None:
            tails.append(tail)
            heads.append(head)
            capacities.append(min(NEVER, round(capacity)))

        source, sink = len(self.elements), len(self.elements) + 1
        scale = SCALE / max(sum(self.seconds), 1e-30)
        for i, seconds in enumerate(self.seconds):
            arc(i, sink, seconds * scale if i in high else NEVER)
            if i in low:
                arc(source, i, NEVER)
        for number, x in enumerate(self.values.values(), sink + 1):
            cost, maker = x.bytes_ * price * scale, sink if x.maker is None else x.maker
            if x.is_saved:
                arc(source, maker, cost)
                continue
            arc(number, maker, cost)
            for reader in x.readers:
                arc(reader, number, NEVER)
        flow = max_flow.SimpleMaxFlow()
        flow.add_arcs_with_capacity(tails, heads, capacities)
        flow.solve(source, sink)
        return frozenset(i for i in flow.get_source_side_min_cut() if i < source)

    def _full(self) -> frozenset[int]:
        """Return the set that makes again all that is saved, and what that needs."""
        found, stack = set(), [x.maker for x in self.values.values() if x.is_saved]
        while stack:
            i = stack.pop()
            if i not in found:
                found.add(i)
                stack += [self.values[key].maker for key in self.reads[i] if self.values[key].maker is not None]
        return frozenset(found)

    def _selective(self) -> frozenset[int]:
        """Return the set of cheap ops that make saved values again from what is left, largest values first."""
        own = [key for key in self.values if key[2] == self._source(*key[:2]) and self.values[key].is_saved]
        dropped: set[Key] = set()
        made: set[int] = set()
        for key in sorted(own, key=lambda k: (-self.values[k].bytes_, k[:2])):
            found = self._cheap_way(key[0], dropped | {key})
            if found is not None:
                dropped.add(key)
                made |= found
        return frozenset(self.number[v] for v in made)

    def _cheap_way(self, vertex: int, dropped: Collection[Key]) -> set[int] | None:
        """Return the cheap ops that make a vertex again from saved values, where they are read as they were made; None
        if there is no such way."""
        found, stack = set(), [vertex]
        while stack:
            v = stack.pop()
            if v in found:
                continue
            if v not in self.blocks.cheap or v in self.moves.readers:
                return None
            found.add(v)
            for p, o in self.problem.vertices[v].inputs:
                key = (p, o, self._source(p, o))
                if self.problem.vertices[p].kind not in RESIDENT_LEAVES and (key in dropped or key not in self.e.saved):
                    stack.append(p)
        return found

    # steps

    def steps(self, levels: Iterable[tuple[str, frozenset[int]]]) -> list[Recomputation]:
        """Return the steps from nothing to the last of growing sets, without sets that free nothing beside the one
        before, or that are dearer than a part of the way to the next one: prices rise from step to step, so that
        whoever takes the cheapest ones first takes those of a block in order."""
        ends: list[tuple[str, frozenset[int]]] = [("", frozenset())]
        for level, made in levels:
            if self.cost(made)[1] >= self.cost(ends[-1][1])[1]:
                continue
            while len(ends) > 1 and self._price(ends[-1][1], made) < self._price(ends[-2][1], ends[-1][1]):
                ends.pop()
            ends.append((level, made))
        return [self._step(level, before, made) for (_, before), (level, made) in pairwise(ends)]

    def _price(self, before: frozenset[int], made: frozenset[int]) -> float:
        """Return the priced seconds a byte of a step."""
        seconds, bytes_ = (a - b for a, b in zip(self.cost(made), self.cost(before)))
        return max(seconds, 0.0) / max(-bytes_, 1.0)

    def _step(self, level: str, before: frozenset[int], made: frozenset[int]) -> Recomputation:
        held, holds = self.held(before), self.held(made)
        freed_bytes = self.cost(before)[1] - self.cost(made)[1]
        new = [self.elements[i] for i in sorted(made - before)]
        ops, moved = [x for x in new if isinstance(x, int)], tuple(x for x in new if not isinstance(x, int))
        return Recomputation(
            self.block,
            level,
            tuple((key, b) for key, b in held.items() if key not in holds),
            tuple((key, b) for key, b in holds.items() if key not in held),
            freed_bytes,
            freed_bytes / self.blocks.pricer.in_flight,
            sum(map(self._compute, ops)),
            self.copies,
            frozenset(ops),
            moved,
            self._price(before, made),
        )

    def held(self, made: frozenset[int]) -> dict[Key, float]:
        """Return what is saved if `made` is made again, with the bytes of all copies."""
        held = ((key, x) for key, x in self.values.items() if x.maker not in made)
        return {key: x.bytes_ * self.copies for key, x in held if x.is_saved or not _apart(x.readers, made)}


def _apart(readers: Iterable[int], made: frozenset[int]) -> bool:
    return made.isdisjoint(readers)
