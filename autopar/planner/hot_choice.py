"""Choose how many hot experts of each layer are copied to all devices, by the seconds of a step.

Where the rows of experts are assumed to be uneven, plans are made with 1, 2, 4 and 8 copies as long as each is faster
than the one before, beside the plan without, which stays if none is faster. Each is the plan that is found if so many
are asked for: a sharding that is slower without copies may be the fastest with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import fx

from ..cost.expert_load import experts_in
from ..errors import MemoryInfeasibleError
from .spmd.plan_options import AUTO_EXPERTS, PlanOptions
from .spmd.planned import Planned

CANDIDATES = (1, 2, 4, 8)


def fastest(options: PlanOptions, graph: fx.Graph, planned: Callable[[PlanOptions], Planned]) -> Planned:
    """Return the fastest plan of a captured graph; `planned` makes one with so many copies as its options say. Raise
    what that raises where no number of copies fits."""
    if options.hot_experts != AUTO_EXPERTS:
        return planned(options)
    without = replace(options, hot_experts=0)
    experts = experts_in(graph)
    if not experts or options.expert_capacity is not None or options.skew(graph).is_even:
        return planned(without)
    best: Planned | None = None
    refused: MemoryInfeasibleError | None = None
    for hot in (0, *(n for n in CANDIDATES if n < max(experts))):
        try:
            found = planned(replace(options, hot_experts=hot, may_copy_none=True))
        except MemoryInfeasibleError as error:
            refused = refused or error
            continue
        if best is not None and _rank(found) >= _rank(best):
            break
        best = found
    if best is None:
        assert refused is not None  # there is a first candidate
        raise refused
    return best


def _rank(planned: Planned) -> tuple[bool, float]:
    """Return what is less of a better plan: whether it is too large, and its seconds by sample."""
    plan = planned.plan
    return plan.peak_bytes > plan.memory_limit_bytes, plan.step_seconds / max(1, plan.samples)
