"""The order of a training step: which op runs when, and from when to when each transfer may travel.

Ops run in graph order, forward then backward; those of recomputed blocks run again just before the backward first reads
them. A copy that both the backward and what runs again read travels once. What is computed while rows of experts travel
(autopar/planner/objective/beside_exchange.py) runs just before the exchange, which stands where its rows are waited
for.
A transfer may start once its source is made, but at most one block ahead of its first reader: a block's gathered
parameters arrive while the block before it computes, and never those of the whole model at once. Buckets of them are
sent one after the other (passes/distribute/overlap.py), so that most copies of a backward are there later than that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from ..problem.problem import Problem
from ..problem.vertices import STATE
from .checkpoint_blocks import recomputed_vertices
from .checkpoint_min_cut import key_of
from .evaluate import Evaluation, Transfer


class Execution(NamedTuple):
    """One execution of an op; `recomputed`: of a recomputed block, in the backward, or of the backward of a row-wise
    region, which runs `in_pieces`."""

    vertex: int
    phase: str
    recomputed: bool = False
    in_pieces: bool = False


class Travel(NamedTuple):
    """One execution of a transfer, by positions in `StepOrder.runs`: it may start before run `start`, its copy takes
    memory from run `held` on, and `first` and `last` read it (both the number of runs if it only leaves the step)."""

    transfer: Transfer
    phase: str
    start: int
    held: int
    first: int
    last: int
    recomputed: bool = False


@dataclass(frozen=True)
class StepOrder:
    """Ops in the order in which they run, transfers in the order in which they may start; of those that may start
    together the one that is read first comes first. `blocks`: by run the block that it belongs to."""

    runs: tuple[Execution, ...]
    travels: tuple[Travel, ...]
    blocks: tuple[str, ...]


def step_order(problem: Problem, evaluation: Evaluation) -> StepOrder:
    """Return the order of the step that an evaluation describes."""
    in_pieces, blocks_again = problem.made_again, recomputed_vertices(evaluation)
    recomputed = {**in_pieces, **blocks_again}
    beside = {
        Execution(one.vertex, one.phase): [Execution(v, one.phase) for v in one.ops]
        for one in evaluation.beside
        if one.ops
    }
    runs = tuple(moved_beside(with_attentions(problem, list(_runs(problem, blocks_again))), beside))
    index = {(run.vertex, run.recomputed): i for i, run in enumerate(runs)}
    starts = {(run.vertex, False): index[ops[0].vertex, False] for run, ops in beside.items()}
    first_backward = next((i for i, run in enumerate(runs) if run.phase == "backward"), len(runs))
    modules = tuple(problem.blocks[run.vertex] for run in runs)
    blocks = _blocks(runs, modules)
    one_block_ahead, one_module_ahead = _one_ahead(runs, blocks), _one_ahead(runs, modules)

    def travel(transfer: Transfer, readers: list[tuple[int, bool]], recomputed: bool = False) -> Travel:
        producer, phase = transfer.producer, transfer.phase
        made = index.get((producer, phase == "backward"), index.get((producer, False), -1))
        if problem.vertices[producer].kind in ("tangent", "cotangent"):
            made = first_backward - 1
        read = [index[r] for r in readers if r in index]
        first, last = (min(read), max(read)) if read else (len(runs), len(runs))
        first = min([first, *(starts[r] for r in readers if r in starts)])  # before the rows are sent
        start, held = (max(made + 1, ahead[first] if read else 0) for ahead in (one_block_ahead, one_module_ahead))
        return Travel(transfer, phase, start, held, first, last, recomputed)

    second: dict[tuple, list[tuple[int, bool]]] = defaultdict(list)  # what runs again, by the copy that it reads
    for t in evaluation.transfers:
        if t.phase == "forward":
            second[key_of(t)] += [(c, True) for c in t.consumers if c in recomputed]
    travels = []
    for t in evaluation.transfers:
        readers = [(c, problem.vertices[c].phase != t.phase and c in in_pieces) for c in t.consumers]
        travels.append(travel(t, readers + second[key_of(t)] if t.phase == "backward" else readers))
    for t in evaluation.recompute_transfers:
        readers = [(c, c in in_pieces) for c in _backward_readers(problem, evaluation, t)]
        travels.append(travel(t, second[key_of(t)] + readers, True))
    return StepOrder(runs, tuple(sorted(travels, key=lambda t: (t.start, t.first))), blocks)


def moved_beside(runs: Sequence[Execution], beside: Mapping[Execution, Sequence[Execution]]) -> list[Execution]:
    """Return runs with those `beside` an exchange just before it."""
    if not beside:
        return [*runs]
    moved = {run for ops in beside.values() for run in ops}
    return [one for run in runs if run not in moved for one in (*beside.get(run, ()), run)]


def with_attentions(problem: Problem, runs: list[Execution]) -> list[Execution]:
    """Return runs with those of a region around an attention in pieces just before and behind the attention, where its
    one op runs."""
    if not problem.tiled_queries:
        return runs
    number = {node: i for i, one in enumerate(problem.tiled_queries) for node in (*one.forward, *one.backward)}
    own: dict[tuple[int, str, bool], list[Execution]] = defaultdict(list)
    for run in runs:
        if (region := number.get(problem.vertices[run.vertex].node)) is not None:
            own[region, run.phase, run.recomputed and not run.in_pieces].append(run)
    parts = {run: part for part in own.values() for run in part}
    is_moved = {
        run for part in own.values() for run in part if any(r.vertex in problem.attentions_in_pieces for r in part)
    }
    moved = []
    for run in runs:
        if run not in is_moved:
            moved.append(run)
        elif run.vertex in problem.attentions_in_pieces:
            moved += parts[run]
    return moved


def _backward_readers(problem: Problem, e: Evaluation, t: Transfer) -> Iterator[int]:
    """Iterate over the ops of the backward that read a copy which would be kept for them if it had not to be made
    again."""
    for use in problem.uses_of[t.producer, t.output]:
        strategy = problem.choices(use.consumer).strategies[e.choice[use.consumer]]
        if use.phase == "backward" and use.slot != STATE and strategy.inputs[use.slot] == t.target:
            yield use.consumer


def _runs(problem: Problem, recomputed: dict[int, str]) -> Iterator[Execution]:
    vertices = problem.vertices
    ops = [v for v in vertices if v.kind == "op"]
    yield from (Execution(v.index, "forward") for v in ops if v.phase == "forward")
    regions = problem.made_again
    waiting: dict[str | int, list[int]] = {}  # by block, and by number of a region
    for label in (recomputed, regions):
        for vertex, own in label.items():
            waiting.setdefault(own, []).append(vertex)

    def wanted(vertex: int, of_block: bool) -> list[str | int]:
        """Return what is still to run again of what a vertex reads: blocks, and regions in pieces, which a vertex of a
        block (`of_block`) makes by itself."""
        inputs, labels = vertices[vertex].inputs, list[str | int]()
        if of_block or not regions:
            labels += [recomputed[p] for p, _ in inputs if p in recomputed]
        else:
            labels += [label for p, _ in inputs if (label := regions.get(p, recomputed.get(p))) is not None]
        return [label for label in dict.fromkeys(labels) if label in waiting] if labels else labels

    def made_for(vertex: int, of_block: bool) -> Iterator[Execution]:
        """Run again what a vertex reads, behind what that reads itself."""
        for label in wanted(vertex, of_block):
            again, is_block = sorted(waiting.pop(label, ())), isinstance(label, str)
            for one in again:
                if wanted(one, is_block):
                    yield from made_for(one, is_block)
            yield from [Execution(one, "backward", True, not is_block) for one in again]

    again = {*recomputed, *regions}
    for v in ops:
        if v.phase == "backward":
            if not again.isdisjoint(problem.producers[v.index]) and wanted(v.index, False):
                yield from made_for(v.index, False)
            yield Execution(v.index, "backward")


def _blocks(runs: tuple[Execution, ...], modules: tuple[str, ...]) -> tuple[str, ...]:
    """Return, by run, the block that it belongs to: in the backward what is in no module, as are sums of gradients,
    belongs to the block whose backward it follows."""
    result: list[str] = []
    for i, (run, module) in enumerate(zip(runs, modules)):
        follows = not module and i > 0 and run.phase == runs[i - 1].phase == "backward"
        result.append(result[-1] if follows else module)
    return tuple(result)


def _one_ahead(runs: tuple[Execution, ...], names: tuple[str, ...]) -> list[int]:
    """Return, by position, where what has another name begins that comes before that of the run."""
    result, before = [], 0
    for _, group in groupby(range(len(runs)), lambda i: (runs[i].phase, names[i])):
        positions = list(group)
        result += [before] * len(positions)
        before = positions[0]
    return result


def one_op_a_region(problem: Problem, order: StepOrder) -> tuple[list[int], list[int]]:
    """Return, for each run, the first and the last of the op that it is a part of: itself, or all of a row-wise region
    in pieces, which holds what it reads and gives from its start to its end. Its forward may run again with a block."""
    number = {node: i for i, region in enumerate(problem.tiled_rows) for node in (*region.forward, *region.backward)}
    first, last = list(range(len(order.runs))), list(range(len(order.runs)))
    if not number:
        return first, last
    parts: dict[tuple[int, str, bool], list[int]] = defaultdict(list)
    for i, run in enumerate(order.runs):
        if (region := number.get(problem.vertices[run.vertex].node)) is not None:
            parts[region, run.phase, run.recomputed and not run.in_pieces].append(i)
    for runs in parts.values():
        for i in runs:
            first[i], last[i] = runs[0], runs[-1]
    return first, last
