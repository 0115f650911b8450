"""The step of a pipeline, or of micro-batches, for calls of any sizes, from those for a few."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ..codegen.follow_size import Differs, Line, Sizes, follow, followed
from ..codegen.rank_program import GraphKey, StageProgram
from ..schedule.actions import Action
from .outputs import OutputForms
from .pipeline_step import PipelineStep
from .rank_graphs import RankGraphs
from .stage_executor import StageExecutor
from .stage_links import StageLinks

Form = tuple[Sequence[int | Line], torch.dtype]  # of a message
MOST = 64  # of the steps that are kept, one for each sizes that were met


class SizedPipeline:
    """Makes the steps of a pipeline. `newest`: one of those that it was made of; `graphs`: of each stage, which take
    the sizes last; `totals`, `tail`: of the whole batch, if there are any; `forms`: of the outputs."""

    def __init__(
        self,
        newest: PipelineStep,
        graphs: Mapping[int, RankGraphs],
        messages: Mapping[int, Mapping[GraphKey, Mapping[str, Form]]],
        samples: int | Line,
        totals: fx.GraphModule | None,
        tail: fx.GraphModule | None,
        forms: Callable[[Sizes], OutputForms],
    ):
        self.newest, self.graphs, self.messages = newest, graphs, messages
        self.samples, self.totals, self.tail, self.forms = samples, totals, tail, forms
        self.is_deferring = newest.is_deferring  # when the graphs were loaded
        self.made: dict[Sizes, PipelineStep] = {}

    @classmethod
    def following(cls, steps: Mapping[Sizes, PipelineStep]) -> tuple[SizedPipeline, frozenset[Line]]:
        """Return what makes the steps for any sizes, and the lines of its numbers, given those for some, of one plan.
        Raises Differs."""
        newest, lines = steps[max(steps)], set[Line]()
        graphs: dict[int, RankGraphs] = {}
        messages: dict[int, dict[GraphKey, Mapping[str, Form]]] = {}
        if any(step.is_deferring != newest.is_deferring for step in steps.values()):
            raise Differs("gradients wait for their reduction at one of the sizes alone")
        if any(step.micro.chunks for step in steps.values()):
            raise Differs("the rows are cut into chunks of their tokens, which are kept for each other")
        for i, of_stage in newest.graphs.items():
            graphs[i], more = RankGraphs.following({sizes: step.graphs[i] for sizes, step in steps.items()})
            lines |= more
            messages[i] = {}
            for key in of_stage.loaded:
                if key.kind in "FB" and not key.adds:
                    forms = {sizes: _forms(step.program.stages[i], key) for sizes, step in steps.items()}
                    messages[i][key] = follow(forms)
                    shapes = (shape for shape, _ in messages[i][key].values())
                    lines |= {number for shape in shapes for number in shape if isinstance(number, Line)}
        samples = follow({sizes: step.micro.samples for sizes, step in steps.items()})
        totals, more = _followed({sizes: step.micro.totals for sizes, step in steps.items()})
        lines |= more
        tails = {sizes: step.micro.tail for sizes, step in steps.items()}
        tail, more = _followed({sizes: None if one is None else one.graph_module for sizes, one in tails.items()})
        lines |= more
        forms_at, more = OutputForms.following({sizes: step.output_forms for sizes, step in steps.items()})
        return cls(newest, graphs, messages, samples, totals, tail, forms_at), frozenset(lines | more)

    def at(self, sizes: Sizes) -> PipelineStep:
        """Return the step for some sizes that the lines serve."""
        if sizes not in self.made:
            if len(self.made) == MOST:
                self.made.pop(next(iter(self.made)))
            self.made[sizes] = self._made(sizes)
        return self.made[sizes]

    def _made(self, sizes: Sizes) -> PipelineStep:
        made, newest = copy.copy(self.newest), self.newest
        samples = self.samples.whole(sizes) if isinstance(self.samples, Line) else self.samples
        totals: Any = None if self.totals is None else lambda *inputs: self.totals(*inputs, *sizes)
        tail: Any = newest.micro.tail
        if self.tail is not None:
            tail = replace(tail, run=lambda *values: self.tail(*values, *sizes))
        made.micro, made.follows = replace(newest.micro, samples=samples, totals=totals, tail=tail), self
        made.stages = {
            i: _SizedStage(stage.program, self.graphs[i], made.micro.is_smaller, self.messages[i], sizes)
            for i, stage in newest.stages.items()
        }
        made.take_forms(self.forms(sizes))
        old = newest.links
        made.links = StageLinks(made.stages, old.rank, old.rank_of_stage, old.groups, old.device, made.schedule)
        made.gradients = copy.copy(newest.gradients)
        made.gradients.stages = made.stages
        return made


class _SizedStage(StageExecutor):
    """A stage at some sizes, which its graphs take behind all else."""

    def __init__(
        self,
        program: StageProgram,
        graphs: RankGraphs,
        is_smaller: Callable[[int], bool],
        messages: Mapping[GraphKey, Mapping[str, Form]],
        sizes: Sizes,
    ):
        def run(key: GraphKey, arguments: list[list[Any]]) -> list:
            for values in arguments:
                values += sizes
            return graphs(key, arguments)

        super().__init__([program], run, is_smaller)
        self.messages, self.sizes = messages, sizes

    def expects(self, message: Action) -> Mapping[str, Tensor]:
        """Return what a message to the stage consists of: tensors of this rank's shapes and dtypes by name."""
        forms = self.messages[GraphKey(message.kind, self.is_smaller(message[2]))] if super().expects(message) else {}
        return {
            name: torch.empty(
                [n.whole(self.sizes) if isinstance(n, Line) else n for n in shape], dtype=dtype, device="meta"
            )
            for name, (shape, dtype) in forms.items()
        }


def _followed(found: Mapping[Sizes, fx.GraphModule | None]) -> tuple[fx.GraphModule | None, frozenset[Line]]:
    """Return a graph of the whole batch that takes the sizes last, and the lines of its numbers. Raises Differs where
    some of the sizes alone have it."""
    graphs = {sizes: graph for sizes, graph in found.items() if graph is not None}
    if graphs and len(graphs) < len(found):
        raise Differs("some of the sizes alone compute something of the whole batch")
    return followed(graphs) if graphs else (None, frozenset())


def _forms(program: StageProgram, key: GraphKey) -> dict[str, Form]:
    """Return the shapes and types of what a stage receives for one of its graphs, by name."""
    stage = program.sizes[key.is_smaller].stage
    names = stage.received if key.kind == "F" else stage.arriving
    values = {n.name: n.meta["val"] for n in program.graph(key).graph.nodes if n.op == "placeholder"}
    return {name: (list(values[name].shape), values[name].dtype) for name in names}
