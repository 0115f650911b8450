"""Before the first step of a pipeline: its schedule ends on all ranks, and what each stage sends is what the next one
receives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from ..codegen.rank_program import StageProgram
from ..errors import DesyncError, StageError
from ..ir.graph import output_node
from ..schedule.actions import Schedule
from ..schedule.play import check

Message = tuple[str, tuple[int, ...], str]  # name, local shape and dtype of a tensor


@dataclass(frozen=True)
class Border:
    """The values that a stage hands over, in the order in which they travel."""

    received: tuple[Message, ...]
    sent: tuple[Message, ...]
    arriving: tuple[Message, ...]
    returned: tuple[Message, ...]


def border_of(program: StageProgram) -> Border:
    """Return the Border of a stage, by one rank's graphs of it."""
    return Border(
        _taken(program.forward, "activation"),
        _given(program.forward, "activation"),
        _taken(program.backward, "arriving"),
        _given(program.backward, "returned"),
    )


def check_pipeline(schedule: Schedule, borders: Mapping[int, Border]) -> None:
    """Check a schedule and what its stages hand to each other: `borders` by stage, of the ranks that do so. Raises
    ScheduleError for a schedule that does not end, DesyncError for stages that do not fit together."""
    check(schedule)
    for stage in range(schedule.stages - 1):
        here, after = borders[stage], borders[stage + 1]
        for what, sent, received in (
            (f"stage {stage} sends to stage {stage + 1}", here.sent, after.received),
            (f"stage {stage + 1} returns to stage {stage}", after.returned, here.arriving),
        ):
            if sent != received:
                raise DesyncError(
                    f"{what}: {_text(sent)}, which waits for {_text(received)}",
                    fix="build the same model and use one version of torch and autopar on all ranks",
                )


def _text(messages: tuple[Message, ...]) -> str:
    return ", ".join(f"{name} {shape} {dtype}" for name, shape, dtype in messages) or "nothing"


def _taken(graph: fx.GraphModule | None, kind: str) -> tuple[Message, ...]:
    nodes = graph.graph.find_nodes(op="placeholder") if graph is not None else ()
    taken = [n for n in nodes if _kind(n.meta.get("role")) == kind]
    if rows := next((n for n in taken if n.meta["layout"].owned_axes), None):
        raise StageError(
            f"a stage would receive {rows.name}, rows of experts of which it does not know how many there are",
            source=rows.meta.get("source") or None,
            fix="plan again, or begin the stage before the experts or behind them",
        )
    return tuple(_message(n.name, n.meta["val"]) for n in taken)


def _given(graph: fx.GraphModule | None, kind: str) -> tuple[Message, ...]:
    if graph is None:
        return ()
    output = output_node(graph.graph)
    pairs = zip(output.args[0], output.meta["roles"])
    return tuple(_message(role.name, value.meta["val"]) for value, role in pairs if _kind(role) == kind)


def _kind(role) -> str:
    return "" if role is None else role.kind


def _message(name: str, value: torch.Tensor) -> Message:
    return name, tuple(value.shape), str(value.dtype).removeprefix("torch.")
