"""Schedules as a Chrome trace, which Perfetto opens: a process a rank, times in microseconds.

A rank has a row of its actions, a row of what it sends, if that is known, and a counter of what it holds: micro-batches
in flight, or bytes where those are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .actions import KINDS, Action, Schedule
from .played import Played

Json = dict[str, Any]
ACTIONS, SENDS = 0, 1  # rows of a rank
IN_FLIGHT, HELD = "micro-batches in flight", "bytes of a device"


def trace_of(
    played: Played | Mapping[str, Played],
    transfer_seconds: Sequence[float] = (),
    resident: Sequence[Mapping[str, float]] = (),
) -> Json:
    """Return the trace as plain data for `json.dump`, of one run or of several by their names, one after the other in
    the list of processes. `transfer_seconds`: of each border between two stages. `resident`: by rank and kind, the
    bytes that it holds all the time; `activation` of the runs is then in bytes."""
    runs = {"": played} if isinstance(played, Played) else played
    events: list[Json] = []
    for number, (name, run) in enumerate(runs.items()):
        first = number * run.schedule.ranks
        for rank in range(run.schedule.ranks):
            events += _names(first + rank, f"{name} rank {rank}".strip(), bool(transfer_seconds))
        for rank, action, start, end in run:
            begin, done = start - run.first, end - run.first
            where = {"stage": action.stage, "micro-batch": action.micro_batch}
            events.append(_slice(first + rank, ACTIONS, str(action), KINDS[action.kind], begin, done, where))
            if transfer_seconds and (other := _receiver(run.schedule, action)) is not None:
                to, late = run.schedule.rank_of_stage[other], transfer_seconds[min(action.stage, other)]
                events.append(_slice(first + rank, SENDS, f"{action} to rank {to}", "send", done, done + late, where))
        events += _held(run, first, resident)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(process: int, name: str, sends: bool) -> Iterator[Json]:
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}}
    for row, text in ((ACTIONS, "actions"), (SENDS, "sends"))[: 1 + sends]:
        yield {"ph": "M", "pid": process, "tid": row, "name": "thread_name", "args": {"name": text}}


def _slice(process: int, row: int, name: str, category: str, start: float, end: float, args: Json) -> Json:
    return {"ph": "X", "pid": process, "tid": row, "name": name, "cat": category, "ts": _us(start),
            "dur": _us(end - start), "args": args}  # fmt: skip


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _receiver(schedule: Schedule, action: Action) -> int | None:
    """Return the stage that waits for what an action makes, if another rank has it."""
    other = action.stage + 1 if action.kind == "F" else action.stage - 1
    if action.kind == "W" or not 0 <= other < schedule.stages:
        return None
    return other if schedule.rank_of_stage[other] != schedule.rank_of_stage[action.stage] else None


def _held(run: Played, first: int, resident: Sequence[Mapping[str, float]]) -> Iterator[Json]:
    """Iterate over what each rank holds, wherever it changes: a micro-batch from the start of its F to the end of its B
    or W."""
    for rank in range(run.schedule.ranks):
        changes = [(0.0, 0.0)]
        for action, start, end in zip(run.schedule.orders[rank], run.starts[rank], run.ends[rank]):
            size = run.activation[action.stage] if run.activation and resident else 1.0
            if action.kind != "I":
                changes.append((start - run.first, size) if action.kind == "F" else (end - run.first, -size))
        held = 0.0
        for at, change in changes:
            held += change
            kinds = {**resident[rank], "activations": max(held, 0.0)} if resident else {"in flight": held}
            yield {
                "ph": "C",
                "pid": first + rank,
                "name": HELD if resident else IN_FLIGHT,
                "ts": _us(at),
                "args": {kind: round(value) for kind, value in kinds.items()},
            }
