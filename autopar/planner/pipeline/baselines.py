"""Pipelines as experts would shard them: for the chosen micro-batches and schedule, each strategy inside of all
stages."""

from __future__ import annotations

from ...errors import AutoparError, not_compared
from ..problem.recipes import Restriction, compared_on
from ..spmd.fixed_recompute import AUTO
from .candidate import Candidate
from .estimate import Estimate

LEFT_OUT = ("zero2", "hsdp")  # whose pipelines are those of zero1 and fsdp, or take a second data axis


def experts(best: Candidate) -> dict[str, Estimate | AutoparError]:
    """Return by name what each strategy would take with the best of its cuts, or why there is none; nothing if
    something of the sharding was asked for."""
    search, pipeline = best.search, best.evaluated.pipeline
    options = search.plans.options
    found: dict[str, Estimate | AutoparError] = {}
    if options.strategy is not None or options.pin or options.forbid or options.recompute != AUTO:
        return found
    for name in (name for name in compared_on(search.plans.mesh) if name not in LEFT_OUT):
        try:
            Restriction.of(name, search.plans.mesh)
            search.plans.report(name)
            estimates = search.under(name, [(pipeline.schedule, pipeline.stages_per_rank)]).estimates()
            found[name] = min(estimates, key=lambda one: (0, one.step_seconds) if one.fits else (1, one.peak_bytes))
        except Exception as error:
            found[name] = not_compared(error)
    return found


def evaluated_if_faster(one: Estimate | AutoparError, seconds: float) -> Estimate | Candidate | AutoparError:
    """Evaluate an expert's estimate if it fits and is below `seconds`, else return it as it is. Return why if it cannot
    be evaluated."""
    if not isinstance(one, Estimate) or not one.fits or one.step_seconds >= seconds:
        return one
    try:
        return one.search.evaluated(one)
    except Exception as error:
        return not_compared(error)
