"""Count the bytes that travel beside compute: in a plan, in a rank's graphs, in the programs that Inductor makes of
them.

What may be hidden are collectives of parameters, which wait for nothing else, those of gradients, for which nothing
waits before the step ends, and, counted by themselves, exchanges of experts' rows. A collective is overlapped if a
product of matrices, an attention or a convolution runs between its start and its wait: of a plan, between the places of
its script where it is issued and wanted. Bytes are what a device sends, by the ring formulas, on all links together. So
a plan and a graph agree if both hide the same bytes; what a bucket does to its members shows as a difference.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from .._torch import c10d
from ..codegen.rank_program import LoweredProgram
from ..cost.exchange import exchange_axes, exchange_bytes
from ..ir.graph import operand, outputs_of
from ..ops import autopar
from ..passes.distribute.heavy_ops import HEAVY, is_heavy
from ..passes.distribute.overlap import gathers_of, leading_out
from ..planner.objective.beside import Beside
from ..planner.objective.evaluate import Evaluation
from ..planner.objective.script import Script, StreamOf, scripts_of
from ..planner.objective.side_by_side import pair_script
from ..planner.objective.step_order import Execution, step_order
from ..planner.problem.problem import Problem
from ..planner.spmd.planned import Planned

CALL = re.compile(r"(?:extern_kernels|torch\.ops\.\w+)\.(\w+)")
STARTED = re.compile(r"(?:(\w+) = )?torch\.ops\.(?:_c10d_functional|autopar(?=\.exchange_rows))\.(\w+?)_?\.\w+\((\w+)")
WAITED = re.compile(r"_c10d_functional\.wait_tensor\.default\((\w+)")


@dataclass(frozen=True)
class Census:
    """Bytes of what may be hidden: all that travel, and those that have compute beside them."""

    moved: float = 0.0
    overlapped: float = 0.0

    def __add__(self, other: Census) -> Census:
        return Census(self.moved + other.moved, self.overlapped + other.overlapped)


def of_plan(planned: Planned) -> Census:
    """Count the bytes of parameters and gradients in a plan of one program."""
    problem, evaluation = planned.whole
    return sum((_of_script(problem, s) for s in scripts_of(problem, evaluation, StreamOf(planned.pricer))), Census())


def exchanges_of_plan(planned: Planned) -> Census:
    """Count the bytes of rows of experts in a plan of one program."""
    return _exchanges_of(planned, scripts_of(*planned.whole, StreamOf(planned.pricer)))


def pairs_of_plan(planned: Planned) -> Census:
    """Count the bytes of rows of experts in a forward and a backward that a plan puts side by side."""
    problem, e = planned.whole
    return _exchanges_of(planned, [pair_script(*scripts_of(problem, e, StreamOf(planned.pricer), False), e.turns)])


def _exchanges_of(planned: Planned, scripts: Sequence[Script]) -> Census:
    (problem, e), overlapped = planned.whole, 0.0
    for script in scripts:
        before = _works_before(problem, script)
        for one in script.overlapped:
            source = one.pieces[0].source
            if isinstance(source, Beside) and one.wanted is not None and before[one.wanted] > before[one.issued]:
                overlapped += _sent_bytes(problem, e, source.vertex)
    runs = step_order(problem, e).runs
    return Census(sum(_sent_bytes(problem, e, run.vertex) for run in runs), overlapped)


def _sent_bytes(problem: Problem, e: Evaluation, vertex: int) -> float:
    """Return the bytes of rows that a device sends for an op."""
    node, strategy = problem.vertices[vertex].node, problem.choices(vertex).strategies[e.choice[vertex]]
    is_exchange = bool(exchange_axes(node, strategy, problem.mesh))
    return exchange_bytes(node, strategy, problem.mesh) if is_exchange else 0.0


def _works_before(problem: Problem, script: Script) -> list[int]:
    """Return by piece of the compute stream, and at the end, how many heavy ops come before it."""
    before = [0]
    for piece in script.main:
        source = piece.source
        is_work = isinstance(source, Execution) and is_heavy(problem.vertices[source.vertex].node)
        before.append(before[-1] + is_work)
    return before


def _of_script(problem: Problem, script: Script) -> Census:
    before = _works_before(problem, script)
    total = Census()
    for one in script.overlapped:
        for piece in one.pieces:
            if isinstance(piece.source, tuple) and not isinstance(piece.source, Execution):
                travel, step = piece.source
                sent = travel.transfer.bytes_ * step.wire_fraction
                end = len(script.main) if one.wanted is None else one.wanted
                total += Census(sent, sent if before[end] > before[min(one.issued, end)] else 0.0)
    return total


def of_graphs(program: LoweredProgram, hideable: Mapping[str, float] | None = None) -> Census:
    """Count the bytes of a rank's forward and backward, one op after the other; `hideable` as of `hideable_of`, if
    that is not meant."""
    hideable = hideable_of(program) if hideable is None else hideable
    parts = [part for part in (program.parts.forward, program.parts.backward) if part is not None]
    return sum((of_graph(part.graph, hideable) for part in parts), Census())


def of_graph(graph: fx.Graph, hideable: Mapping[str, float]) -> Census:
    """Count the bytes of one graph, one op after the other; `hideable` as of `hideable_of`."""
    steps: list[Step] = []
    for node in graph.nodes:
        if node.name in hideable:
            steps.append(("start", node.name))
        elif node.target is c10d.wait_tensor.default:
            steps.append(("wait", operand(node).name))
        elif is_heavy(node):
            steps.append(("work", node.name))
    return _of_steps(steps, hideable)


def hideable_of(program: LoweredProgram) -> dict[str, float]:
    """Return the names of a rank's collectives that may be hidden, and the bytes that each sends."""
    graph = program.local.graph
    gradients = {value for value, role in outputs_of(graph) if role is not None and role.kind == "gradient"}
    found, leaving = gathers_of(graph), leading_out(graph)
    for node in reversed(graph.nodes):
        if node in leaving and (node in gradients or not gradients.isdisjoint(node.users)):
            gradients.add(node)
            found += [node] if node.meta.get("collective") else []
    return {node.name: node.meta["collective"].wire_bytes for node in found}


def exchanges_in(program: LoweredProgram) -> dict[str, float]:
    """Return the names of a rank's exchanges of experts' rows, and the bytes of each; without places of tokens."""
    return exchanges_in_graph(program.local.graph)


def exchanges_in_graph(graph: fx.Graph) -> dict[str, float]:
    """Return the same of one graph."""
    starts = [n for n in graph.nodes if n.target is autopar.exchange_rows.default]
    sent = {n.name: n.meta["collective"] for n in starts}
    return {name: one.wire_bytes for name, one in sent.items() if not one.tensor.endswith("_places")}


Step = tuple[str, str]  # a "start" or "wait" of a collective by name, or "work"


def _of_steps(steps: Sequence[Step], hideable: Mapping[str, float]) -> Census:
    """Count the bytes of collectives that are started and waited for in this order."""
    done, begun, total = 0, {}, Census()
    for what, name in steps:
        if what == "work":
            done += 1
        elif what == "start":
            begun[name] = done
        elif name in begun:
            sent = hideable[name]
            total += Census(sent, sent if done > begun.pop(name) else 0.0)
    return total


def of_compiled(lines: Sequence[str], module: fx.GraphModule, hideable: Mapping[str, float]) -> Census:
    """Count the bytes of the program that Inductor wrote for a graph. Its collectives are those of the graph, in the
    same order."""
    starts = iter([n for n in module.graph.nodes if is_start(n)])
    steps: list[Step] = []
    names: dict[str, str] = {}  # by buffer, the collective that fills it
    for line in lines:
        if waited := WAITED.search(line):
            steps.append(("wait", names.get(waited[1], "")))
        elif started := STARTED.search(line):
            node = next(starts)
            names[started[1] or started[3]] = node.name  # without a name it is in place
            if node.name in hideable:
                steps.append(("start", node.name))
        elif any(HEAVY.fullmatch(called) for called in CALL.findall(line)):
            steps.append(("work", line))
    return _of_steps(steps, hideable)


def is_start(node: fx.Node) -> bool:
    """Return whether a node starts a collective of torch, or an exchange of rows."""
    is_torchs = "_c10d_functional" in str(node.target) and node.target is not c10d.wait_tensor.default
    return is_torchs or node.target is autopar.exchange_rows.default
