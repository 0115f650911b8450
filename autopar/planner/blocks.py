"""Recomputation: what the forward of a block need not save because the backward can make it again.

A block is one element of a module list. At the level `selective` what is cheap to make from values that are saved anyway is
dropped: pointwise ops and norms, with no collective on the way (Korthikanti et al., arXiv 2205.05198, section 5). At the level
`full` a block keeps what it reads from outside and what others read from it, and drops the rest, gathered copies included; the
backward computes it again (Chen et al., arXiv 1604.06174). What the forward moved is moved again, but only once in the backward:
one copy serves what is computed again and the backward's own ops. Every block has its own level; the steps that free most bytes a
second are taken first.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from ..cost.compute import flops_of
from ..layout import largest_local_numel
from .evaluate import RESIDENT_LEAVES, Evaluation, Transfer
from .problem import Problem

_BLOCK = re.compile(r"^(.*?\.?\d+)(?:\.|$)")
SELECTIVE, FULL = "selective", "full"
Key = tuple  # of Evaluation.saved: (vertex, output, layout)


def block_of(module: str) -> str:
    """`"model.layers.3.mlp"` -> `"model.layers.3"`: up to the first number; "" outside of module lists."""
    match = _BLOCK.match(module)
    return match.group(1) if match else ""


@dataclass(frozen=True)
class Recomputation:
    """What taking one block of an evaluated plan to a level frees and costs, beyond the level before; `copies` blocks of the whole
    graph are like it. `again`: vertices that are computed twice, in so many `compute_seconds`. `moved`: transfers of the forward
    that the backward makes for this alone. `needed`: what has to be saved instead, with its bytes."""

    block: str
    level: str
    freed: tuple[Key, ...]
    needed: tuple[tuple[Key, float], ...]
    freed_bytes: float
    compute_seconds: float
    copies: int
    again: frozenset[int]
    moved: tuple[Transfer, ...] = ()

    @property
    def seconds(self) -> float:
        return self.compute_seconds + sum(t.seconds for t in self.moved)

    @property
    def price(self) -> float:
        """Seconds a byte."""
        return self.seconds / max(self.freed_bytes, 1.0)


def recomputed_vertices(evaluation: Evaluation) -> dict[int, str]:
    """The vertices that an evaluated plan runs again in the backward, in graph order, with their blocks."""
    found = {v: block for block, levels in evaluation.recomputed.items() for step, _ in levels.values() for v in step.again}
    return dict(sorted(found.items()))


class Blocks:
    """The recomputable blocks of a problem."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.block = {
            v.index: block_of(v.node.meta.get("module", "")) if v.kind == "op" and v.phase == "forward" else ""
            for v in problem.vertices
        }
        leaves_block: set[int] = set()
        for use in problem.uses:
            here = self.block[use.producer]
            if here and use.phase == "forward" and self.block[use.consumer] != here:
                leaves_block.add(use.producer)
        self.inner = {v for v, block in self.block.items() if block and v not in leaves_block}
        self._cheap = {v for v in self.inner if not flops_of(problem.vertices[v].node)}

    def recomputation(self, evaluation: Evaluation, merged: bool = True) -> list[Recomputation]:
        """All steps of all blocks, in graph order; a block's selective step before its full one. `merged`: where the second is
        cheaper a byte, both are one."""
        held: dict[str, list[Key]] = defaultdict(list)
        for key in evaluation.saved:
            if key[0] in self.inner:
                held[self.block[key[0]]].append(key)
        moves = _Moves(evaluation, self)
        steps = []
        for block, keys in held.items():
            selective = self._selective(evaluation, block, keys, moves)
            full = self._full(evaluation, block, keys, moves, selective)
            if merged and selective and full and full.price < selective.price:
                selective, full = None, self._full(evaluation, block, keys, moves, None)
            steps += [step for step in (selective, full) if step and step.freed_bytes > 0]
        return steps

    def _seconds(self, e: Evaluation, vertices: Iterable[int]) -> float:
        return sum(float(self.problem.choices(v).seconds[e.choice[v]]) for v in vertices)

    def _selective(self, e: Evaluation, block: str, keys: list[Key], moves: _Moves) -> Recomputation | None:
        """Drop what cheap ops make from what is left, largest values first. Gathered parameters that they read are kept."""
        own = {(v, o): layout for v, o, layout in keys if self._source(e, v, o) == layout}
        dropped: set[tuple[int, int]] = set()
        again: set[int] = set()
        for v, o in sorted(own, key=lambda t: (-e.saved[(*t, own[t])], t)):
            found = self._sources(e, v, dropped | {(v, o)}, moves.readers)
            if found is not None:
                dropped.add((v, o))
                again |= found
        if not dropped:
            return None
        freed = tuple((*t, own[t]) for t in sorted(dropped))
        copies = self.problem.vertices[freed[0][0]].copies
        read = dict.fromkeys(key for v in sorted(again) for key in moves.gathered[v] if key not in e.saved)
        needed = tuple((key, self._local_bytes(*key) * copies) for key in read)
        bytes_ = (sum(e.saved[key] for key in freed) - sum(held for _, held in needed)) / copies
        return Recomputation(block, SELECTIVE, freed, needed, bytes_, self._seconds(e, again), copies, frozenset(again))

    def _sources(self, e: Evaluation, vertex: int, dropped: set[tuple[int, int]], moved: Collection[int]) -> set[int] | None:
        """The cheap ops that make a vertex again from saved values, where they are read as they were made; None if there is no
        such way."""
        found, stack = set(), [vertex]
        while stack:
            v = stack.pop()
            if v in found:
                continue
            if v not in self._cheap or v in moved:
                return None
            found.add(v)
            for p, o in self.problem.vertices[v].inputs:
                if self.problem.vertices[p].kind in RESIDENT_LEAVES:
                    continue
                if (p, o) in dropped or (p, o, self._source(e, p, o)) not in e.saved:
                    stack.append(p)
        return found

    def _full(self, e: Evaluation, block: str, keys: list[Key], moves: _Moves, before: Recomputation | None) -> Recomputation:
        """Drop all, and save what the block reads from outside."""
        problem, again, stack, needed = self.problem, set(), [key[0] for key in keys], {}
        while stack:
            v = stack.pop()
            if v in again:
                continue
            if v in self.inner:
                again.add(v)
                stack += [p for p, _ in problem.vertices[v].inputs]
        arriving, staying = moves.into(block, again, e.saved)
        for v in again:
            for p, o in problem.vertices[v].inputs:
                vertex = problem.vertices[p]
                key = (p, o, self._source(e, p, o))
                if p not in again and vertex.kind not in RESIDENT_LEAVES and key not in e.saved:
                    needed[key] = self._local_bytes(*key) * vertex.copies
        copies = problem.vertices[keys[0][0]].copies
        needed |= {key: self._local_bytes(*key) * copies for key in map(key_of, staying) if key not in e.saved}
        held = {key: e.saved[key] for key in keys if before is None or key not in before.freed}
        held |= {key: e.saved[key] for key in map(key_of, arriving) if key in e.saved}
        held |= dict(before.needed) if before else {}
        freed, bytes_ = tuple(held), (sum(held.values()) - sum(needed.values())) / copies
        seconds = self._seconds(e, again) - (before.compute_seconds if before else 0.0)
        moved = tuple(t for t in arriving if key_of(t) not in moves.in_backward)
        return Recomputation(block, FULL, freed, tuple(needed.items()), bytes_, seconds, copies, frozenset(again), moved)

    def _source(self, e: Evaluation, vertex: int, output: int):
        """The layout in which a vertex hands an output on."""
        return self.problem.choices(vertex).strategies[e.choice[vertex]].outputs[output]

    def _local_bytes(self, vertex: int, output: int, layout) -> float:
        value = self.problem.vertices[vertex].values[output]
        return float(largest_local_numel(value.shape, layout, self.problem.mesh) * value.element_size())

    def least_bytes(self, evaluation: Evaluation) -> float:
        """Bytes of the evaluation with all blocks recomputed."""
        return evaluation.bytes_ - self.freed_bytes(evaluation, math.inf)

    def freed_bytes(self, evaluation: Evaluation, price: float) -> float:
        """What the steps free together that cost less than a price in seconds a byte."""
        steps, alive = [s for s in self.recomputation(evaluation) if s.price < price], defaultdict(float)
        for step in steps:
            alive[step.block] += step.freed_bytes
        return max(0.0, sum(step.freed_bytes * step.copies for step in steps) - max(alive.values(), default=0.0))

    def fit(self, evaluation: Evaluation, limit_bytes: float) -> tuple[Evaluation | None, float]:
        """The evaluation with just enough recomputation to fit, None if none suffices; and the price in seconds a byte of the
        dearest step that was taken."""
        missing = evaluation.bytes_ - limit_bytes
        if missing <= 0:
            return evaluation, 0.0
        # a step comes after the one that it builds on, whose price is never higher
        steps = sorted(self.recomputation(evaluation), key=lambda r: (r.price, r.block, r.level == FULL))
        # one block at a time is alive again during its backward
        alive: dict[str, float] = defaultdict(float)
        for step in steps:
            alive[step.block] += step.freed_bytes
        missing += max(alive.values(), default=0.0)
        counts, price = [], 0.0
        for step in steps:
            if missing <= 0:
                break
            counts.append((step, min(step.copies, math.ceil(missing / step.freed_bytes))))
            missing, price = missing - step.freed_bytes * counts[-1][1], step.price
        return (None if missing > 0 else _taking(evaluation, counts, alive)), price

    def at_level(self, evaluation: Evaluation, level: str) -> Evaluation:
        """The evaluation with every block at one level, whether that is needed or not."""
        steps = [s for s in self.recomputation(evaluation, merged=False) if level == FULL or s.level == level]
        alive: dict[str, float] = defaultdict(float)
        for step in steps:
            alive[step.block] += step.freed_bytes
        return _taking(evaluation, [(step, step.copies) for step in steps], alive)


class _Moves:
    """What an evaluation moves, as recomputation sees it. `readers`: forward vertices that read another layout of something that
    is not a parameter; `gathered`: by forward vertex, copies of parameters that it reads; `in_backward`: copies that the backward
    makes anyway."""

    def __init__(self, e: Evaluation, blocks: Blocks):
        self.blocks, kinds = blocks, [v.kind for v in blocks.problem.vertices]
        self.readers: set[int] = set()
        self.gathered: dict[int, list[Key]] = defaultdict(list)
        self.in_backward = {key_of(t) for t in e.transfers if t.phase == "backward"}
        self._of_block: dict[str, list[Transfer]] = defaultdict(list)
        for t in e.transfers:
            if t.phase == "forward":
                for block in dict.fromkeys(blocks.block[c] for c in t.consumers):
                    self._of_block[block].append(t)
                if kinds[t.producer] != "parameter":
                    self.readers.update(t.consumers)
                for consumer in t.consumers if kinds[t.producer] == "parameter" else ():
                    self.gathered[consumer].append(key_of(t))

    def into(self, block: str, again: Collection[int], saved: Collection[Key]) -> tuple[list[Transfer], list[Transfer]]:
        """What must be moved again if these vertices of a block are computed again and saved copies that it alone reads are
        dropped; and what they share with others, so that the copy has to stay."""
        alone, shared = [], []
        for t in self._of_block[block]:
            is_read = not again.isdisjoint(t.consumers)
            if all(self.blocks.block[c] == block for c in t.consumers):
                alone += [t] if is_read or key_of(t) in saved else []
            else:
                shared += [t] if is_read else []
        return alone, shared


def key_of(transfer: Transfer) -> Key:
    """The copy that a transfer makes."""
    return transfer.producer, transfer.output, transfer.target


def _taking(evaluation: Evaluation, counts: list[tuple[Recomputation, int]], alive: dict[str, float]) -> Evaluation:
    """The evaluation with these steps taken in so many copies each; `alive`: by block, what it holds again in its backward."""
    taken: dict[str, dict[str, tuple[Recomputation, int]]] = defaultdict(dict)
    saved, kept, seconds = dict(evaluation.saved), set(evaluation.kept), 0.0
    for step, count in counts:
        taken[step.block][step.level] = (step, count)
        seconds += step.compute_seconds * count
        share = count / step.copies
        saved |= {key: saved[key] * (1 - share) for key in step.freed}
        saved |= {key: saved.get(key, 0.0) + bytes_ * share for key, bytes_ in step.needed}
        kept.difference_update(step.freed if count == step.copies else ())
    return replace(
        evaluation, saved=saved, kept=kept, recomputed=dict(taken), recompute_seconds=seconds,
        transient_bytes=max((alive[block] for block in taken), default=0.0),
    )  # fmt: skip
