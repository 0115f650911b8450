"""From a joint graph and a plan with a pipeline to what one rank runs: the graphs of its stages, for one micro-batch.

    micro_batch -> cut -> (for each of the rank's stages) the passes of autopar/codegen/lower.py -> split_backward

Gradients of a stage add up over its micro-batches as its ops leave them and are reduced once, by a graph of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from ..errors import VerifyError
from ..frontend.export import Captured
from ..ir.graph import output_node
from ..passes.pipeline.compute_once import compute_once
from ..passes.pipeline.micro_batch import MicroBatched, micro_batch
from ..passes.pipeline.split_backward import SplitBackward, split_backward
from ..passes.pipeline.stages import Stage, cut
from ..plans.check import check_decisions
from ..plans.pipeline import rank_inside
from ..plans.plan import Plan
from . import pass_manager
from .lower import DeferredProgram, RankProgram, collectives_of, lower, lower_deferred


@dataclass(frozen=True)
class StageProgram:
    """One rank's graphs for one stage. `copies` makes what all micro-batches compute alike (see
    passes/pipeline/compute_once.py). `deferred` has the backward that leaves gradients unreduced, and their reduction.
    `smaller`: the graphs for micro-batches of one sample less, where a batch has some, which read the same copies and
    add to the same gradients."""

    stage: Stage
    captured: Captured
    plan: Plan  # the decisions for this stage's graph
    whole: RankProgram
    forward: fx.GraphModule
    copies: fx.GraphModule | None
    deferred: DeferredProgram | None
    smaller: StageProgram | None = None

    @property
    def sizes(self) -> tuple[StageProgram, ...]:
        """Return the graphs for every size of a micro-batch."""
        return (self,) if self.smaller is None else (self, self.smaller)

    @property
    def backward(self) -> fx.GraphModule | None:
        """Return the backward of one micro-batch, if there is one; it leaves gradients unreduced where they wait."""
        return self.deferred.backward if self.deferred else self.whole.parts.backward

    @property
    def forward_alone(self) -> fx.GraphModule:
        """Return the forward that makes all copies of parameters itself, for micro-batches that do not read the same
        versions of them."""
        return self.whole.parts.forward

    @property
    def saved(self) -> tuple[str, ...]:
        """Return the names of the values that the forward saves for the backward."""
        return self.whole.parts.saved

    @cached_property
    def split(self) -> SplitBackward:
        """Return the backward in two: gradients that the stage before reads, and gradients of parameters."""
        return split_backward(self.backward)

    def collectives(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """List the collectives as `RankProgram.collectives` does, stage by stage."""
        found = collectives_of(("copies", self.copies), ("forward", self.forward))
        found += self.deferred.collectives() if self.deferred else collectives_of(("backward", self.backward))
        found = [(group, f"stage {self.stage.index} {text}", shape) for group, text, shape in found]
        return found + (self.smaller.collectives() if self.smaller else [])


@dataclass(frozen=True)
class PipelineProgram:
    """One rank's part of a pipeline: the stages that it runs, by their number, and what cuts a batch into
    micro-batches."""

    rank: int
    micro: MicroBatched
    stages: dict[int, StageProgram]
    leaves: tuple[frozenset[str], ...]  # by place along the axis: parameters and buffers that its stages read

    def elsewhere(self, place: int) -> frozenset[str]:
        """Return parameters and buffers that only stages of other places read. All have what no stage reads."""
        return frozenset().union(*self.leaves) - self.leaves[place]

    def collectives(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """List the collectives of all stages as `RankProgram.collectives` does."""
        return [c for program in self.stages.values() for c in program.collectives()]


def stages_of(captured: Captured, plan: Plan) -> tuple[MicroBatched, list[Stage]]:
    """Cut the graph of the whole batch into the stages of a plan. Raises MicroBatchError, StageError."""
    micro = pass_manager.run_pass("micro_batch", micro_batch, captured, plan.pipeline.micro_batches)
    check_decisions(micro.captured.graph, plan.sharding)
    return micro, pass_manager.run_pass("cut", cut, micro.captured.graph_module, plan.pipeline.cuts)


def smaller_stages_of(micro: MicroBatched, plan: Plan) -> list[Stage] | list[None]:
    """Cut the graph of the micro-batches with one sample less into the same stages; return Nones if there are none."""
    if micro.smaller is None:
        return [None] * (len(plan.pipeline.cuts) + 1)
    check_decisions(micro.smaller.graph, plan.sharding)
    return pass_manager.run_pass("cut", cut, micro.smaller.graph_module, plan.pipeline.cuts)


def lower_pipeline(
    captured: Captured, plan: Plan, rank: int, check: bool | None = None, waits: bool = False
) -> PipelineProgram:
    """Return what a rank runs of a pipeline; with `waits` gradients of one micro-batch alone wait for their reduction
    too. Raises as `stages_of` and `lower` do."""
    micro, stages = stages_of(captured, plan)
    smaller = smaller_stages_of(micro, plan)
    pipeline, coordinate = plan.pipeline, plan.mesh.coordinate(rank)
    here = rank_inside(plan.sharding.mesh, coordinate)
    leaves = [
        frozenset().union(*(stages[i].leaves for i in pipeline.stages_of(place))) for place in range(pipeline.ranks)
    ]
    mine = pipeline.stages_of(coordinate[pipeline.axis])
    programs = {i: lower_stage(stages[i], micro, plan, here, check, waits, smaller[i]) for i in mine}
    return PipelineProgram(rank, micro, programs, tuple(leaves))


def lower_stage(stage: Stage, micro: MicroBatched, plan: Plan, rank: int, check: bool | None = None,
                waits: bool = False, smaller: Stage | None = None) -> StageProgram:  # fmt: skip
    """Return one rank's graphs for one stage, with those for micro-batches of one sample less if it has `smaller`.
    `rank`: in the stage's mesh. Raises VerifyError if the two share less than copies and gradients."""
    program = _lowered(stage, micro, plan, rank, check, waits)
    if smaller is None:
        return program
    less = _lowered(smaller, micro, plan, rank, check, waits)
    if _shared(program) != _shared(less):
        raise VerifyError(
            f"stage {stage.index} makes other copies or gradients of smaller micro-batches", mesh=plan.mesh
        )
    return replace(program, smaller=replace(less, copies=None))


def _shared(program: StageProgram) -> tuple:
    """Return what micro-batches of all sizes have in common: copies of parameters and gradients, by name, local shape
    and layout."""
    made = output_node(program.copies.graph) if program.copies is not None else None
    copies = (
        [] if made is None else [(r.name, tuple(v.meta["val"].shape)) for v, r in zip(made.args[0], made.meta["roles"])]
    )
    return copies, None if program.deferred is None else program.deferred.layouts


def _lowered(stage: Stage, micro: MicroBatched, plan: Plan, rank: int, check: bool | None, waits: bool) -> StageProgram:
    captured = replace(micro.captured, graph_module=stage.joint)
    plan = replace(plan, mesh=plan.sharding.mesh, sharding=stage.sharding(plan.sharding))
    whole = lower(captured, plan, rank, check)
    waits = (waits or micro.micro_batches > 1) and whole.parts.backward is not None
    deferred = lower_deferred(captured, plan, rank, whole.parts.saved) if waits else None
    forward, copies = compute_once(whole.parts.forward) if micro.micro_batches > 1 else (whole.parts.forward, None)
    return StageProgram(stage, captured, plan, whole, forward, copies, deferred)
