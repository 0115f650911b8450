"""Recomputation: what the forward of a block need not save because the backward can make it again.

A block is one element of a module list. At the level `selective` what is cheap to make from values that are saved
anyway is dropped: pointwise ops and norms, with no collective on the way (Korthikanti et al., arXiv 2205.05198, section
5). At the level `full` a block keeps what it reads from outside and what others read from it, and drops the rest,
gathered copies included; the backward computes it again (Chen et al., arXiv 1604.06174). Where the memory decides, a
block goes from nothing to `full` in steps that free ever fewer bytes a second
(autopar/planner/objective/checkpoint_min_cut.py). What the forward moved is moved again, but only once in the backward:
one copy serves what is computed again and the backward's own ops. Every block takes as many steps as it must; those
that free most bytes a second are taken first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from ...cost.compute import flops_of
from ...ir.block_order import block_of
from ...ir.layout import Layout
from ...ops import autopar
from ..problem.multipliers import Prices
from ..problem.problem import Problem
from .checkpoint_min_cut import FULL, Moves, Recomputation, Rematerialization
from .evaluate import Evaluation, held
from .pricer import Pricer


def recomputed_vertices(evaluation: Evaluation) -> dict[int, str]:
    """Return the vertices that an evaluated plan runs again in the backward, in graph order, each with its block."""
    found = {
        v: block
        for block, levels in evaluation.recomputed.items()
        for step, _ in levels.values()
        for v in step.recomputed
    }
    return dict(sorted(found.items()))


class Blocks:
    """The recomputable blocks of a problem."""

    def __init__(self, problem: Problem, pricer: Pricer):
        self.problem, self.pricer = problem, pricer
        self.block = {
            v.index: block_of(v.node.meta.get("module", "")) if v.kind == "op" and v.phase == "forward" else ""
            for v in problem.vertices
        }
        leaves_block: set[int] = set()
        for use in problem.uses:
            here = self.block[use.producer]
            if here and use.phase == "forward" and self.block[use.consumer] != here:
                leaves_block.add(use.producer)
        kept = {v.index for v in problem.vertices if v.kind == "op" and v.node.target is autopar.with_earlier.default}
        self.inner = {v for v, block in self.block.items() if block and v not in leaves_block | kept}
        self.reruns = {problem.vertices[v].cls for v in self.inner}
        self.members: dict[str, list[int]] = defaultdict(list)
        for v in sorted(self.inner):
            self.members[self.block[v]].append(v)
        self.cheap = {v for v in self.inner if not flops_of(problem.vertices[v].node)}
        self.chains: dict[tuple, list[tuple[str, frozenset[int]]]] = {}  # see Rematerialization.chain

    def recomputation(
        self,
        evaluation: Evaluation,
        prices: Prices = Prices(),
        levels: Sequence[str] = (),
        among: Collection[str] | None = None,
    ) -> list[Recomputation]:
        """Return all steps of all blocks, in graph order, those of one block one after the other: those to the `levels`
        alone, or, without any, those that minimum cuts find at the prices of compute and communication. `among`: the
        blocks that are asked for, None for all."""
        moves, found = Moves(evaluation, self), []
        for block in self.members if among is None else [block for block in self.members if block in among]:
            rematerialization = Rematerialization(self, evaluation, block, moves, prices)
            found += rematerialization.steps(
                [(level, rematerialization.at(level)) for level in levels] if levels else rematerialization.chain()
            )
        return found

    def least_bytes(self, evaluation: Evaluation) -> float:
        """Return the bytes of the evaluation with all blocks recomputed."""
        return evaluation.bytes_ - _freed(self.recomputation(evaluation, levels=(FULL,)))

    def freed_bytes(self, evaluation: Evaluation, price: float, prices: Prices) -> float:
        """Return the bytes that all steps free together that cost less than `price` seconds a byte."""
        return max(0.0, _freed([s for s in self.recomputation(evaluation, prices) if s.price < price]))

    def fit(
        self, evaluation: Evaluation, limit_bytes: float, prices: Prices = Prices()
    ) -> tuple[Evaluation | None, float]:
        """Return the evaluation with just enough recomputation to fit `limit_bytes`, None if none suffices, and the
        price in seconds a byte of the dearest step that was taken."""
        missing = evaluation.bytes_ - limit_bytes
        if missing <= 0:
            return evaluation, 0.0
        steps = sorted(
            self.recomputation(evaluation, prices), key=lambda step: step.price
        )  # in their order within a block
        alive: dict[str, float] = defaultdict(float)
        counts: list[tuple[Recomputation, int]] = []
        for step in steps:
            alive[step.block] += step.alive_bytes
            left = missing + max(alive.values())  # one block at a time is alive again during its backward
            counts.append((step, min(step.copies, math.ceil(left / step.freed_bytes))))
            missing -= step.freed_bytes * counts[-1][1]
            if missing + max(alive.values()) <= 0:
                return taking(evaluation, counts), step.price
        return None, steps[-1].price if steps else 0.0

    def at_level(self, evaluation: Evaluation, level: str) -> Evaluation:
        """Return the evaluation with every block recomputed at one level, whether that is needed or not."""
        return taking(evaluation, [(step, step.copies) for step in self.recomputation(evaluation, levels=(level,))])


def _freed(steps: Iterable[Recomputation]) -> float:
    """Return the bytes that steps free in all their copies, less what one block holds again during its backward."""
    total, alive = 0.0, defaultdict(float)
    for step in steps:
        total += step.freed_bytes * step.copies
        alive[step.block] += step.alive_bytes
    return total - max(alive.values(), default=0.0)


def taking(evaluation: Evaluation, counts: list[tuple[Recomputation, int]]) -> Evaluation:
    """Return the evaluation with each of these steps taken in as many copies as its count says."""
    taken: dict[str, dict[str, tuple[Recomputation, int]]] = defaultdict(dict)
    alive: dict[str, float] = defaultdict(float)
    saved, retained, seconds = dict(evaluation.saved), set(evaluation.retained), 0.0
    kept: set[tuple[int, int, Layout]] = set()
    for step, count in counts:
        taken[step.block][step.level] = (step, count)
        alive[step.block] += step.alive_bytes
        seconds += step.compute_seconds * count
        share = count / step.copies
        for key, bytes_ in step.freed:
            saved[key] -= bytes_ * share
            retained -= {key} if count == step.copies else set()
        for key, bytes_ in step.needed:
            saved[key] = saved.get(key, 0.0) + bytes_ * share
            retained.add(key)
        if evaluation.gathers_once and count == step.copies:
            kept.update(key for key, _ in step.needed)
    return replace(
        evaluation,
        transfers=held(evaluation.transfers, kept) if kept else evaluation.transfers,
        saved={key: bytes_ for key, bytes_ in saved.items() if bytes_ > 0.5},
        retained=retained,
        recomputed=dict(taken),
        recompute_seconds=seconds,
        transient_bytes=max(alive.values(), default=0.0),
    )
