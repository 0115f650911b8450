"""The predicted step of a pipeline as a Chrome trace: a process a rank, with its actions, its sends and its bytes."""

from __future__ import annotations

from ..planner.objective.memory_timeline import SAVED
from ..planner.spmd.planned import Planned
from ..schedule.trace import ACTIONS, trace_of


def pipeline_trace_of(planned: Planned) -> dict:
    """Return the trace as plain data for `json.dump`. Gradients are reduced after a rank's last action."""
    evaluated = planned.stages.evaluated
    resident = [{kind: bytes_ for kind, bytes_ in held.items() if kind != SAVED} for held in evaluated.memory]
    transfers = [cost.transfer_seconds for cost in evaluated.pipeline.costs[:-1]]
    trace = trace_of(evaluated.played, transfers, resident)
    for event in trace["traceEvents"]:
        if event["name"] == "process_name":
            event["args"]["name"] += f" of {planned.plan.model} on mesh {planned.plan.mesh}, predicted"
    for rank, (ends, seconds) in enumerate(zip(evaluated.played.ends, evaluated.once_seconds)):
        if seconds and ends:
            trace["traceEvents"].append(
                {
                    "ph": "X",
                    "pid": rank,
                    "tid": ACTIONS,
                    "name": "reduce gradients",
                    "cat": "reduction",
                    "ts": round((ends[-1] - evaluated.played.first) * 1e6, 3),
                    "dur": round(seconds * 1e6, 3),
                    "args": {},
                }
            )
    return trace
