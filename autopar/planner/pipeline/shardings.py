"""Say which stages of a pipeline are sharded alike, and how others differ from them."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.stage_placement import first_of
from ...plans.entries import StageSharding
from ..objective.evaluate import Evaluation
from ..objective.module_table import regions_of
from ..problem.problem import Problem
from .stage_costs import parts_of_nodes

KEPT = "parameters that are kept gathered"


def stage_shardings(
    problem: Problem, e: Evaluation, cuts: Sequence[str], of_stage: Sequence[int]
) -> tuple[StageSharding, ...]:
    """Return the shardings of stages that begin at the ops `cuts` under a plan that was made of several, `of_stage`
    their numbers; none if all are of one."""
    numbers = list(dict.fromkeys(of_stage))
    if len(numbers) < 2:
        return ()
    where = parts_of_nodes(problem.placement(cuts))
    own: dict[int, set[int]] = {k: set() for k in numbers}
    for v in problem.vertices:
        own[of_stage[first_of(where.get(v.node, 0), 0)]].add(v.index)
    layouts = [_layouts(problem, e, own[k]) for k in numbers]
    whats = dict.fromkeys(what for each in layouts for what in each)
    differ = [what for what in whats if len({each[what] for each in layouts if what in each}) > 1]
    stages = [tuple(s for s, mine in enumerate(of_stage) if mine == k) for k in numbers]
    return tuple(
        StageSharding(mine, {what: each.get(what, "") for what in differ}) for mine, each in zip(stages, layouts)
    )


def _layouts(problem: Problem, e: Evaluation, own: set[int]) -> dict[str, str]:
    """Return the layouts of what some vertices are, by module."""
    found: dict[str, str] = {}
    for region in regions_of(problem, e, own):
        found |= {f"weights of {region.name}": region.weights} if region.weights else {}
        found |= {f"activations of {region.name}": region.activations} if region.activations else {}
    parameters = [v.index for v in problem.vertices if v.index in own and v.kind == "parameter"]
    kept = len({v for v, _, _ in e.retained if v in own and problem.vertices[v].kind == "parameter"})
    return found | {KEPT: f"{kept / max(1, len(parameters)):.0%}"}
