"""A pipeline schedule as plain data: for each rank the order of its forwards and backwards, one action a stage and
micro-batch.

An action is written as torch.distributed.pipelining writes it: `2F0` is the forward of stage 2 on micro-batch 0. The
letters:

    F  forward
    B  whole backward: the gradients of the stage's input and of its weights
    I  only the gradient of the stage's input, which the stage before waits for
    W  only the gradients of the weights, which nobody waits for before the optimizer

The split of B into I and W is that of Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), who call the
parts B and W.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..errors import ScheduleError

KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
VERSION = 1


class Action(NamedTuple):
    """One thing that a rank does. `str` gives `2F0`, `Action.parse` reads it."""

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @staticmethod
    def parse(text: str) -> Action:
        """Read an action as `str` writes it. Raise ScheduleError for any other text."""
        match = re.fullmatch(r"(\d+)([FBIW])(\d+)", text) if isinstance(text, str) else None
        if match is None:
            raise ScheduleError(
                f"cannot read {text!r} as an action", fix="write stage, letter, micro-batch: 2F0, 2B0, 2I0 or 2W0"
            )
        return Action(match[2], int(match[1]), int(match[3]))


def is_pair(first: Action, second: Action) -> bool:
    """Return whether two actions are a forward and the whole backward of another micro-batch, so that neither waits
    for the other."""
    return (first.kind, second.kind) == ("F", "B") and first.micro_batch != second.micro_batch


@dataclass(frozen=True)
class Schedule:
    """The stages of each rank, and one order of actions a rank. `print(schedule)` gives one line a rank. `pairs`:
    by rank, how many forwards run alone, after which a forward and the backward of another micro-batch right behind it,
    of any stages of the rank, run as one (see `together`); empty if none do.

    Nothing is promised about the orders: `play.check` says whether they are complete and end.
    """

    name: str
    ranks: int
    micro_batches: int
    rank_of_stage: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]
    pairs: tuple[int, ...] = ()

    @staticmethod
    def parse(name: str, orders: Sequence[str]) -> Schedule:
        """Read one text of actions a rank, "0F0 0F1 0B0 0B1": a stage is on the rank that has its actions. Raise
        ScheduleError for a text that has none, and for a stage that nobody has."""
        read = tuple(tuple(map(Action.parse, order.split())) for order in orders)
        rank_of = {action.stage: rank for rank, order in enumerate(read) for action in order}
        if not rank_of or sorted(rank_of) != list(range(len(rank_of))):
            raise ScheduleError(f"schedule {name} has the stages {sorted(rank_of)}", fix="count them from 0 on")
        count = 1 + max(action.micro_batch for order in read for action in order)
        return Schedule(name, len(read), count, tuple(rank_of[stage] for stage in sorted(rank_of)), read)

    @property
    def stages(self) -> int:
        """Return the number of stages on all ranks."""
        return len(self.rank_of_stage)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in their order."""
        return tuple(stage for stage, r in enumerate(self.rank_of_stage) if r == rank)

    def together(self, rank: int) -> tuple[tuple[Action, ...], ...]:
        """Return the order of a rank as what it runs together: actions, or pairs of a forward and a backward."""
        found: list[tuple[Action, ...]] = []
        alone = self.pairs[rank] if self.pairs else len(self.orders[rank])
        for action in self.orders[rank]:
            last = found[-1] if found else ()
            if alone < 0 and len(last) == 1 and is_pair(last[0], action):
                found[-1] = (last[0], action)
            else:
                found.append((action,))
            alone -= action.kind == "F"
        return tuple(found)

    @property
    def stages_per_rank(self) -> int:
        """Return the most stages that a rank has."""
        return max(map(self.rank_of_stage.count, range(self.ranks)))

    @cached_property
    def splits_backward(self) -> bool:
        """Return whether a stage has to compute the gradients of its input and of its weights apart."""
        return any(action.kind == "I" for order in self.orders for action in order)

    @cached_property
    def ends_forwards_first(self) -> bool:
        """Return whether the last stage runs the forwards of all micro-batches before its first backward."""
        kinds = [a.kind for order in self.orders for a in order if a.stage == self.stages - 1]
        return "F" not in kinds[kinds.count("F") :]

    @property
    def text(self) -> str:
        """Return a heading and the actions of each rank, one line a rank."""
        width = len(str(self.ranks - 1))
        lines = (f"rank {rank:>{width}}: {' '.join(map(str, order))}" for rank, order in enumerate(self.orders))
        return "\n".join(
            [f"{self.name}: {self.ranks} ranks, {self.stages} stages, {self.micro_batches} micro-batches", *lines]
        )

    def __str__(self) -> str:
        return self.text

    def to_json(self) -> str:
        """Return the schedule as text that `from_json` reads."""
        return json.dumps({
            "version": VERSION, "name": self.name, "micro_batches": self.micro_batches,
            "rank_of_stage": self.rank_of_stage, "orders": [" ".join(map(str, order)) for order in self.orders],
            **({"pairs": self.pairs} if self.pairs else {}),
        }, indent=1)  # fmt: skip

    @staticmethod
    def from_json(text: str) -> Schedule:
        """Read what `to_json` wrote. Raise ScheduleError on anything that is not of its form."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ScheduleError(
                f"a schedule's file is not JSON: {error}", fix="write it with Schedule.to_json"
            ) from None
        form = {"version": int, "name": str, "micro_batches": int, "rank_of_stage": list, "orders": list}
        if not isinstance(data, dict) or data.get("version") != VERSION:
            raise ScheduleError(
                f"not the file of a schedule of version {VERSION}", fix="write it with Schedule.to_json"
            )
        for field, type_ in form.items():
            if type(data.get(field)) is not type_:
                raise ScheduleError(f"field {field!r} of a schedule is not {type_.__name__} but {data.get(field)!r}")
        orders = data["orders"]
        if not orders or not all(isinstance(order, str) for order in orders):
            raise ScheduleError(
                "field 'orders' of a schedule is not a text of actions for each rank", fix='write "0F0 0B0"'
            )
        ranks = len(orders)
        if not all(type(rank) is int and 0 <= rank < ranks for rank in data["rank_of_stage"]):
            raise ScheduleError(f"field 'rank_of_stage' of a schedule names a rank that is not one of {ranks}")
        pairs = data.get("pairs", [])
        if not isinstance(pairs, list) or len(pairs) not in (0, ranks) or not all(type(n) is int for n in pairs):
            raise ScheduleError(f"field 'pairs' of a schedule is not a number for each rank but {pairs!r}")
        return Schedule(
            data["name"],
            ranks,
            data["micro_batches"],
            tuple(data["rank_of_stage"]),
            tuple(tuple(map(Action.parse, order.split())) for order in orders),
            tuple(pairs),
        )
