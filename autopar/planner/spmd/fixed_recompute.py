"""Plans with a level of recomputation that somebody else chose, and plans that do not fit: what estimates are made
of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...errors import MemoryInfeasibleError, StrategyError
from ...utils.format import size
from ..objective.checkpoint_min_cut import FULL, SELECTIVE
from ..problem.recipes import Restriction
from ..solver.search import Outcome, Starts
from ..solver.solver import Solver
from . import accumulation

AUTO, NONE = "auto", "none"
LEVELS = (AUTO, NONE, SELECTIVE, FULL)


def check(level: object) -> None:
    """Raise StrategyError for an unknown level."""
    if level not in LEVELS:
        raise StrategyError(f"no recomputation {level!r} is known", fix=f"use one of {', '.join(LEVELS)}")


def fastest(
    solvers: Sequence[Solver],
    restriction: Restriction,
    pins: dict[str, str],
    level: str = AUTO,
    refuses: bool = True,
    starts: Starts = (),
) -> tuple[Solver, Outcome]:
    """Return the fastest plan with every block at a level, or with as much recomputation as the memory demands
    ("auto"), and the solver that found it; for `starts` see `Solver.run`. Raise MemoryInfeasibleError if none fits,
    unless `refuses` is False: then return the plan that misses least, which under "auto" recomputes all."""
    if level == AUTO:
        try:
            return accumulation.fastest(solvers, restriction, pins, starts)
        except MemoryInfeasibleError:
            if refuses:
                raise
            level = FULL
    runs = [solver.run(restriction, pins, starts) for solver in solvers]
    found = [(run.solver, at_level(run.solver, run.fastest(is_limited=level == NONE), level)) for run in runs]
    fitting = [(solver, outcome) for solver, outcome in found if outcome.fits]
    if not fitting and refuses:
        solver, outcome = min(found, key=lambda pair: pair[1].evaluation.bytes_)
        message = f"with recomputation {level} no plan fits {size(solver.limit_bytes)} a device: the fastest needs"
        raise solver.refusal(message, outcome.evaluation)
    if fitting:
        return min(fitting, key=lambda pair: pair[1].seconds)
    return min(found, key=lambda pair: pair[1].evaluation.bytes_)


def at_level(solver: Solver, outcome: Outcome, level: str) -> Outcome:
    """Return the same decisions with every block at a level."""
    evaluation = (
        outcome.evaluation if level == NONE else solver.with_peak(solver.blocks.at_level(outcome.evaluation, level))
    )
    return replace(outcome, evaluation=evaluation, fits=evaluation.bytes_ <= solver.limit_bytes)
