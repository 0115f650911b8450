"""A schedule as a Chrome trace, which Perfetto opens: a row a rank, times in microseconds."""

from __future__ import annotations

from .actions import KINDS
from .played import Played


def trace_of(played: Played) -> dict:
    """The trace as plain data for `json.dump`."""
    schedule = played.schedule
    events: list[dict] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": f"pipeline schedule {schedule.name}"}}]
    for rank in range(schedule.ranks):
        events += [{"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}},
                   {"ph": "M", "pid": 0, "tid": rank, "name": "thread_sort_index", "args": {"sort_index": rank}}]  # fmt: skip
    for rank, action, start, end in played:
        events.append({
            "ph": "X", "pid": 0, "tid": rank, "name": str(action), "cat": KINDS[action.kind],
            "ts": round((start - played.first) * 1e6, 3), "dur": round((end - start) * 1e6, 3),
            "args": {"stage": action.stage, "micro-batch": action.micro_batch},
        })  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}
