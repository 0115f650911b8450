"""Between two plans: one that fits the memory, and a faster one that does not.

Prices of memory find plans on the lower convex hull of seconds and bytes only, and folding makes all equal blocks choose alike.
What lies between two neighbours on the hull is found here: where the plans differ, their choices fall apart into components that
share no tensor, so that each may be exchanged on its own and their seconds and bytes add up. The components that save most
seconds per byte are exchanged first, block by block, as long as the memory lasts: a knapsack filled by density. What is left
then holds gathered copies that the backward would have to make again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import networkx

from .evaluate import RESIDENT_LEAVES, Evaluation, Pricer, uses_by_tensor
from .problem import Problem


def mix(
    problem: Problem, lean: Evaluation, fast: Evaluation, limit_bytes: float, judge: Callable[[dict[int, int]], Evaluation]
) -> Evaluation:
    """`lean`, or a faster plan that also fits, made of `lean` and parts of `fast`. `judge` evaluates a choice by vertex."""
    base = judge(lean.choice)
    gains: dict[tuple, tuple[float, float]] = {}  # by the classes of a component: seconds saved, bytes added
    useful = []
    for component in _components(problem, lean.choice, fast.choice):
        kind = tuple(sorted(problem.vertices[v].cls for v in component))
        if kind not in gains:
            exchanged = judge(lean.choice | {v: fast.choice[v] for v in component})
            gains[kind] = base.seconds - exchanged.seconds, exchanged.bytes_ - base.bytes_
        seconds, bytes_ = gains[kind]
        if seconds > 0:
            useful.append((-seconds / max(bytes_, 1.0), component, bytes_))
    choice, left = dict(lean.choice), limit_bytes - base.bytes_
    for _, component, bytes_ in sorted(useful):
        if bytes_ <= left:
            choice |= {v: fast.choice[v] for v in component}
            left -= bytes_
    mixed = judge(choice)
    return mixed if mixed.bytes_ <= limit_bytes and mixed.seconds < lean.seconds else lean


def keep_copies(problem: Problem, e: Evaluation, limit_bytes: float, pricer: Pricer) -> Evaluation:
    """The plan with copies of the forward kept for the backward as far as they fit, those that save most seconds per byte first."""
    made = {(t.producer, t.output, t.target) for t in e.transfers if t.phase == "forward"}
    again = []
    for i, t in enumerate(e.transfers):
        key, kind = (t.producer, t.output, t.target), problem.vertices[t.producer].kind
        if t.phase == "backward" and key in made and (kind == "parameter" or kind not in RESIDENT_LEAVES):
            bytes_ = pricer.local_bytes(*key)
            again.append((-t.seconds / max(bytes_, 1.0), i, key, bytes_))
    dropped, saved, left = set(), dict(e.saved), limit_bytes - e.bytes_
    for _, i, key, bytes_ in sorted(again, key=lambda entry: entry[:2]):
        if bytes_ <= left:
            dropped.add(i)
            saved[key] = bytes_
            left -= bytes_
    transfers = [t for i, t in enumerate(e.transfers) if i not in dropped]
    return replace(e, transfers=transfers, saved=saved, kept=e.kept | (saved.keys() - e.saved.keys()))


def _components(problem: Problem, lean: dict[int, int], fast: dict[int, int]) -> list[list[int]]:
    """Vertices whose choices differ, in groups that share no tensor with each other, in order of the graph."""
    differing = {v for v in lean if lean[v] != fast[v]}
    together = networkx.Graph()
    together.add_nodes_from(differing)
    for (producer, _), uses in uses_by_tensor(problem).items():
        touched = [v for v in dict.fromkeys([producer, *(u.consumer for u in uses)]) if v in differing]
        networkx.add_path(together, touched)
    return sorted(sorted(group) for group in networkx.connected_components(together))
