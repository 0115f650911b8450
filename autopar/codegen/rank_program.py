"""Hold what one rank runs: the graphs of a plan of one program, or those of its stages where there are micro-batches.

autopar/compiler.py makes them, for the runtime its own rank's and for the simulator those of all ranks, so that both
run the same graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from torch import fx

from ..frontend.export import Captured
from ..ir.compiler_pass import CAPTURE, Pass
from ..ir.graph import output_node
from ..ir.layout import Layout
from ..passes.distribute.partition import Parts
from ..passes.pipeline.add_gradients import add_gradients, is_gradient
from ..passes.pipeline.micro_batch import MicroBatched
from ..passes.pipeline.side_by_side import side_by_side
from ..passes.pipeline.split_backward import SplitBackward, split_backward
from ..passes.pipeline.stages import Stage
from ..plans.plan import Plan
from ..schedule.actions import Action
from . import pass_manager
from .python_code import is_collective
from .verify_graph import collective_call

SPLIT_BACKWARD = Pass(  # for schedules that run the parts apart
    "split_backward", split_backward, takes=CAPTURE, needs="an axis pp: --mesh pp=2,dp=2"
)
SIDE_BY_SIDE = Pass(  # for schedules in pairs
    "side_by_side", side_by_side, takes=CAPTURE, needs="rows of experts that are sent and --micro-batches 2"
)
OF_ACTIONS = SPLIT_BACKWARD, SIDE_BY_SIDE


SAME_STAGE = -1


class GraphKey(NamedTuple):
    """One of the graphs of a rank, or of one of its stages. `kind`: C for what makes the copies that all micro-batches
    share, F, B, I and W as in autopar/schedule/actions.py, P for a pair of F and B, R for what reduces the sums of
    gradients. `is_smaller`: for micro-batches of one sample less; of the backward in a pair `is_smaller_before` says
    whether that is one, and `stage_before` of which stage it is. `adds`: gradients of parameters are added to sums,
    which the graph takes too. `waits`: it leaves them unreduced, and there is one that reduces them."""

    kind: str
    is_smaller: bool = False
    adds: bool = False
    waits: bool = False
    is_smaller_before: bool = False
    stage_before: int = SAME_STAGE

    @property
    def makes_gradients(self) -> bool:
        """Return whether gradients of parameters are made, and added to nothing."""
        return self.kind in ("B", "W", "P") and not self.adds


def pair_of(forward: GraphKey, backward: GraphKey, stage_before: int = SAME_STAGE) -> GraphKey:
    """Return the key of a forward and a backward as one graph. `stage_before`: of the backward, if it is another."""
    sizes = {"is_smaller": forward.is_smaller, "is_smaller_before": backward.is_smaller}
    return backward._replace(kind="P", **sizes, stage_before=stage_before)


FORWARD, BACKWARD, WAITING, REDUCE = GraphKey("F"), GraphKey("B"), GraphKey("B", waits=True), GraphKey("R")


@dataclass(frozen=True)
class RankProgram:
    """One rank's graphs: a forward and a backward."""

    rank: int
    parts: Parts

    @property
    def graphs(self) -> dict[GraphKey, fx.GraphModule]:
        """Return the graphs by their keys."""
        found = {FORWARD: self.parts.forward}
        return found if self.parts.backward is None else found | {BACKWARD: self.parts.backward}

    def collectives(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return (group, what, shape) of each collective in the order of the calls: "dp", "forward all_reduce(sum)
        float32 over dp: mm_1", (8, 4). All ranks have the same groups and texts, and the ranks of one group the same
        shapes too."""
        return collectives_of(("forward", self.parts.forward), ("backward", self.parts.backward))

    def elsewhere(self, pp_rank: int) -> frozenset[str]:
        """Return what other ranks along a pipeline have alone: nothing without one."""
        return frozenset()


@dataclass(frozen=True)
class LoweredProgram(RankProgram):
    """A program that was lowered here, with the local joint graph that it was cut from."""

    local: fx.GraphModule


def collectives_of(*graphs: tuple[str, fx.GraphModule | None]) -> list[tuple[str, str, tuple[int, ...]]]:
    """List the collectives of graphs with their names, as `RankProgram.collectives` does."""
    found = []
    for phase, part in graphs:
        for node in filter(is_collective, part.graph.nodes if part is not None else ()):
            group, op, reduction, dtype, shape = collective_call(node)
            op = f"{op}({reduction})" if reduction else op
            tensor = node.meta["collective"].tensor if "collective" in node.meta else node.name
            found.append((group, f"{phase} {op} {dtype} over {group}: {tensor}", shape))
    return found


@dataclass(frozen=True)
class DeferredProgram:
    """One rank's graphs for gradients that are added up before they are reduced: `backward` takes what the backward of
    the RankProgram takes and leaves the gradients of the parameters `layouts` in these layouts; `reduce` takes those,
    in this order, and gives them as the RankProgram would."""

    backward: fx.GraphModule
    reduce: fx.GraphModule
    layouts: dict[str, Layout]

    @property
    def graphs(self) -> dict[GraphKey, fx.GraphModule]:
        """Return the graphs by their keys, beside those of the RankProgram."""
        return {WAITING: self.backward, REDUCE: self.reduce}

    def collectives(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """List the collectives as `RankProgram.collectives` does."""
        return collectives_of(("backward", self.backward), ("backward", self.reduce))


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
    def alone(self) -> StageProgram:
        """Return the program whose forward makes all copies of parameters itself, for micro-batches that do not read
        the same versions of them."""
        return replace(self, forward=self.whole.parts.forward, copies=None)

    @property
    def saved(self) -> tuple[str, ...]:
        """Return the names of the values that the forward saves for the backward."""
        return self.whole.parts.saved

    @cached_property
    def split(self) -> SplitBackward:
        """Return the backward in two: gradients that the stage before reads, and gradients of parameters."""
        return pass_manager.run(SPLIT_BACKWARD, self.backward)

    def graph(self, key: GraphKey, others: Mapping[int, StageProgram] = {}) -> fx.GraphModule:
        """Return the graph of a key, one of `graphs`, or of a pair of two of them. `others`: stages of the rank."""
        if key.kind == "P":
            behind = self if key.stage_before == SAME_STAGE else others[key.stage_before]
            backward = behind.graph(GraphKey("B", key.is_smaller_before, key.adds))
            turns = self.plan.pipeline.pairs.turns if self.plan.pipeline.pairs else ()
            return pass_manager.run(SIDE_BY_SIDE, self.graph(GraphKey("F", key.is_smaller)), backward, turns)
        if key.adds:
            return add_gradients(self.graph(key._replace(adds=False)))
        program = self.sizes[key.is_smaller]
        if key.kind in "IW":
            return program.split.input if key.kind == "I" else program.split.weight
        if key.kind == "R":
            return self.deferred.reduce
        return {"C": program.copies, "F": program.forward, "B": program.backward}[key.kind]

    def graphs(
        self, splits: bool, pairs: Sequence[GraphKey] = (), others: Mapping[int, StageProgram] = {}
    ) -> dict[GraphKey, fx.GraphModule]:
        """Return all graphs by their keys, with those of a backward in two parts if a schedule `splits` it, and `pairs`
        with backwards of this stage and of `others`."""
        found = [GraphKey("C")] if self.copies is not None else []
        for is_smaller, program in zip((False, True), self.sizes):
            kinds = "" if program.backward is None else "BIW" if splits else "B"
            found += [GraphKey(kind, is_smaller) for kind in "F" + kinds]
        if self.plan.micro_batches > 1:
            roles = {key: output_node(self.graph(key).graph).meta["roles"] for key in found if key.kind in "BW"}
            found += [key._replace(adds=True) for key, made in roles.items() if any(map(is_gradient, made))]
        found += pairs
        found += [REDUCE] if self.deferred is not None and self.deferred.layouts else []
        return {key: self.graph(key, others) for key in found}

    def collectives(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """List the collectives as `RankProgram.collectives` does, stage by stage."""
        found = collectives_of(("copies", self.copies), ("forward", self.forward))
        found += self.deferred.collectives() if self.deferred else collectives_of(("backward", self.backward))
        found = [(group, f"stage {self.stage.index} {text}", shape) for group, text, shape in found]
        return found + (self.smaller.collectives() if self.smaller else [])


def pairs_of(
    stages: Mapping[int, StageProgram], order: Iterable[tuple[Action, ...]], is_smaller: Callable[[int], bool]
) -> dict[int, list[GraphKey]]:
    """Return by stage of the forward the keys of pairs in what a rank with these stages runs together; for `is_smaller`
    see StageExecutor."""
    found: dict[int, dict[GraphKey, None]] = {index: {} for index in stages}
    has_sums: set[int] = set()
    for together in order:
        last = together[-1]
        if last.kind != "B" or (program := stages[last.stage]).backward is None:
            continue
        if len(together) == 2:
            ahead, behind = (is_smaller(action.micro_batch) for action in together)
            own = together[0].stage
            keys = GraphKey("F", ahead), GraphKey("B", behind, last.stage in has_sums)
            found[own][pair_of(*keys, SAME_STAGE if own == last.stage else last.stage)] = None
        if any(map(is_gradient, output_node(program.backward.graph).meta["roles"])):
            has_sums.add(last.stage)
    return {index: [*keys] for index, keys in found.items()}


@dataclass(frozen=True)
class PipelineProgram:
    """One rank's part of a step of micro-batches: the stages that it runs, by their number, and what cuts a batch."""

    rank: int
    micro: MicroBatched
    stages: dict[int, StageProgram]
    leaves: tuple[frozenset[str], ...]  # by rank along the axis: parameters and buffers that its stages read

    def elsewhere(self, pp_rank: int) -> frozenset[str]:
        """Return parameters and buffers that only stages of other pipeline ranks read. All have what no stage reads."""
        return frozenset().union(*self.leaves) - self.leaves[pp_rank]

    def collectives(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """List the collectives of all stages as `RankProgram.collectives` does."""
        return [c for program in self.stages.values() for c in program.collectives()]
