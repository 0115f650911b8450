"""A rank's graph, ready to run: with process groups for the logical ones, on its device, watched; through torch.compile
(autopar/runtime/compiled_graph.py) on demand, and by itself on GPUs (autopar/planner/options.py)."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self

import torch
from torch import fx

from .._torch import no_autocast
from ..codegen.buckets_in_place import buckets_in_place
from ..codegen.direct_calls import compile_directly
from ..codegen.expand_last import expand_last
from ..codegen.follow_size import Line, Sizes, followed
from ..codegen.python_code import as_on_gloo, bind_groups, boxed, group_names, reductions_beside
from ..codegen.row_counts import RowCounter
from ..codegen.write_over import write_over
from ..errors import CompilerError
from ..processes import watch
from ..processes.guarded import BACKWARD, FORWARDS
from ..processes.process_groups import REDUCTIONS, ProcessGroups
from .compiled_graph import OpenDims, compiled_graph, copied

FALLS_BACK = "falls_back"  # beside the options of torch.compile: whether a graph may run op by op if that fails


class LoadedGraph:
    """Takes the arguments as one list, which it empties, and returns the results. `phase`: backward, or one of
    FORWARDS, or what a stage's is called. `rows`: counts those of experts, of a forward that has run and was not
    compiled."""

    def __init__(self, module: fx.GraphModule, groups: ProcessGroups, device: torch.device, phase: str):
        # a rank that skips a backward, or makes a forward more, must not meet what others send in theirs
        lane = "forward" if phase in FORWARDS else ""
        names = group_names(module)
        if groups.are_gloo:
            as_on_gloo(module, _between_machines(names, groups))
        # not of stages, whose graphs differ: all ranks make a group together
        is_alike = phase == BACKWARD and not groups.are_gloo
        beside = [str(n.args[-1]) for n in reductions_beside(module)] if is_alike else []
        of_reductions = groups.bind(beside, REDUCTIONS) if beside else None
        self.module = bind_groups(module, groups.bind(names, lane), of_reductions).to(device)
        self.mesh = str(groups.mesh)
        self.options: Mapping[str, object] | None = None  # of torch.compile, if the graph goes through it
        self.open_dims: OpenDims = {}
        self.load(phase)

    def load(self, phase: str) -> None:
        """Make the module ready to run. Its Python is compiled when it first runs: what a program that follows sizes is
        made of never does."""
        self.module, self.phase, self.run = boxed(self.module), phase, self._first_run
        self.rows: RowCounter | None = None

    def __call__(self, values: list):
        return self.run(values)

    def _first_run(self, values: list):
        module, forward = self._op_by_op()
        self.run = _without_autocast(watch.guarded(module, self.phase, self.mesh, forward))
        return self.run(values)

    def _op_by_op(self) -> tuple[fx.GraphModule, Callable]:
        """Return a module with the graph's Python, and what runs it."""
        module = boxed(copied(self.module))  # torch.compile, and what follows sizes, takes the graph as it was
        buckets_in_place(module)
        if not self.open_dims:  # else a value may be broadcast in one size and not in another
            expand_last(module)
            write_over(module)
        rows = RowCounter(module.graph) if self.phase.startswith("forward") else None
        self.rows = rows if rows and rows.layers else None
        compile_directly(module, self.rows.functions() if self.rows else {})
        return module, _counted(self.rows, module.forward) if self.rows else module.forward

    @classmethod
    def following(cls, graphs: Mapping[Sizes, Self]) -> tuple[Self, frozenset[Line]]:
        """Return the graph that follows the sizes, which it takes last, and the lines of its numbers, given the graphs
        for some sizes. Raises Differs."""
        made = copy.copy(graphs[max(graphs)])
        made.module, lines = followed({size: graph.module for size, graph in graphs.items()})
        made.open_dims = _open_dims(made.module, [graph.module for graph in graphs.values()])
        made.load(made.phase)
        if made.options is not None:  # once for all sizes
            made.compile(made.options)
        return made, lines

    def compile(self, options: Mapping[str, object]) -> None:
        """Run the graph through torch.compile, with these options of it, from the next call on; that call compiles.
        With FALLS_BACK among them it runs op by op if that fails."""
        self.options, self.rows = options, None
        given = {name: value for name, value in options.items() if name != FALLS_BACK}
        compiled = compiled_graph(self.module, self.phase, given, self.open_dims)
        self._watch(self._or_op_by_op(compiled) if options.get(FALLS_BACK) else compiled)

    def _watch(self, run: Callable) -> None:
        """Let calls run what the graph was compiled to."""
        self.run = _without_autocast(watch.guarded(self.module, self.phase, self.mesh, run))

    def _or_op_by_op(self, compiled: Callable) -> Callable:
        """Return what runs the graph compiled, and op by op from where that fails."""

        def run(values: list):
            try:
                return compiled(values)
            except CompilerError as error:  # nothing has run
                _warn_once(f"{error.message}; it runs op by op")
                self.options, self.run = None, self._first_run
                return self._op_by_op()[1](values)

        return run


def _open_dims(module: fx.GraphModule, programs: Iterable[fx.GraphModule]) -> OpenDims:
    """Return the dims of what a program takes that differ between those for some sizes, and the sizes, its last
    arguments."""
    count = len(module.graph.find_nodes(op="placeholder"))
    all_values = [[n.meta.get("val") for n in p.graph.find_nodes(op="placeholder")] for p in programs]
    found = {place: _differing_dims(values) for place, values in enumerate(zip(*all_values))}
    return found | {place: {0} for place in range(len(found), count)}


def _differing_dims(values: Sequence[object]) -> set[int]:
    shapes = [value.shape for value in values if isinstance(value, torch.Tensor)]
    return {dim for dim, sizes in enumerate(zip(*shapes)) if len({*sizes}) > 1}


@functools.cache
def _warn_once(text: str) -> None:
    if not _warn_once.cache_info().currsize:  # other graphs would fail alike
        warnings.warn(text, stacklevel=3)


def _between_machines(names: Iterable[str], groups: ProcessGroups) -> set[str]:
    """Return those of the logical groups whose members, with this rank, are on several machines."""
    machines, _ = watch.machines()
    ranks = {name: groups.mesh.group(tuple(name.split(",")), groups.rank) for name in names if any(machines)}
    return {name for name, members in ranks.items() if len({machines[rank] for rank in members}) > 1}


def _without_autocast(run: Callable) -> Callable:
    """Return `run` with autocast off inside: a graph has every cast that it needs."""

    def run_as_it_is(values: list):
        with no_autocast():
            return run(values)

    return run_as_it_is


def _counted(rows: RowCounter, run: Callable) -> Callable:
    """Return `run` with the rows of its experts counted."""

    def run_from_the_first(values: list):
        rows.begin()
        return run(values)

    return run_from_the_first
