"""The graphs of a rank's program, or of one of its stages, loaded and called by their key."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch import fx

from ..codegen.follow_size import Line, Sizes
from ..codegen.rank_program import GraphKey
from ..plans import out_of_memory
from ..plans.plan import Plan
from ..processes.process_groups import ProcessGroups
from .gradient_graph import GradientGraph
from .loaded import LoadedGraph

PHASES = {"C": "copies", "F": "forward", "B": "backward", "P": "forward beside backward", "I": "input gradients",
          "W": "weight gradients", "R": "reduction"}  # fmt: skip


class RankGraphs:
    """Runs graphs, also as a StageExecutor of one rank asks for it. `phases`: what errors call those of a kind; `plan`:
    the one that they are of, which an out-of-memory error names."""

    def __init__(self, groups: ProcessGroups, device: torch.device, phases: Mapping[str, str], plan: Plan):
        self.groups, self.device, self.phases, self.plan = groups, device, phases, plan
        self.loaded: dict[GraphKey, LoadedGraph] = {}
        self.options: Mapping[str, object] | None = None  # of torch.compile, if the graphs go through it

    @classmethod
    def of_stage(cls, index: int, groups: ProcessGroups, device: torch.device, plan: Plan) -> Self:
        """Return what runs the graphs of a stage, without any yet."""
        return cls(groups, device, {kind: f"{phase} of stage {index}" for kind, phase in PHASES.items()}, plan)

    def load(self, modules: Mapping[GraphKey, fx.GraphModule]) -> Self:
        """Load more graphs, in the place of those with the same keys, and return all. Binds the groups in the modules
        themselves."""
        for key, module in modules.items():
            kind = GradientGraph if key.makes_gradients else LoadedGraph
            self.loaded[key] = kind(module, self.groups, self.device, self.phases[key.kind])
            self._compile(key)
        return self

    def with_others(self, modules: Mapping[GraphKey, fx.GraphModule]) -> Self:
        """Return the same graphs but for these."""
        made = copy.copy(self)
        made.loaded = dict(self.loaded)
        return made.load(modules)

    def run(self, key: GraphKey, values: list) -> Any:
        """Return the results of a graph. Empties the list of its arguments."""
        try:
            return self.loaded[key](values)
        except torch.OutOfMemoryError as error:
            error.add_note(out_of_memory.note(self.plan))
            raise

    def __call__(self, key: GraphKey, arguments: list[list]) -> list:
        return [self.run(key, values) for values in arguments]

    def expert_rows(self) -> Iterator[tuple[str, list[int]]]:
        """Iterate over the layers of experts of each forward graph, with the rows of its latest forwards."""
        for _, graph in sorted(self.loaded.items()):
            if graph.rows is not None:
                yield from graph.rows.rows().items()

    def compile(self, options: Mapping[str, object]) -> None:
        """Run the graphs, also those that are loaded later, through torch.compile with these options of it, but for
        those that make copies."""
        self.options = options
        for key in self.loaded:
            self._compile(key)

    def _compile(self, key: GraphKey) -> None:
        if self.options is not None and key.kind != "C":
            self.loaded[key].compile(self.options)

    @classmethod
    def following(cls, graphs: Mapping[Sizes, RankGraphs]) -> tuple[RankGraphs, frozenset[Line]]:
        """Return graphs that follow the sizes of a call, and the lines of their numbers, given those for some sizes.
        Raises Differs."""
        made = copy.copy(graphs[max(graphs)])
        made.loaded = {}
        return made, made.follow(graphs)

    def follow(self, graphs: Mapping[Sizes, RankGraphs]) -> frozenset[Line]:
        """Load what those for some sizes all have, and is not loaded yet, such that it follows the sizes, which it
        takes last. Return the lines of its numbers. Raises Differs."""
        lines = set[Line]()
        for key in graphs[max(graphs)].loaded:
            found = {sizes: of_size.loaded[key] for sizes, of_size in graphs.items() if key in of_size.loaded}
            if key not in self.loaded and len(found) == len(graphs):
                self.loaded[key], more = type(found[max(found)]).following(found)
                lines |= more
        return frozenset(lines)
