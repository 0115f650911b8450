"""A rank's graph through torch.compile.

torch.compile takes a graph as it is, collectives and all, but for ops that return what they write to: an all-reduce in
place becomes one that copies, which Inductor may turn into one in place again. Gathers are collectives that it knows
again; of truths they go as bytes, since Inductor promotes the two arguments of a gather, a tensor and the number of
devices, to one type. It leaves collectives where they are (autopar/_torch/compiling.py): it would put each next to its
wait, and nothing would run beside it.

Inductor takes the graph without Dynamo, once for each form of its arguments, and each argument is freed after its last
use (autopar/_torch/inductor.py). Other backends get it from Dynamo, which holds all arguments until the graph has run.

With mode="reduce-overhead" the forward and the backward of a model are recorded as CUDA graphs and replayed. They share
a pool of memory: values that a forward saves stay there until its backward, and what leaves the two is copied out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .. import _torch
from .._torch import c10d
from ..errors import CompilerError
from ..ir.graph import operand, output_node
from ..ops import autopar
from ..ops.fused_forms import FUSED
from ..passes.distribute.heavy_ops import is_product
from ..processes.guarded import BACKWARD

aten = torch.ops.aten
CUDA_GRAPHS = "triton.cudagraphs"  # as Inductor names them
AS_COMPILED = {
    c10d.all_reduce_.default: c10d.all_reduce.default,
    autopar.gather_by_broadcasts.default: c10d.all_gather_into_tensor.default,
    autopar.gather_by_sends.default: c10d.all_gather_into_tensor.default,
    autopar.exchange_by_sends.default: c10d.all_to_all_single.default,
    float: torch.sym_float,  # of a size, which would become a constant
}
OpenDims = Mapping[int, Collection[int]]  # by placeholder, its dims of several sizes, 0 of a number


def compiled_graph(
    module: fx.GraphModule, phase: str, options: Mapping[str, Any], open_dims: OpenDims
) -> Callable[[list], Sequence]:
    """Return the graph of a module behind torch.compile with these options, called like that of codegen.boxed. What it
    is called with stays as it is if compiling fails, with a CompilerError."""
    with _explained(phase):
        ordered = _torch.in_given_order(options, is_product)
        if ordered.keys() <= {"options", "dynamic", "fullgraph"} and not ordered.get("dynamic"):
            return _ByInductor(_as_compiled(module, FUSED), phase, ordered.get("options", {}), open_dims)
        fused = FUSED if options.get("backend", "inductor") == "inductor" else {}  # others would write all of it
        return _by_dynamo(_as_compiled(module, fused), phase, {"dynamic": bool(open_dims), **ordered})


class _ByInductor:
    """A graph that Inductor compiles for each form of the values that it is called with."""

    def __init__(self, module: fx.GraphModule, phase: str, options: Mapping[str, Any], open_dims: OpenDims) -> None:
        self.module, self.phase, self.open_dims = module, phase, open_dims
        self.options = _torch.inductor_options(options)
        _torch.lower_as_collective(autopar.exchange_rows.default)
        self.replay = _replay(module, phase) if self.options.get(CUDA_GRAPHS) else None
        self.options[CUDA_GRAPHS] = self.replay is not None
        self.leaving = _leaving(module) if self.replay else ()
        self.programs: dict[tuple, _torch.InductorProgram] = {}

    def __call__(self, values: list) -> Sequence:
        form = tuple((v.shape, v.stride(), v.dtype) if isinstance(v, torch.Tensor) else v for v in values)
        program = self.programs.get(form)
        if program is None:
            program = self.programs[form] = self._serving(form, values)
        if self.replay is None:
            return program.run(values)
        _recorded_steps.enter(self.replay.is_backward)
        results = list(program.run(values))
        for at in self.leaving:
            results[at] = results[at].clone()
        return results

    def _serving(self, form: tuple, values: list) -> _torch.InductorProgram:
        """Return a program that was made for values of other sizes, or a new one."""
        for known, program in self.programs.items():
            if _types(known) == _types(form) and program.serves(values):
                return program
        with _explained(self.phase, (Exception,)):
            return _torch.InductorProgram(self.module, values, self._open(values), self.options, self.replay)

    def _open(self, values: list) -> OpenDims:
        """Return the dims that have several sizes, as was said or as calls had them."""
        found = {place: {*self.open_dims.get(place, ())} for place in range(len(values))}
        for known in self.programs:
            for place, (of, value) in enumerate(zip(known, values)):
                if isinstance(value, torch.Tensor):
                    found[place] |= {dim for dim, (a, b) in enumerate(zip(of[0], value.shape)) if a != b}
        return found


class _RecordedSteps:
    """Tells torch where a step of recorded graphs begins, whose values it may then write over: with a forward, unless
    that of another one has no backward yet."""

    def __init__(self) -> None:
        self.is_pending = False

    def enter(self, is_backward: bool) -> None:
        if not is_backward and not self.is_pending:
            torch.compiler.cudagraph_mark_step_begin()
        self.is_pending = not is_backward


_recorded_steps = _RecordedSteps()  # of all models


def _replay(module: fx.GraphModule, phase: str) -> _torch.Replay | None:
    """Return how the graph of a phase is recorded: not those of stages, of which several forwards wait for their
    backwards, nor a forward that has none."""
    if phase not in ("forward", BACKWARD):
        return None
    roles = [node.meta.get("role") for node in module.graph.find_nodes(op="placeholder")]
    fixed = tuple(place for place, role in enumerate(roles) if role and role.kind in ("parameter", "buffer"))
    return _torch.Replay(fixed, phase == BACKWARD)


def _leaving(module: fx.GraphModule) -> list[int]:
    """Return the positions of results that are not saved for the backward, which outlive the step."""
    return [at for at, role in enumerate(output_node(module.graph).meta["roles"]) if role is not None]


def _types(form: tuple) -> list[torch.dtype]:
    return [of[-1] for of in form if isinstance(of, tuple)]


def _by_dynamo(module: fx.GraphModule, phase: str, options: Mapping[str, Any]) -> Callable[[list], Sequence]:
    run = torch.compile(_with_own_code(module), **options)  # fullgraph would trace what handles errors of collectives

    def run_boxed(values: list) -> Sequence:
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


def _as_compiled(module: fx.GraphModule, fused: Mapping[Any, Callable]) -> fx.GraphModule:
    """Return a copy of a module with the ops that torch.compile knows."""
    module = copied(module)
    for node in list(module.graph.nodes):
        node.target = fused.get(node.target) or AS_COMPILED.get(node.target, node.target)
        if node.target is c10d.all_gather_into_tensor.default and operand(node).meta["val"].dtype == torch.bool:
            _gather_bytes(node)
    module.recompile()
    return module


def _gather_bytes(start: fx.Node) -> None:
    """Let a gather of truths send bytes."""
    graph, (wait,) = start.graph, start.users
    with graph.inserting_before(start):
        start.args = graph.call_function(aten.view.dtype, (operand(start), torch.uint8)), *start.args[1:]
    with graph.inserting_after(wait):
        truths = graph.call_function(aten.view.dtype, (wait, torch.bool))
    wait.replace_all_uses_with(truths, delete_user_cb=lambda user: user is not truths)


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """Return a module with a graph of its own, that takes its arguments one by one, and the same constants."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {})).meta = dict(output_node(module.graph).meta)
    return _torch.graph_module(module, graph)


@contextlib.contextmanager
def _explained(phase: str, failures: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    failures = failures or _torch.compiler_errors()
    try:
        yield
    except failures as error:
        raise CompilerError(
            f"torch.compile failed on the {phase} graph: {type(error).__name__}: {_first_words(error)}",
            fix="leave out compile() or execution='compiled', or choose another backend: compile(backend='aot_eager')",
        ) from error


def _first_words(error: BaseException) -> str:
    return " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
