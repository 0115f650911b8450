"""Count the bytes that travel beside compute: in a plan, in a rank's graphs, in the programs that Inductor makes of
them.

What may be hidden are collectives of parameters, which wait for nothing else, and those of gradients, for which nothing
waits before the step ends. A collective is overlapped if a product of matrices, an attention or a convolution runs
between its start and its wait: of a plan, between the places of its script where it is issued and wanted. Bytes are
what a device sends, by the ring formulas, on all links together. So a plan and a graph agree if both hide the same
bytes; what a bucket does to its members shows as a difference.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from .._torch import c10d
from ..codegen.rank_program import LoweredProgram
from ..ir.graph import operand, outputs_of
from ..passes.distribute.heavy_ops import HEAVY, is_heavy
from ..passes.distribute.overlap import gathers_of, leading_out
from ..planner.objective.script import Script, StreamOf, scripts_of
from ..planner.objective.step_order import Execution
from ..planner.problem.problem import Problem
from ..planner.spmd.planned import Planned

CALL = re.compile(r"(?:extern_kernels|torch\.ops\.\w+)\.(\w+)")
STARTED = re.compile(r"(?:(\w+) = )?torch\.ops\._c10d_functional\.(\w+?)_?\.\w+\((\w+)")
WAITED = re.compile(r"_c10d_functional\.wait_tensor\.default\((\w+)")


@dataclass(frozen=True)
class Census:
    """Bytes of what may be hidden: all that travel, and those that have compute beside them."""

    moved: float = 0.0
    overlapped: float = 0.0

    def __add__(self, other: Census) -> Census:
        return Census(self.moved + other.moved, self.overlapped + other.overlapped)


def of_plan(planned: Planned) -> Census:
    """Count the bytes of a plan of one program."""
    problem, evaluation = planned.whole
    return sum((_of_script(problem, s) for s in scripts_of(problem, evaluation, StreamOf(planned.pricer))), Census())


def _of_script(problem: Problem, script: Script) -> Census:
    works = [isinstance(p.source, Execution) and is_heavy(problem.vertices[p.source.vertex].node) for p in script.main]
    before = [0]
    for work in works:
        before.append(before[-1] + work)
    total = Census()
    for one in script.overlapped:
        for piece in one.pieces:
            if isinstance(piece.source, tuple):
                travel, step = piece.source
                sent = travel.transfer.bytes_ * step.wire_fraction
                end = len(works) if one.wanted is None else one.wanted
                total += Census(sent, sent if before[end] > before[min(one.issued, end)] else 0.0)
    return total


def of_graphs(program: LoweredProgram) -> Census:
    """Count the bytes of a rank's forward and backward, one op after the other."""
    hideable, total = hideable_of(program), Census()
    for part in (program.parts.forward, program.parts.backward):
        steps: list[Step] = []
        for node in part.graph.nodes if part is not None else ():
            if node.name in hideable:
                steps.append(("start", node.name))
            elif node.target is c10d.wait_tensor.default:
                steps.append(("wait", operand(node).name))
            elif is_heavy(node):
                steps.append(("work", node.name))
        total += _of_steps(steps, hideable)
    return total


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


Step = tuple[str, str]  # a "start" or "wait" of a collective by name, or "work"


def _of_steps(steps: Sequence[Step], hideable: dict[str, float]) -> Census:
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


def of_compiled(lines: Sequence[str], module: fx.GraphModule, hideable: dict[str, float]) -> Census:
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
    """Return whether a node starts a collective of torch."""
    return "_c10d_functional" in str(node.target) and node.target is not c10d.wait_tensor.default
