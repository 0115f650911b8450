"""A stage's graphs on this rank, loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..codegen.rank_program import GraphKey, StageProgram
from ..processes.process_groups import ProcessGroups
from .loaded import LoadedGraph

PHASES = {"C": "copies", "F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients",
          "R": "reduction"}  # fmt: skip


class StageGraphs:
    """Runs the graphs of `program`, as a StageExecutor of one rank asks for it. `splits`: also those of a backward in
    two parts. `loaded`: those that are loaded already."""

    def __init__(
        self,
        program: StageProgram,
        groups: ProcessGroups,
        device: torch.device,
        splits: bool,
        loaded: Mapping[GraphKey, LoadedGraph] | None = None,
    ):
        self.loaded, what = dict(loaded or {}), f"of stage {program.stage.index}"
        modules = {key: program.graph(key) for key in program.keys(splits) if key not in self.loaded}
        for key, module in modules.items():  # which binds the groups in the module itself: all are made before
            self.loaded[key] = LoadedGraph(module, groups, device, f"{PHASES[key.kind]} {what}")

    def __call__(self, key: GraphKey, arguments: list[list[Tensor]]) -> list:
        return [self.loaded[key].run(values) for values in arguments]

    def expert_rows(self) -> Iterator[tuple[str, list[int]]]:
        """Iterate over the layers of experts of each forward graph, with the rows of its latest forwards."""
        for _, graph in sorted(self.loaded.items()):
            if graph.rows is not None:
                yield from graph.rows.rows().items()

    def compile(self, options: Mapping[str, object]) -> None:
        """Run the graphs through torch.compile, with these options of it, but for those that make copies."""
        for key, graph in self.loaded.items():
            if key.kind != "C":
                graph.compile(options)
