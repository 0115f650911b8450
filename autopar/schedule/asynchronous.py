"""Pipelines that never flush, as data: the order of a stage, its updates, and the version of the weights that a
micro-batch meets.

Training with them is NOT synchronous training: a gradient is computed with weights that are some updates old. Version v
of a stage's weights is what its first v updates have made of them. Of p stages (s from 0), micro-batches i from 0:

| name                    | an update after   | version of (s, i)    | held | the update w[t+1] = w[t] - lr g(...)    |
|-------------------------|-------------------|----------------------|------|-----------------------------------------|
| pipedream               | every micro-batch | max(0, i-(p-1-s))    | p-s  | w_0[t-p+1], w_1[t-p+2], ..., w_{p-1}[t] |
| pipedream_vertical_sync | every micro-batch | max(0, i-(p-1))      | p    | w[t-p+1] in all stages                  |
| pipedream_2bw           | m of them, m >= p | max(0, floor(i/m)-1) | 2    | w[t-1] in all stages                    |

The order is 1F1B for as many micro-batches as there are: its steady state goes on over the updates, so no stage ever
waits for another one's update. A micro-batch's backward reads the version of its forward. In vertical sync, and for
each group of 2BW, the version is the newest that stage 0 has when the first of the group comes in; later stages have it
too by then.

Held is what a micro-batch in flight, or one still to come, reads, and the newest version. So under vertical sync stage
s holds p: the p-s of its micro-batches in flight, as with weight stashing alone, and s newer ones whose micro-batches
have yet to arrive.

Sources: weight stashing and vertical sync: PipeDream, SOSP 2019 (arXiv 1806.03377). 2BW: Narayanan et al.,
"Memory-Efficient Pipeline-Parallel DNN Training" (arXiv 2006.09503); what it calls PipeDream-flush is synchronous:
"1f1b" of catalogue.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import ScheduleError, StrategyError, nearest
from .actions import Action, Schedule

STASHING, VERTICAL, BUFFERED = "pipedream", "pipedream_vertical_sync", "pipedream_2bw"
NAMES = (STASHING, VERTICAL, BUFFERED)


class Update(NamedTuple):
    """A stage's optimizer step, which makes a version of its weights: `2U5` makes version 5 of stage 2. Beside an
    Action, whose fields it has but for the last."""

    kind: str
    stage: int
    version: int

    def __str__(self) -> str:
        return f"{self.stage}U{self.version}"


@dataclass(frozen=True)
class Asynchronous:
    """One of `NAMES` over so many stages, one a rank. `group`: micro-batches of one update."""

    name: str
    stages: int
    group: int = 1

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise StrategyError(f"there is no asynchronous schedule {self.name!r}", fix=nearest(str(self.name), NAMES))
        for what, value, least in (("stages", self.stages, 2), ("micro-batches of an update", self.group, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise StrategyError(
                    f"schedule {self.name} cannot have {value!r} {what}", fix=f"use a whole number from {least} on"
                )
        if self.name != BUFFERED and self.group != 1:
            raise StrategyError(
                f"schedule {self.name} updates after every micro-batch, not after {self.group}",
                fix=f"use {BUFFERED} for updates of several",
            )
        if self.name == BUFFERED and self.group < self.stages:
            raise StrategyError(
                f"schedule {BUFFERED} needs at least as many micro-batches an update as stages, "
                f"{self.stages}, not {self.group}",
                fix=f"use {self.stages} or more",
            )

    # closed forms
    # ----------------------------------------------------------------------------------------------------------

    def version_of(self, stage: int, micro_batch: int) -> int:
        """Return the version that both the forward and the backward of a micro-batch read in a stage."""
        late = {STASHING: self.stages - 1 - stage, VERTICAL: self.stages - 1, BUFFERED: 1}[self.name]
        return max(0, micro_batch // self.group - late)

    def versions_held(self, stage: int) -> int:
        """Return the most versions of its weights that a stage has at once, the newest included; after many updates it
        is exactly that."""
        return {STASHING: self.stages - stage, VERTICAL: self.stages, BUFFERED: 2}[self.name]

    def needed(self, stage: int, next_backward: int, next_forward: int, more: bool) -> set[int]:
        """Return the versions, up to the newest that there can be, which a stage has still to read when these
        micro-batches are its next ones; with `more` there are forwards to come, nobody knows how many."""
        found = {self.version_of(stage, i) for i in range(next_backward, next_forward)}
        return found | set(range(self.version_of(stage, next_forward), next_forward // self.group + 1) if more else ())

    # orders
    # ----------------------------------------------------------------------------------------------------------------

    def walk(self, stage: int, has: Callable[[int], bool]) -> Iterator[Action | Update]:
        """Iterate over what a stage does, one after the other, as long as there is a micro-batch i: `has(i)`, which is
        asked for in order, no earlier than the forward of the one before is over."""
        ahead, i = self.stages - 1 - stage, 0
        while has(i):
            yield Action("F", stage, i)
            if i >= ahead:
                yield from self._back(stage, i - ahead)
            i += 1
        for j in range(max(0, i - ahead), i):
            yield from self._back(stage, j)

    def _back(self, stage: int, i: int) -> Iterator[Action | Update]:
        yield Action("B", stage, i)
        if (i + 1) % self.group == 0:
            yield Update("U", stage, (i + 1) // self.group)

    def orders(self, micro_batches: int) -> tuple[tuple[Action | Update, ...], ...]:
        """Return by stage its actions and updates. Raise ScheduleError unless the last group is whole."""
        if micro_batches % self.group:
            raise ScheduleError(
                f"{micro_batches} micro-batches are no whole groups of {self.group}",
                fix=f"use a multiple of {self.group}",
            )
        return tuple(tuple(self.walk(stage, lambda i: i < micro_batches)) for stage in range(self.stages))

    def without_updates(self, micro_batches: int) -> Schedule:
        """Return the forwards and backwards, for `play`, text and drawings: one stage a rank."""
        orders = tuple(tuple(a for a in order if isinstance(a, Action)) for order in self.orders(micro_batches))
        return Schedule(self.name, self.stages, micro_batches, tuple(range(self.stages)), orders)
