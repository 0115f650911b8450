"""Find what each axis of a plan's mesh carries, whatever its name says.

Without a strategy a name decides nothing: the planner puts on every axis what is fastest, and where nothing gains by it
an axis may carry nothing, so that its devices all do the same. The plan's text says so, and `strict=True` refuses it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..errors import StrategyError
from ..ir.layout import ZIGZAG, Layout
from ..utils.format import ms

if TYPE_CHECKING:
    from .plan import Plan

BATCH, INPUTS, PARAMETERS, VALUES = "the batch", "another dim of the inputs", "parameters", "values between ops"
SEQUENCE, EXPERTS = "the sequence", "experts"
PROMISES = {
    "ep": EXPERTS,
    "cp": SEQUENCE,
    "sp": SEQUENCE,
}  # by the names of axes, what they need not carry


def carried(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Return, for each axis of more than one device, the kinds of tensors that it cuts; a pipeline's axis carries its
    stages."""
    mesh, layouts = plan.sharding.mesh, plan.sharding.leaves.items()
    inputs = [layout for name, layout in layouts if name.startswith("x_")]
    parameters = [layout for name, layout in layouts if name.startswith("p_")]
    values = [x for node in plan.sharding.nodes.values() for x in (*node.inputs, *node.outputs)]
    found = {}
    for axis in (axis for axis in mesh.names if mesh.size(axis) > 1):
        kinds = {
            BATCH: any(x.dims and axis in x.dims[0] for x in inputs),
            INPUTS: any((x.dim_of(axis) or 0) > 0 for x in inputs),
            PARAMETERS: any(x.dim_of(axis) is not None for x in parameters),
            VALUES: any(_cuts(x, axis) for x in values),
            EXPERTS: any(axis in x.owned_axes for x in values),
        }  # fmt: skip
        found[axis] = tuple(kind for kind, is_cut in kinds.items() if is_cut)
    return found


def _cuts(layout: Layout, axis: str) -> bool:
    return layout.dim_of(axis) is not None or layout.reduction_of(axis) is not None


def axis_lines(plan: Plan) -> list[str]:
    """Return a line for every axis that carries nothing, for every one whose name says what it does not carry, and for
    all that cut a dim in zigzag."""
    lines = []
    for axis, kinds in carried(plan).items():
        if not kinds:
            lines.append(f"axis {axis} carries nothing: its {plan.mesh.size(axis)} devices all do the same")
        elif axis in PROMISES and PROMISES[axis] not in kinds and not (PROMISES[axis] == SEQUENCE and INPUTS in kinds):
            lines.append(f"axis {axis} carries {' and '.join(kinds)}: its name gives it no part of {PROMISES[axis]}")
    return lines + _zigzag_lines(plan)


def _zigzag_lines(plan: Plan) -> list[str]:
    """Return a line that says which blocks of a sequence each device has, if it is cut in zigzag."""
    values = [x for node in plan.sharding.nodes.values() for x in (*node.inputs, *node.outputs)]
    cuts = {axes for x in values for axes, parts in zip(x.dims, x.parts) if parts == ZIGZAG}
    if not cuts:
        return []
    axes = max(cuts, key=lambda axes: (len(axes), axes))
    blocks = 2 * math.prod(plan.sharding.mesh.size(axis) for axis in axes)
    return [
        f"sequences are in zigzag over {', '.join(axes)}: of {blocks} blocks device r has r and {blocks - 1} - r, "
        "so that a causal mask gives all as much to do"
    ]


def unsharded_lines(plan: Plan) -> list[str]:
    """Return a line that says why, if a plan of several devices cuts neither the batch nor a parameter, by the fastest
    of the plans beside it that are known."""
    cut = {kind for kinds in carried(plan).values() for kind in kinds}
    if plan.mesh.devices == 1 or plan.strategy != "auto" or cut - {VALUES}:
        return []
    steps = {a.step_seconds: a for a in reversed(plan.alternatives) if a.step_seconds and a.fits and not a.mesh}
    why = f"of {ms(plan.compute_seconds)} of compute it would save less than its collectives take"
    if (seconds := min(steps, default=0.0)) > plan.step_seconds:
        communication = (steps[seconds].communication_seconds or 0.0) - plan.communication_seconds
        saved = max(0.0, plan.step_seconds + communication - seconds)
        why = (
            f"{steps[seconds].name}, the next fastest, saves {ms(saved)} of compute and adds {ms(communication)} of "
            f"communication"
        )
    return [f"neither batch nor parameters are sharded: {why}"]


def check_axes(plan: Plan, strict: bool) -> None:
    """Raise StrategyError, if `strict`, for a plan in which an axis carries nothing."""
    idle = [axis for axis, kinds in carried(plan).items() if not kinds] if strict else []
    if idle:
        others = ",".join(f"{name}={size}" for name, size in plan.mesh.axis_sizes.items() if name not in idle)
        raise StrategyError(
            f"axis {' and axis '.join(idle)} would carry nothing: {plan.model} is neither faster nor smaller if it is "
            f"cut over it",
            mesh=plan.mesh,
            fix=f"use mesh {others}" if others else "use one device, or a larger batch",
        )
