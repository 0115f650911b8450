"""The choice between whole logits and a loss in blocks: the latter is tried where memory decides, or asked for.

Blocks make the logits twice, so without a limit a plan with them is never faster. Where the fastest plan does not fit,
plans with them are searched too, each with as much recomputation as it then needs, and the faster one is the plan. That
search is left out where it gains nothing: where the bytes of the logits, at the price of memory that the bound of the
first plan is proved at, are worth less than the seconds of blocks, so that its bound holds for plans in blocks as well;
and where the same sharding with blocks, made to fit as simply, is no faster, which tells what prices do not know, the
bytes that pass by while the loss runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import MemoryInfeasibleError, StrategyError
from ..objective.evaluate import evaluate
from ..problem.recipes import Restriction
from ..problem.tiled_loss import LOSS, NONE, TILINGS, may_save, moves_none, with_tiled_losses
from ..solver.minimize import BeyondCutoff
from ..solver.search import Outcome, Starts
from ..solver.solver import Solver, replaced
from . import fixed_recompute

if TYPE_CHECKING:
    from .plan_options import PlanOptions

Found = tuple[Solver, Outcome]
NOTHING = (MemoryInfeasibleError, BeyondCutoff)


def check(tile: object) -> None:
    """Raise StrategyError for an unknown way to tile."""
    if tile not in TILINGS:
        raise StrategyError(f"no tiling {tile!r} is known", fix=f"use one of {', '.join(TILINGS)}")


def fastest(solvers: Sequence[Solver], restriction: Restriction, options: PlanOptions, starts: Starts) -> Found:
    """Return the fastest plan of `solvers`, or of the same with losses in blocks, and the solver that found it. Raise
    what `fixed_recompute.fastest` raises, and StrategyError if blocks are asked for and there is no loss for them."""

    def search(some: Sequence[Solver], starts: Starts) -> Found:
        return fixed_recompute.fastest(some, restriction, dict(options.pin), options.recompute, options.refuses, starts)

    if options.tile == LOSS:
        return _tiled_alone(search(_in_blocks(solvers, options, is_asked=True), starts))
    if options.tile == NONE or options.within is not None:
        return search(solvers, starts)
    try:
        whole: Found | None = search(solvers, starts)
        failure = None
    except NOTHING as error:
        whole, failure = None, error
    if whole is not None and not _is_short_of_memory(whole[1], options):
        return whole
    blocks = _in_blocks(solvers, options)
    if whole is not None and whole[1].fits:
        blocks = [replaced(one, replace(one.search, cutoff_seconds=whole[1].seconds)) for one in blocks]
        if not blocks or not _may_gain(whole, blocks[list(solvers).index(whole[0])], options):
            return whole
    tiled = _or_none(search, blocks, starts if whole is None else [*whole[1].found[-1:], *starts])
    found = [one for one in (whole, tiled) if one is not None]
    if not found and failure is not None:
        raise failure
    solver, outcome = min(found, key=lambda one: (not one[1].fits, one[1].seconds))
    return solver, replace(outcome, bound_seconds=min(one[1].bound_seconds for one in found))


def _is_short_of_memory(outcome: Outcome, options: PlanOptions) -> bool:
    if options.recompute != fixed_recompute.AUTO:  # then memory decides nothing but whether a plan fits
        return not outcome.fits
    return outcome.is_limited or not outcome.fits or bool(outcome.evaluation.recomputed)


def _may_gain(whole: Found, blocks: Solver, options: PlanOptions) -> bool:
    """Return whether plans of `blocks` may be faster than the one that was found, which fits."""
    solver, outcome = whole
    at = outcome.proved_at
    if not at or any(may_save(blocks.problem, options.hardware, prices) for prices in at):
        return True
    e, restriction = outcome.evaluation, outcome.restriction
    same = evaluate(blocks.problem, e.choice, blocks.pricer, blocks.free, restriction.keep, e.first)
    if not moves_none(blocks.problem, same):  # of the sharding that blocks can have, the fastest
        same = blocks.run(restriction, dict(options.pin)).at(blocks.free).evaluation
    plain = evaluate(solver.problem, same.choice, solver.pricer, solver.free, restriction.keep, same.first)
    fitted, tiled = (one.made_to_fit(one.with_peak(e)) for one, e in ((solver, plain), (blocks, same)))
    return tiled is not None and (fitted is None or tiled.seconds < fitted.seconds)


def _or_none(search, solvers: Sequence[Solver], starts: Starts) -> Found | None:
    """Return the plan of a search, None if it finds none that moves no logits."""
    if not solvers:
        return None
    try:
        found = search(solvers, starts)
    except NOTHING:
        return None
    return found if moves_none(found[0].problem, found[1].evaluation) else None


def _tiled_alone(found: Found) -> Found:
    if not moves_none(found[0].problem, found[1].evaluation):
        raise StrategyError(
            "the layouts that are asked for move logits between the last layer and its loss, which cannot be in blocks",
            fix=f"leave out tile={LOSS!r}",
        )
    return found


def _in_blocks(solvers: Sequence[Solver], options: PlanOptions, is_asked: bool = False) -> list[Solver]:
    """Return the solvers of the same problems with losses in blocks, none if there are no such losses."""
    is_one_call = options.micro_batches == 1 and options.within is None
    found = []
    for old in solvers:
        problem = with_tiled_losses(old.problem, options.hardware, is_one_call)
        if problem is None:
            break
        pricer = replace(old.pricer, problem=problem)
        found.append(Solver(problem, pricer, old.limit_bytes, old.search, old.report, old.free.overlap))
    if is_asked and not found:
        raise StrategyError(
            "no last linear layer is read by a loss alone, which could be computed in blocks",
            fix="without a bias, softcap or label smoothing, and with gradients for its weight; or leave out "
            f"tile={LOSS!r}",
        )
    return found
