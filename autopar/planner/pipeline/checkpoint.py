"""Choose what each stage of a pipeline recomputes: on every rank as little as its memory demands, the cheapest steps
first.

A block may be computed again in steps (autopar/planner/objective/checkpoint_blocks.py). On a rank with f micro-batches
in flight a step frees f times its bytes, and costs its seconds once a micro-batch, so that early ranks, which hold more
of them, compute more again than late ones (Korthikanti et al., arXiv 2205.05198, appendix C, do so for GPTs by hand).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...ir.block_order import block_of
from ..objective.checkpoint_blocks import Blocks, taking
from ..objective.checkpoint_min_cut import Recomputation
from ..objective.evaluate import Evaluation
from ..objective.expand import whole_of
from ..objective.memory_timeline import SAVED
from ..objective.pricer import Pricer
from ..problem.multipliers import Prices
from ..spmd.planned import Planned
from .evaluate import PipelineCost
from .mixed import Mixture

MOST_ROUNDS = 4  # times that stages are given more to compute again
DOUBT = 0.02  # of the limit, that is asked for beside what is missing after the first round, or as much again


class StageRecomputation:
    """The `steps` of every block of the whole model under a plan `base` that computes nothing again."""

    def __init__(self, base: Evaluation, steps: Mapping[str, Sequence[Recomputation]]):
        self.base, self.steps = base, steps

    def all(self) -> Evaluation:
        """Return the plan that computes again all that it can."""
        return taking(self.base, [(step, 1) for steps in self.steps.values() for step in steps])

    def within(self, limit: float, e: Evaluation, evaluated: PipelineCost, turn: int) -> Evaluation:
        """Return a plan that computes more again than `e` on every rank that holds more than `limit` bytes: just enough
        by what is freed where it holds most, in later turns somewhat more, as the most is held elsewhere then; all that
        can be computed again where that is too little."""
        missing = [max(0.0, sum(memory.values()) - limit) for memory in evaluated.memory]
        plainly, doubting = [limit] * len(missing), [limit - min(bytes_, DOUBT * limit) for bytes_ in missing]
        found = self.more(e, evaluated, doubting) if turn else None
        return found or self.more(e, evaluated, plainly) or self.all()

    def more(self, e: Evaluation, evaluated: PipelineCost, limits: Sequence[float]) -> Evaluation | None:
        """Return a plan that computes more again than `e` on every rank that holds more than its limit, in bytes, just
        enough to fit; None if all that a rank has is too little."""
        taken = {block: len(levels) for block, levels in e.recomputed.items()}
        for rank, memory in enumerate(evaluated.memory):
            excess = sum(memory.values()) - limits[rank]
            stages = [evaluated.parts[s] for s in evaluated.pipeline.stages_of(rank)]
            in_flight = memory.get(SAVED, 0.0) / max(sum(part.saved_bytes for part in stages), 1.0)
            blocks = [b for b in dict.fromkeys(block_of(m) for part in stages for m in part.modules) if b in self.steps]
            if excess > 0 and not self._free(taken, blocks, excess, in_flight):
                return None
        return taking(self.base, [(step, 1) for block, count in taken.items() for step in self.steps[block][:count]])

    def _free(self, taken: dict[str, int], blocks: list[str], excess: float, in_flight: float) -> bool:
        """Take steps of a rank's blocks until they free `excess` bytes, less what the block that computes again holds
        meanwhile; return whether they do."""
        alive = {b: sum(step.freed_bytes for step in self.steps[b][: taken.get(b, 0)]) for b in blocks}
        before = max(alive.values(), default=0.0)
        left = [(step.price, i, b) for b in blocks for i, step in enumerate(self.steps[b]) if i >= taken.get(b, 0)]
        for _, i, block in sorted(left, key=lambda one: one[:2]):
            if excess + max(alive.values()) - before <= 0:
                break
            for step in self.steps[block][taken.get(block, 0) : i + 1]:
                excess -= step.freed_bytes * in_flight
                alive[block] += step.freed_bytes
            taken[block] = max(taken.get(block, 0), i + 1)
        return excess + max(alive.values(), default=0.0) - before <= 0


def recomputation_of(inner: Planned) -> StageRecomputation:
    """Return the steps of a plan of the whole graph."""
    solver, e = inner.solver, inner.evaluation
    steps = solver.blocks.recomputation(e, solver.free)
    _, every = whole_of(inner.problem, taking(e, [(step, step.copies) for step in steps]))
    by_block = {block: [step for step, _ in levels.values()] for block, levels in every.recomputed.items()}
    return StageRecomputation(inner.whole[1], by_block)


def recomputation_of_mixture(
    mixture: Mixture, plans: Sequence[StageRecomputation], pricer: Pricer, prices: Prices
) -> StageRecomputation:
    """Return the steps of a plan that was made of several, given those of each: those of a block are its own plan's,
    unless it makes or reads what passes from one plan to another."""
    blocks = Blocks(mixture.problem, replace(pricer, problem=mixture.problem))
    steps: dict[str, list[Recomputation]] = {}
    for block, members in blocks.members.items():
        if block not in mixture.blocks:
            steps[block] = list(plans[mixture.of[members[0]]].steps.get(block, ()))
    for step in blocks.recomputation(mixture.evaluation, prices, among=mixture.blocks):
        steps.setdefault(step.block, []).append(step)
    return StageRecomputation(mixture.evaluation, {block: own for block, own in steps.items() if own})
