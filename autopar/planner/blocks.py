"""Blocks that may be recomputed: the forward of one element of a module list, whose values the backward can make again.

A block keeps what it reads from outside (parameters and the tensors that enter it) and what others read from it; every other
saved value inside may be dropped after the forward and computed again, with the collectives on the way, when the backward
comes to it. Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, replace

from .evaluate import Evaluation, Pricer
from .problem import Problem

_BLOCK = re.compile(r"^(.*?\.?\d+)(?:\.|$)")


def block_of(module: str) -> str:
    """`"model.layers.3.mlp"` -> `"model.layers.3"`: up to the first number; "" outside of module lists."""
    match = _BLOCK.match(module)
    return match.group(1) if match else ""


@dataclass(frozen=True)
class Recomputation:
    """What recomputing one block of an evaluated plan frees and costs; `copies` blocks of the whole graph are like it."""

    block: str
    freed: tuple[tuple, ...]  # keys of Evaluation.saved
    freed_bytes: float
    seconds: float
    copies: int


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
            again, stack = set(), [key[0] for key in keys]
            while stack:
                v = stack.pop()
                if v in again or v not in self.inner:
                    continue
                again.add(v)
                stack += [p for p, _ in problem.vertices[v].inputs]
            seconds = sum(float(problem.choices(v).seconds[evaluation.choice[v]]) + arriving.get(v, 0.0) for v in again)
            copies = problem.vertices[keys[0][0]].copies
            total = sum(evaluation.saved[key] for key in keys) / copies
            result.append(Recomputation(block, tuple(keys), total, seconds, copies))
        return result

    def fit(self, evaluation: Evaluation, pricer: Pricer, limit_bytes: float) -> Evaluation | None:
        """The evaluation with just enough blocks recomputed to fit, cheapest seconds per byte first; None if none suffice."""
        missing = evaluation.bytes_ - limit_bytes
        if missing <= 0:
            return evaluation
        options = [r for r in self.recomputation(evaluation, pricer) if r.freed_bytes > 0]
        options.sort(key=lambda r: (r.seconds / r.freed_bytes, r.block))
        # one block at a time is alive again during its backward
        largest = max((r.freed_bytes for r in options), default=0.0)
        missing += largest
        saved, recomputed, freed, seconds = dict(evaluation.saved), {}, {}, 0.0
        for r in options:
            if missing <= 0:
                break
            count = min(r.copies, math.ceil(missing / r.freed_bytes))
            recomputed[r.block] = count
            seconds += r.seconds * count
            freed |= dict.fromkeys(r.freed, r.block)
            saved |= {key: saved[key] * (1 - count / r.copies) for key in r.freed}
            missing -= r.freed_bytes * count
        if missing > 0:
            return None
        return replace(
            evaluation, saved=saved, recomputed=recomputed, freed=freed, recompute_seconds=seconds, transient_bytes=largest
        )
