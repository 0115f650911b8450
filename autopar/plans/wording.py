"""Word the texts of a plan for a step through stages, or for one without: all of it is here, so that no text has to
ask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..utils.format import ms, percent
from .axes import unsharded_lines
from .pipeline import Pipeline
from .pipeline_text import batches_text, pipeline_line

if TYPE_CHECKING:
    from .plan import Plan


@dataclass(frozen=True)
class Wording:
    """Titles of tables; lines and cells of a plan, empty where there is nothing to say. `bound`: what the bound is of,
    as a sentence, and `bound_row` as the name of a row. `sent` and `called`: of whom a simulated step counts bytes and
    collectives. `figures`: of the pipeline, by the names that they have beside other plans; `stages`: what each holds
    and on which rank."""

    memory: str
    collectives: str
    bound_row: str
    sent: str
    called: str
    bound: Callable[[Plan], str]
    schedule: Callable[[Plan], str]
    batching: Callable[[Plan], str]
    progress: Callable[[Plan], str]
    batches: Callable[[Plan], list[str]]
    unsharded: Callable[[Plan], list[str]]
    figures: dict[str, Callable[[Pipeline], str]]


def wording(plan: Plan) -> Wording:
    """Return the words for a plan."""
    return STAGED if plan.pipeline.is_staged else WHOLE


def _bound_of_strategy(plan: Plan) -> str:
    of_these = "" if plan.strategy == "auto" else f" of {plan.strategy}"
    without = " without loops" if plan.sharding.loops else ""
    waiting = " that waits for its rows" if plan.sharding.exchanges or plan.pipeline.pairs else ""
    return f"no plan{of_these}{without}{waiting} takes less than {ms(plan.bound)}"


def _bound_of_stages(plan: Plan) -> str:
    waiting = " where rows are waited for" if plan.sharding.exchanges else ""
    return f"an even split without waiting takes {ms(plan.bound)} or more{waiting}"


def _batches(plan: Plan) -> list[str]:
    if plan.micro_batches == 1:
        return []
    how = "once a step" if plan.reduces_once else "in each of them"
    waits = ", all forwards before any backward" if plan.pipeline.orders.ends_forwards_first else ""
    return [f"{batches_text(plan)}, gradients reduced {how}{waits}"]


WHOLE = Wording(
    memory="memory of a device",
    collectives="collectives",
    bound_row="bound of the strategy",
    sent="sent by a rank",
    called="collectives of rank 0",
    bound=_bound_of_strategy,
    schedule=lambda plan: "",
    batching=lambda plan: "".join(_batches(plan)) or f"one pass of {plan.samples} samples a step",
    progress=lambda plan: f"{ms(plan.exposed_seconds)} of communication exposed",
    batches=_batches,
    unsharded=unsharded_lines,
    figures={},
)
STAGED = Wording(
    memory="memory of the fullest device",
    collectives="collectives of all stages",
    bound_row="even and without waiting",
    sent="sent inside of stages, by one rank of each",
    called="collectives inside of stages, of one rank of each",
    bound=_bound_of_stages,
    schedule=lambda plan: f", {plan.pipeline.schedule} with {plan.micro_batches} micro-batches",
    batching=pipeline_line,
    progress=pipeline_line,
    batches=lambda plan: [],
    unsharded=lambda plan: [],
    figures={
        "schedule": lambda p: p.schedule,
        "ranks x stages each": lambda p: f"{p.ranks} x {p.stages_per_rank}",
        "bubble": lambda p: percent(p.played().bubble, 1.0),
        "slowest stage by the mean": lambda p: f"{p.balance:.2f}",
    },
)
BOUND_ROWS = WHOLE.bound_row, STAGED.bound_row
