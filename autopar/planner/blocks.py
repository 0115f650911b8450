"""Blocks that may be recomputed: the forward of one element of a module list, whose values the backward can make again.

A block keeps what it reads from outside (parameters and the tensors that enter it) and what others read from it; every other
saved value inside may be dropped after the forward and computed again, with the collectives on the way, when the backward
comes to it. Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from .evaluate import Evaluation, Pricer
from .problem import Problem

_BLOCK = re.compile(r"^(.*?\.?\d+)(?:\.|$)")


def block_of(module: str) -> str:
    """`"model.layers.3.mlp"` -> `"model.layers.3"`: up to the first number; "" outside of module lists."""
    match = _BLOCK.match(module)
    return match.group(1) if match else ""


@dataclass(frozen=True)
class Recomputation:
    """What recomputing one block of an evaluated plan frees and costs."""

    block: str
    freed: tuple[tuple, ...]  # keys of Evaluation.saved
    freed_bytes: float
    seconds: float


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

    def recomputation(self, evaluation: Evaluation, pricer: Pricer) -> list[Recomputation]:
        """Per block, in graph order: the saved values it could drop and the forward work that makes them again."""
        problem = self.problem
        freed: dict[str, list[tuple]] = defaultdict(list)
        for key in evaluation.saved:
            if key[0] in self.inner:
                freed[self.block[key[0]]].append(key)
        arriving: dict[int, float] = defaultdict(float)
        for transfer in evaluation.transfers:
            if transfer.phase == "forward":
                for consumer in transfer.consumers[:1]:
                    arriving[consumer] += transfer.seconds
        result = []
        for block, keys in freed.items():
            again = self._made_again([key[0] for key in keys])
            seconds = sum(float(problem.choices(v).seconds[evaluation.choice[v]]) + arriving.get(v, 0.0) for v in again)
            total = sum(evaluation.saved[key] for key in keys)
            result.append(Recomputation(block, tuple(keys), total, seconds))
        return result

    def recomputed(self, evaluation: Evaluation) -> dict[int, str]:
        """The vertices that an evaluated plan runs again in the backward, in graph order, with their blocks."""
        blocks, problem = set(evaluation.recomputed_blocks), self.problem
        read = [u.producer for u in problem.uses if u.phase == "backward" and self.block[u.producer] in blocks] if blocks else []
        return {v: self.block[v] for v in sorted(self._made_again(read))}

    def _made_again(self, read: list[int]) -> set[int]:
        """What must run again for the backward to read these vertices."""
        again, stack = set(), list(read)
        while stack:
            v = stack.pop()
            if v not in again and v in self.inner:
                again.add(v)
                stack += [p for p, _ in self.problem.vertices[v].inputs]
        return again

    def fit(self, evaluation: Evaluation, pricer: Pricer, limit_bytes: float) -> Evaluation | None:
        """The evaluation with just enough blocks recomputed to fit, cheapest seconds per byte first; None if none suffice."""
        missing = evaluation.bytes_ - limit_bytes
        if missing <= 0:
            return evaluation
        options = sorted(
            self.recomputation(evaluation, pricer), key=lambda r: (r.seconds / max(r.freed_bytes, 1), r.block)
        )
        # one block at a time is alive again during its backward
        largest = max((r.freed_bytes for r in options), default=0.0)
        missing += largest
        for r in options:
            if missing <= 0:
                break
            evaluation.recomputed_blocks.append(r.block)
            evaluation.recompute_seconds += r.seconds
            for key in r.freed:
                evaluation.saved.pop(key)
                evaluation.kept.discard(key)
            missing -= r.freed_bytes
        evaluation.transient_bytes = largest if evaluation.recomputed_blocks else 0.0
        return evaluation if missing <= 0 else None
