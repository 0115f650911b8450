"""The choice between whole tensors and regions in pieces: the latter are tried where memory decides, or asked for.

Pieces make tensors twice, so without a limit a plan with them is never faster. Where the fastest plan does not fit, or
computes something again, plans with a loss in blocks are searched too, then those with MLPs in pieces as well, then
with attention's queries in pieces, each with as much recomputation as it then needs, and the fastest is the plan.
Queries are in pieces with their projection, or, where a plan moves them between the two, attention is by itself.

A search is left out where it finds nothing: where one tensor is larger than a device, or the smallest plan is, with all
computed again or on the host, and more pieces are left to try. And it is left out where it gains nothing. With the
loss: where the bytes of the logits, at the price of memory that the bound of the plan before is proved at, are worth
less than the seconds of blocks, so that its bound holds for plans in blocks as well. With either: where the same
sharding in pieces, made to fit as simply, is no faster, which tells what prices do not know, the bytes that pass by
while a region runs. What waits inside of an MLP, or between a projection and attention, can be computed again without
pieces, so that for these the latter alone counts. The integer program has the last word on the plan that is left. Where
nothing fits, what misses least is changed op by op (autopar/planner/solver/squeeze.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import MemoryInfeasibleError, StrategyError
from ...ops.query_pieces import MOST_QUERIES
from ...ops.row_pieces import MOST_ROWS
from ...plans.tiled import ATTENTION, QUERIES
from ..objective.evaluate import evaluate
from ..problem.recipes import Restriction
from ..problem.tiled import AUTO, KINDS, LOSS, MLP, TILINGS, may_save, moves_none, with_tiles
from ..solver.minimize import BeyondCutoff
from ..solver.search import Outcome, Starts, asked
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
    """Return the fastest plan of `solvers`, or of the same with regions in pieces, and the solver that found it. Raise
    what `fixed_recompute.fastest` raises, and StrategyError if pieces are asked for and there is no region for them."""
    if options.tile != AUTO:
        if not KINDS[options.tile]:
            return _searched(solvers, restriction, options, starts)
        return _as_asked(solvers, restriction, options, starts)
    if options.within is not None:
        return _searched(solvers, restriction, options, starts)
    return _Choice(restriction, options, starts).fastest(solvers)


def _searched(solvers: Sequence[Solver], restriction: Restriction, options: PlanOptions, starts: Starts) -> Found:
    return fixed_recompute.fastest(solvers, restriction, dict(options.pin), options.recompute, options.refuses, starts)


class _Choice:
    """The search for the fastest plan of a problem over what is in pieces."""

    def __init__(self, restriction: Restriction, options: PlanOptions, starts: Starts):
        self.restriction, self.options, self.starts = restriction, options, starts
        self.best: Found | None = None
        self.bound_seconds = float("inf")
        self.number = 0  # of the solver that found the best plan, among those that were searched
        self.short: list[tuple[float, Sequence[Solver]]] = []  # bytes that are missing, and of what

    def fastest(self, solvers: Sequence[Solver]) -> Found:
        """Return the best of the plans with nothing in pieces, with losses, with MLPs besides, and with queries."""
        failures: list[Exception | None] = []
        kinds: tuple[str, ...] = ()
        if not self._are_too_large(solvers):
            failures.append(self._try(solvers))
        for kind in (LOSS, MLP, QUERIES, ATTENTION):
            kinds = tuple(one for one in kinds if (one, kind) != (QUERIES, ATTENTION))  # one or the other
            if self.best is not None and not _is_short_of_memory(self.best[1], self.options):
                break
            tiled = with_pieces(solvers, self.options, (*kinds, kind))
            if tiled and self._is_allowed(tiled) and self._may_gain(kind, tiled):
                before = self.best
                if kind != LOSS or not self._are_hopeless(solvers, tiled):
                    failures.append(self._try(tiled))
                kinds = (*kinds, kind) if self.best is None or self.best is not before else kinds
        if self.best is None and self.short and solvers[0].search.squeezes:
            failures.append(self._try(min(self.short, key=lambda pair: pair[0])[1], squeezes=True))
        if self.best is None:
            raise min((error for error in failures if error is not None), key=_missing)
        solver, outcome = self.best
        return solver, replace(asked(outcome), bound_seconds=min(self.bound_seconds, outcome.bound_seconds))

    def _are_too_large(self, solvers: Sequence[Solver]) -> bool:
        """Return whether some tensor that pieces would never make is too large for a device in any layout."""
        are_large = all(one.is_too_large(self.restriction, dict(self.options.pin)) for one in solvers)
        return are_large and any(with_pieces(solvers, self.options, (kind,)) for kind in (LOSS, MLP, QUERIES))

    def _are_hopeless(self, solvers: Sequence[Solver], tiled: Sequence[Solver]) -> bool:
        """Return whether nothing fits yet, the smallest plans with losses in pieces do not, and MLPs may be besides."""
        if self.best is not None or not with_pieces(solvers, self.options, (LOSS, MLP)):
            return False
        return not any(one.may_be_fitted(self.restriction, dict(self.options.pin), self.starts) for one in tiled)

    def _try(self, solvers: Sequence[Solver], squeezes: bool = False) -> Exception | None:
        """Search plans, keep the best one, and return why there is none. `squeezes`: see Search."""
        starts, given = self.starts, solvers
        if self.best is not None:
            outcome = self.best[1]
            starts = [*outcome.found[-1:], *starts]
            if outcome.fits:
                cutoff = min(outcome.seconds, solvers[0].search.cutoff_seconds)
                solvers = [replaced(one, replace(one.search, cutoff_seconds=cutoff)) for one in solvers]
        solvers = [replaced(one, replace(one.search, asks_later=True, squeezes=squeezes)) for one in solvers]
        try:
            found = _searched(solvers, self.restriction, self.options, starts)
        except NOTHING as error:
            self.short += [(error.missing_bytes, given)] if isinstance(error, MemoryInfeasibleError) else []
            return error
        if moves_none(found[0].problem, found[1].evaluation):
            self.bound_seconds = min(self.bound_seconds, found[1].bound_seconds)
            self.best = min((one for one in (self.best, found) if one is not None), key=_rank)
            if self.best is found:
                self.number = next(i for i, one in enumerate(solvers) if one.pricer is found[0].pricer)
        return None

    def _is_allowed(self, tiled: Sequence[Solver]) -> bool:
        """Return whether pieces go with what is asked for: not with keys that go round."""
        try:
            tiled[0].allowed(self.restriction, dict(self.options.pin))
        except StrategyError:
            return False
        return True

    def _may_gain(self, kind: str, tiled: Sequence[Solver]) -> bool:
        """Return whether plans of `tiled` may be faster than the best one, if that fits."""
        if kind == ATTENTION and tiled[0].problem.mesh.devices == 1:  # where no queries move
            return False
        if self.best is None or not self.best[1].fits:
            return True
        solver, outcome = self.best
        pieces, options = tiled[self.number], self.options
        at = outcome.proved_at
        if kind == LOSS and (not at or any(may_save(pieces.problem, options.hardware, prices) for prices in at)):
            return True
        e, restriction = outcome.evaluation, outcome.restriction
        same = evaluate(pieces.problem, e.choice, pieces.pricer, pieces.free, restriction.keep, e.first)
        if not moves_none(pieces.problem, same):  # of the sharding that pieces can have, the fastest
            same = pieces.run(restriction, dict(options.pin)).at(pieces.free).evaluation
        plain = evaluate(solver.problem, same.choice, solver.pricer, solver.free, restriction.keep, same.first)
        fitted, in_pieces = (one.made_to_fit(one.with_peak(e)) for one, e in ((solver, plain), (pieces, same)))
        if fitted is None and kind == QUERIES:  # then the integer program alone knows
            return True
        return in_pieces is not None and (fitted is None or in_pieces.seconds < fitted.seconds)


def _rank(found: Found) -> tuple[bool, float]:
    return not found[1].fits, found[1].seconds


def _missing(error: Exception) -> float:
    return error.missing_bytes if isinstance(error, MemoryInfeasibleError) else 0.0


def _is_short_of_memory(outcome: Outcome, options: PlanOptions) -> bool:
    if options.recompute != fixed_recompute.AUTO:  # then memory decides nothing but whether a plan fits
        return not outcome.fits
    return outcome.is_limited or not outcome.fits or bool(outcome.evaluation.recomputed)


def _tiled_alone(found: Found, options: PlanOptions) -> Found:
    if not moves_none(found[0].problem, found[1].evaluation):
        raise StrategyError(
            "the layouts that are asked for move tensors inside of a region, which cannot be in pieces",
            fix=f"leave out tile={options.tile!r}",
        )
    return found


def _as_asked(solvers: Sequence[Solver], restriction: Restriction, options: PlanOptions, starts: Starts) -> Found:
    """Return the fastest plan with what is asked for in pieces: attention by itself if its queries must move."""
    asked, kinds = _asked(solvers, options), KINDS[options.tile]
    try:
        return _tiled_alone(_searched(asked, restriction, options, starts), options)
    except (StrategyError, *NOTHING):
        if QUERIES not in kinds:
            raise
        own = tuple(ATTENTION if kind == QUERIES else kind for kind in kinds)
        return _tiled_alone(_searched(with_pieces(solvers, options, own), restriction, options, starts), options)


def _asked(solvers: Sequence[Solver], options: PlanOptions) -> list[Solver]:
    """Return the solvers with what is asked for in pieces. Raise StrategyError for the first kind that is not there."""
    why = {
        LOSS: (
            "no last linear layer is read by a loss alone, which could be computed in blocks",
            "without a bias, softcap or label smoothing, and with gradients for its weight",
        ),
        MLP: (
            f"no row-wise ops of more than {MOST_ROWS} rows are wide inside and narrow at both ends",
            "of linear layers and activations without dropout, some tokens more",
        ),
        QUERIES: (
            f"no attention has more than {MOST_QUERIES} queries and a backward of its own",
            "without a bias that trains, some tokens more",
        ),
    }
    for kind in KINDS[options.tile]:
        if kind != LOSS and options.within is not None:
            what = "MLP" if kind == MLP else "queries"
            raise StrategyError(f"stages of a pipeline run no {what} in pieces", fix=f"leave out tile={options.tile!r}")
        if not with_pieces(solvers, options, (kind,)):
            message, fix = why[kind]
            raise StrategyError(message, fix=f"{fix}; or leave out tile={options.tile!r}")
    return with_pieces(solvers, options, KINDS[options.tile])


def with_pieces(solvers: Sequence[Solver], options: PlanOptions, kinds: tuple[str, ...]) -> list[Solver]:
    """Return the solvers of the same problems with all regions of these kinds in pieces, none if there are none of
    one."""
    is_one_call = options.micro_batches == 1 and options.within is None
    found = []
    for old in solvers:
        problem = with_tiles(old.problem, options.hardware, kinds, is_one_call)
        if problem is None:
            return []
        pricer = replace(old.pricer, problem=problem)
        found.append(Solver(problem, pricer, old.limit_bytes, old.search, old.report, old.free.overlap))
    return found
