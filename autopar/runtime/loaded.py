"""A rank's graph, ready to run: with process groups for the logical ones, on its device, watched; through torch.compile
on demand, and by itself on GPUs (autopar/planner/options.py).

torch.compile takes a graph as it is, collectives and all, but for ops that return what they write to: an all-reduce in
place becomes one that copies, which Inductor may turn into one in place again. Gathers are collectives that it knows
again. Inductor leaves collectives where they are (autopar/_torch/compiling.py): it would put each next to its wait, and
nothing would run beside it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Self

import torch
from torch import fx

from .. import _torch
from .._torch import c10d, no_autocast
from ..codegen.buckets_in_place import buckets_in_place
from ..codegen.direct_calls import compile_directly
from ..codegen.follow_size import Line, Sizes, followed
from ..codegen.python_code import as_on_gloo, bind_groups, boxed, group_names, reductions_beside
from ..codegen.row_counts import RowCounter
from ..errors import CompilerError
from ..ops import autopar
from ..ops.fused_forms import FUSED
from ..passes.distribute.heavy_ops import is_product
from ..processes import watch
from ..processes.guarded import BACKWARD, FORWARDS
from ..processes.process_groups import REDUCTIONS, ProcessGroups

FALLS_BACK = "falls_back"  # beside the options of torch.compile: whether a graph may run op by op if that fails
AS_COMPILED = {
    c10d.all_reduce_.default: c10d.all_reduce.default,
    autopar.gather_by_broadcasts.default: c10d.all_gather_into_tensor.default,
    autopar.gather_by_sends.default: c10d.all_gather_into_tensor.default,
    autopar.exchange_by_sends.default: c10d.all_to_all_single.default,
}


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
        module = boxed(_copy(self.module))  # torch.compile, and what follows sizes, takes the graph as it was
        buckets_in_place(module)
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
        made.load(made.phase)
        if made.options is not None:  # once for all sizes
            made.compile({"dynamic": True, **made.options})
        return made, lines

    def compile(self, options: Mapping[str, object]) -> None:
        """Run the graph through torch.compile, with these options of it, from the next call on; that call compiles.
        With FALLS_BACK among them it runs op by op if that fails."""
        self.options, self.rows = options, None
        given = {name: value for name, value in options.items() if name != FALLS_BACK}
        falls_back = bool(options.get(FALLS_BACK))
        self._watch(self._or_op_by_op(given) if falls_back else _compiled(self.module, self.phase, given))

    def _watch(self, run: Callable) -> None:
        """Let calls run what the graph was compiled to."""
        self.run = _without_autocast(watch.guarded(self.module, self.phase, self.mesh, run))

    def _or_op_by_op(self, options: Mapping[str, object]) -> Callable:
        """Return what compiles the graph at its first call, and runs it op by op if that fails."""

        def run_first(values: list):
            arguments = list(values)
            try:
                compiled = _compiled(self.module, self.phase, options)
                results = compiled(values)
            except CompilerError as error:
                _warn_once(f"{error.message}; it runs op by op")
                self.options, self.run = None, self._first_run
                return self._op_by_op()[1](arguments)
            self._watch(compiled)
            return results

        return run_first


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


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    """Return a module with a graph of its own, that takes its arguments one by one, and the same constants."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return _torch.graph_module(module, graph)


def _compiled(module: fx.GraphModule, phase: str, options: Mapping[str, object]) -> Callable:
    """Return the graph of a module behind torch.compile, called like that of codegen.boxed."""
    module = _copy(module)
    fused = FUSED if options.get("backend", "inductor") == "inductor" else {}  # others would write all of it
    for node in module.graph.nodes:
        node.target = fused.get(node.target) or AS_COMPILED.get(node.target, node.target)
    module.recompile()
    with _explained(phase):  # without fullgraph=True, under which Dynamo traces what handles the error of a collective
        run = torch.compile(_with_own_code(module), **_torch.in_given_order({"dynamic": False, **options}, is_product))

    def run_boxed(values: list):
        arguments = tuple(values)
        values.clear()
        with _explained(phase):
            return run(*arguments)

    return run_boxed


def _with_own_code(module: fx.GraphModule) -> Callable:
    """Return a function that calls a module, with code that no other has: Dynamo counts compilations by code, and
    runs what is beyond a few op by op."""

    def run(*arguments):
        return module(*arguments)

    run.__code__ = run.__code__.replace()
    return run


@contextlib.contextmanager
def _explained(phase: str) -> Iterator[None]:
    try:
        yield
    except _torch.compiler_errors() as error:
        raise CompilerError(
            f"torch.compile failed on the {phase} graph: {type(error).__name__}: {_first_words(error)}",
            fix="leave out compile() or execution='compiled', or choose another backend: compile(backend='aot_eager')",
        ) from error


def _first_words(error: BaseException) -> str:
    return " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
