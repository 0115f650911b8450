"""Searches under limits of memory against all plans of small random graphs, each with what it has to compute again."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

import numpy as np

from autopar.errors import MemoryInfeasibleError
from autopar.planner.objective.evaluate import Evaluation
from autopar.planner.problem.recipes import Restriction
from autopar.planner.solver.solver import Solver

from .planning import Instance, toy
from .random_graphs import MESHES, random_graph, thinned

LIMITS = 6  # of a graph, evenly between the least that any plan needs and what the fastest does
MOST_NODES = 10


@dataclass(frozen=True)
class Limited:
    """One limit: seconds of the best of all plans that fit, of the one that was found (infinite: refused), and whether
    less memory gave a faster one."""

    best: float
    found: float
    is_slower: bool


class _Thinned(Solver):
    """A solver that allows some strategies alone."""

    def __init__(self, *args, masks: dict[int, np.ndarray]):
        super().__init__(*args)
        self.masks = masks

    def allowed(self, restriction, pins=None):
        return self.masks


def in_blocks(rng: random.Random):
    """A random graph whose forward ops are in two blocks of a module list."""
    captured = random_graph(rng, MOST_NODES)
    forward = [n for n in captured.graph.nodes if n.op == "call_function" and n.meta["phase"] == "forward"]
    for i, node in enumerate(forward):
        node.meta["module"] = f"layers.{2 * i // len(forward)}"
    return captured


def fitted(solver: Solver, e: Evaluation) -> Evaluation | None:
    """A plan with as much computed again as its solver's limit demands, None if that is not enough."""
    limit, e = solver.limit_bytes, solver.with_peak(e)
    for _ in range(6):
        found, _ = solver.blocks.fit(e, limit, solver.free)
        found = found and solver.with_peak(found)
        if found is None or found.bytes_ <= solver.limit_bytes:
            return found
        limit -= found.bytes_ - solver.limit_bytes
    return None


def check_limits(seed: int, most_plans: int) -> list[Limited]:
    """Each limit of a random graph, from the least on. Raises AssertionError for a bound above a plan that fits, or for
    a plan that does not fit."""
    rng = random.Random(seed)
    mesh, machine = rng.choice(MESHES), rng.choice([toy(), toy(link=1e8), toy(latency=1e-6, launch=1e-7)])
    instance = Instance(in_blocks(rng), mesh, machine, folded=False)
    masks = thinned(instance, rng, most_plans)

    def solver(limit: float) -> Solver:
        return _Thinned(instance.problem, instance.pricer, limit, masks=masks)

    free, plans = solver(1e15), []
    for picked in itertools.product(*(np.flatnonzero(mask).tolist() for mask in masks.values())):
        e = instance.evaluate(dict(zip(masks, picked)), free.free)
        if math.isfinite(e.seconds):
            e = free.with_peak(e)
            plans.append((e, free.with_peak(free.blocks.at_level(e, "full")).bytes_))
    least = min(min(e.bytes_, full) for e, full in plans)
    most = min(plans, key=lambda plan: plan[0].seconds)[0].bytes_
    results, restriction = [], Restriction.of(None, instance.mesh)
    for limit in np.linspace(least * (1 + 1e-9), max(most, least), LIMITS).tolist():
        solvers = solver(limit)
        fit = [fitted(solvers, e) for e, _ in plans]
        best = min((e.seconds for e in fit if e is not None), default=math.inf)
        if math.isinf(best):
            continue
        try:
            outcome = solvers.solve(restriction)
            found = outcome.seconds
            assert outcome.evaluation.bytes_ <= limit * (1 + 1e-9), (seed, limit, outcome.evaluation.bytes_)
            assert outcome.bound_seconds <= best * (1 + 1e-6), (seed, limit, outcome.bound_seconds, best)
        except MemoryInfeasibleError:
            found = math.inf
        before = min((r.found for r in results), default=math.inf)
        results.append(Limited(best, found, found > before * (1 + 1e-9)))
    return results
