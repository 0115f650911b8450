"""Steps of several forward and backward passes, one a micro-batch, whose gradients are added up.

The graph that is planned is one pass. With K passes a step takes K times its seconds, but what is gathered of
parameters and kept is gathered once, and gradients that their ops leave partial may wait, unreduced, for one reduction
at the end (Li et al., VLDB 13(12), 2020, section 3.2.4):

    every pass reduces    what is added up is as small as the parameters' shards
    reduced once          what is added up is as large as each rank computes it; the reductions run beside the last pass
                          (so they are priced; the program that is emitted makes them after it)

Both are searched, and the faster one that fits is the plan. Seconds inside the planner are of an average pass;
`of_step` multiplies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...errors import MemoryInfeasibleError, StrategyError
from ...plans.plan import Plan
from ..objective.evaluate import Evaluation
from ..problem.offload import OPTIMIZER
from ..problem.problem import Problem
from ..problem.recipes import MODELS_OWN, Restriction, reduces_once
from ..solver.minimize import BeyondCutoff
from ..solver.search import Outcome, Starts
from ..solver.solver import Solver


def check(micro_batches: object) -> None:
    """Raise StrategyError for anything but a number of micro-batches."""
    if not isinstance(micro_batches, int) or isinstance(micro_batches, bool) or micro_batches < 1:
        raise StrategyError(
            f"micro_batches is {micro_batches!r}, not a number of micro-batches", fix="use 1 or more, such as 4"
        )


def ways(strategy: str | None, micro_batches: int, on_host: bool = False) -> tuple[bool, ...]:
    """Return the ways to reduce gradients that are worth a search: once a step (True) or in every pass (False). Where
    both make sense the expert's way comes first. Gradients that go to the host (`on_host`) are all reduced before that,
    in every pass."""
    if strategy == MODELS_OWN:
        strategy = "megatron"  # which is how the model's own tensor parallelism is used
    once = False if micro_batches == 1 or on_host else reduces_once(strategy)
    return (False, True) if once is None else (once,)


def solvers_for(solvers: Sequence[Solver], strategy: str | None) -> list[Solver]:
    """Return the solvers of the ways in which a strategy reduces gradients, the expert's way first."""
    first = solvers[0]
    by_way = {solver.pricer.reduces_once: solver for solver in solvers}
    on_host = first.problem.offload.level == OPTIMIZER
    found = [by_way[once] for once in ways(strategy, first.pricer.micro_batches, on_host) if once in by_way]
    return found or list(solvers)


def fastest(
    solvers: Sequence[Solver], restriction: Restriction, pins: dict[str, str], starts: Starts = ()
) -> tuple[Solver, Outcome]:
    """Return the fastest plan of all ways that fits, and the solver that found it; for `starts` see `Solver.run`. Its
    bound holds for all ways. Raise MemoryInfeasibleError if none fits, BeyondCutoff if none that fits can be fast
    enough."""
    found, refused, bounds = [], [], []
    for solver in solvers:
        try:
            found.append((solver, solver.solve(restriction, pins, starts)))
            bounds.append(found[-1][1].bound_seconds)
        except MemoryInfeasibleError as error:
            refused.append(error)
        except BeyondCutoff as error:
            bounds.append(error.bound_seconds)
    if not bounds:
        raise min(refused, key=lambda error: error.missing_bytes)
    if not found:
        raise BeyondCutoff(min(bounds))
    solver, outcome = min(found, key=lambda pair: pair[1].seconds)  # the first of equal ones
    is_known = len(found) == len(solvers) and all(one.proved_at for _, one in found)
    proved_at = tuple(prices for _, one in found for prices in one.proved_at) if is_known else ()
    return solver, replace(outcome, bound_seconds=min(bounds), proved_at=proved_at)


def of_step(plan: Plan, evaluation: Evaluation, tail_seconds: float = 0.0) -> Plan:
    """Return the plan of a step from that of an average pass of the largest micro-batch, with a tail that takes so
    long between all forwards and all backwards."""
    if plan.micro_batches == 1:
        return plan
    shares = sum(plan.pipeline.shares)  # of the largest micro-batch

    def times(one, *names):
        seconds = {name: getattr(one, name) for name in names}
        return replace(one, **{name: s and s * shares for name, s in seconds.items()})

    plan = times(
        plan,
        "step_seconds",
        "compute_seconds",
        "communication_seconds",
        "recompute_seconds",
        "update_seconds",
        "exposed_seconds",
        "beside_seconds",
        "bound",
    )
    return replace(
        plan,
        step_seconds=plan.step_seconds + tail_seconds,
        compute_seconds=plan.compute_seconds + tail_seconds,
        bound=plan.bound + tail_seconds,
        reduces_once=evaluation.reduces_once,
        saved_on_host=plan.saved_on_host and times(plan.saved_on_host, "seconds", "exposed_seconds"),
        collectives=tuple(times(c, "seconds") for c in plan.collectives),
        regions=tuple(times(r, "compute_seconds", "communication_seconds") for r in plan.regions),
    )


def samples_of(problem: Problem) -> int:
    """Return the samples of one pass over all devices: dim 0 of the first input that has dims, 0 if there is none."""
    shapes = [v.node.meta["val"].shape for v in problem.vertices if v.kind == "input" and v.node.meta["val"].dim()]
    return int(shapes[0][0]) if shapes else 0
