"""Between two plans: one that fits the memory, and a faster one that does not.

Prices of memory find plans on the lower convex hull of seconds and bytes only, and folding makes all equal blocks
choose alike. What lies between two neighbours on the hull is found here: where the plans differ, their choices fall
apart into components that share no tensor, so that each may be exchanged on its own and their seconds and bytes add up.
The components that save most seconds per byte are exchanged first, block by block, as long as the memory lasts: a
knapsack filled by density. (In a compact graph one kind of them may be exchanged in the first blocks alone; the border
is where the graph is split.) What is left then holds gathered copies that the backward would have to make again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ...frontend.repeated_blocks import FIRST
from ...ir.block_order import block_of
from ..objective.checkpoint_min_cut import FULL, key_of
from ..objective.evaluate import Evaluation, held
from ..objective.modes import waits
from ..objective.pricer import Pricer
from ..problem.problem import Problem

Evaluator = Callable[[dict[int, int], int], Evaluation]  # of a choice by vertex, and of `Evaluation.first`


def mix(problem: Problem, lean: Evaluation, fast: Evaluation, limit_bytes: float, evaluate: Evaluator) -> Evaluation:
    """Return `lean`, or a faster plan that also fits, made of `lean` and parts of `fast`."""
    kinds: dict[tuple, list[list[int]]] = {}  # components by the classes of their vertices
    for component in _components(problem, lean.choice, fast.choice):
        kinds.setdefault(tuple(sorted(problem.vertices[v].cls for v in component)), []).append(component)
    base, useful = evaluate(lean.choice, lean.first), []
    for kind, components in kinds.items():
        one = evaluate(lean.choice | {v: fast.choice[v] for v in components[0]}, lean.first)
        seconds, bytes_ = base.seconds - one.seconds, one.bytes_ - base.bytes_
        if seconds > 0:
            useful.append((-seconds / max(bytes_, 1.0), kind, bytes_))
    best, is_split = base, False
    for _, kind, bytes_ in sorted(useful):
        components = kinds[kind]
        every = evaluate(best.choice | {v: fast.choice[v] for c in components for v in c}, best.first)
        if every.bytes_ <= limit_bytes:
            best = every if every.seconds < best.seconds else best
        elif problem.compact is None:
            some = components[: max(0, int((limit_bytes - best.bytes_) // max(bytes_, 1.0)))]
            exchanged = evaluate(best.choice | {v: fast.choice[v] for c in some for v in c}, best.first)
            best = exchanged if exchanged.bytes_ <= limit_bytes and exchanged.seconds < best.seconds else best
        elif not is_split:
            best, is_split = _split(problem, best, fast, components, limit_bytes, evaluate), True
    return best if best.bytes_ <= limit_bytes and best.seconds < lean.seconds else lean


def _split(
    problem: Problem, best: Evaluation, fast: Evaluation, components, limit_bytes: float, evaluate: Evaluator
) -> Evaluation:
    """Return the best plan with components of the first blocks exchanged, as many blocks as fit."""
    early = [c for c in components if all((problem.vertices[v].block or 0) <= FIRST + 1 for v in c)]
    choice = best.choice | {v: fast.choice[v] for c in early for v in c}
    low, high, found = 1, problem.compact.most - 1, best
    while low <= high:
        middle = (low + high) // 2
        exchanged = evaluate(choice, middle)
        if exchanged.bytes_ <= limit_bytes:
            found = exchanged if exchanged.seconds < found.seconds else found
            low = middle + 1
        else:
            high = middle - 1
    return found


def between(
    problem: Problem, one: Evaluation, other: Evaluation, evaluate: Evaluator, limit_bytes: float = math.inf
) -> Evaluation:
    """Return the fastest plan found that decides in the first blocks as one plan does and in the last as another; one
    of the two if the graph is not compact. What either leaves of compute, of links or of memory the blocks of the other
    can use. Plans that do not fit come last."""

    def rank(e: Evaluation) -> tuple[float, float]:
        return max(0.0, e.bytes_ - limit_bytes), e.seconds

    best = min(one, other, key=rank)
    for early, late in ((one, other), (other, one)) if problem.compact else ():
        choice = {v.index: (early if (v.block or 0) <= FIRST + 1 else late).choice[v.index] for v in problem.vertices}
        low, high = 1, problem.compact.most - 1
        found: dict[int, Evaluation] = {}
        while high - low > 1:  # seconds fall and rise again with the border
            thirds = low + (high - low) // 3, high - (high - low) // 3
            for first in thirds:
                if first not in found:
                    found[first] = evaluate(choice, first)
            left, right = (rank(found[first]) for first in thirds)
            low, high = (low, thirds[1] - 1) if left <= right else (thirds[0] + 1, high)
        best = min([best, *found.values()], key=rank)
    return best


def keep_copies(problem: Problem, e: Evaluation, limit_bytes: float, pricer: Pricer) -> Evaluation:
    """Return the plan with copies of the forward kept for the backward as far as they fit, those that save most seconds
    per byte first. A block that is computed again in full keeps none."""
    full = {block for block, levels in e.recomputed.items() if FULL in levels}
    blocks = [block_of(v.node.meta.get("module", "")) if v.kind == "op" else "" for v in problem.vertices]
    made = {key_of(t) for t in e.transfers if t.phase == "forward" and full.isdisjoint(blocks[c] for c in t.consumers)}
    redone = []
    for i, t in enumerate(e.transfers):
        key = key_of(t)
        if t.phase == "backward" and key in made and waits(problem.vertices[t.producer]):
            bytes_ = pricer.saved_bytes(*key)
            more = bytes_ * t.copies - e.saved.get(key, 0.0)  # a block may hold it for what it computes again
            redone.append((-t.seconds / max(bytes_, 1.0), i, key, more))
    dropped, retained, saved, left = set(), set(e.retained), dict(e.saved), limit_bytes - e.bytes_
    for _, i, key, more in sorted(redone, key=lambda entry: entry[:2]):
        if more <= left:
            dropped.add(i)
            retained.add(key)
            saved[key] = saved.get(key, 0.0) + more
            left -= more
    transfers = [t for i, t in enumerate(e.transfers) if i not in dropped]
    transfers = held(transfers, retained - e.retained) if e.gathers_once else transfers
    return replace(e, transfers=transfers, saved=saved, retained=retained)


def _components(problem: Problem, lean: dict[int, int], fast: dict[int, int]) -> list[list[int]]:
    """Return the vertices whose choices differ, in groups that share no tensor with each other, in order of the
    graph."""
    import networkx  # 290 modules, which few searches need

    differing = {v for v in lean if lean[v] != fast[v]}
    together = networkx.Graph()
    together.add_nodes_from(differing)
    for (producer, _), uses in problem.uses_of.items():
        touched = [v for v in dict.fromkeys([producer, *(u.consumer for u in uses)]) if v in differing]
        networkx.add_path(together, touched)
    return sorted(sorted(group) for group in networkx.connected_components(together))
