"""Say in a plan which values wait on the host for the backward, and what of their copies no compute hides."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...plans.saved_on_host import SavedOnHost
from ..objective.evaluate import Evaluation
from ..objective.player import played_seconds
from ..problem.problem import Problem

if TYPE_CHECKING:
    from ..solver.search import Outcome


def described(problem: Problem, e: Evaluation, chosen: Outcome) -> SavedOnHost | None:
    """Return what a plan of the whole graph has on the host, in seconds of an average pass; None if that is nothing.
    `chosen`: the same plan, as it was found."""
    if not e.on_host:
        return None
    return SavedOnHost(names_of(problem, e), e.host_bytes, e.host_seconds, exposed_seconds(chosen))


def names_of(problem: Problem, e: Evaluation) -> tuple[tuple[str, int], ...]:
    """Return the values of a plan of the whole graph that wait on the host, as (name of the op, which output)."""
    tensors = (problem.vertices[v].tensor(output) for v, output, _ in (value.key for value in e.on_host))
    return tuple(sorted((node.name, output) for node, output in tensors))


def exposed_seconds(chosen: Outcome) -> float:
    """Return the seconds of an average pass that it would take less if copies to the host and back took none."""
    if not chosen.evaluation.on_host:
        return 0.0
    at_once = tuple(replace(value, seconds=0.0) for value in chosen.evaluation.on_host)
    without = played_seconds(chosen.pricer.problem, replace(chosen.evaluation, on_host=at_once), chosen.pricer)
    return max(0.0, chosen.seconds - without)
