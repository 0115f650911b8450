"""Walk through the actions of a schedule: each stage does its own, and what passes between them goes through links.

Processes walk through the order of their rank, with links to the other ranks (stage_links.py). The simulator walks
through the orders of all ranks as they are played, on all stages, and what passes stays here until it is received.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from ..errors import VerifyError
from ..schedule.actions import KINDS, Action
from ..schedule.transfers import awaited, sent
from .stage_executor import StageExecutor, Values


class Links:
    """The values that pass between the stages of one process, by message (see autopar/schedule/transfers.py). `count`:
    of all stages. `sends`: by (stage, "forward" or "backward"), how many values it has sent."""

    def __init__(self, stages: Mapping[int, StageExecutor], count: int):
        self.stages, self.count = stages, count
        self.passing: dict[Action, Values] = {}
        self.sends: Counter[tuple[int, str]] = Counter()

    def receive(self, action: Action) -> Values:
        """Return what an action waits for. Raises VerifyError if it was not sent before."""
        message = awaited(action, self.count)
        if message is None:
            return {}
        names, found = self.stages[action.stage].expects(message), self.passing.get(message, {})
        missing = [name for name in names if name not in found]
        if missing:
            raise VerifyError(
                f"stage {action.stage} waits for {', '.join(missing)} of micro-batch {action[2]}, which nobody sent"
            )
        arrived = {name: found.pop(name) for name in names}
        if not found:
            self.passing.pop(message, None)
        return arrived

    def send(self, action: Action, values: Values) -> None:
        """Send what an action has made."""
        message = sent(action, self.count)
        if message is not None and values:
            self.passing[message] = values
            self.sends[action.stage, KINDS[message.kind]] += len(values)

    def finish(self) -> None:
        """End a call. Raises VerifyError if something that was sent has not been received."""
        left = sorted(name for values in self.passing.values() for name in values)
        if left:
            raise VerifyError(f"sent and never received: {', '.join(left)}")


def walk(
    actions: Iterable[tuple[Action, ...]], stages: Mapping[int, StageExecutor], links: Links
) -> Iterator[tuple[Action, float, float]]:
    """Do actions one after the other, those of a pair together, and yield each with the seconds of time.perf_counter at
    which it began, when what it waits for was there, and ended."""
    for together in actions:
        arrived = [links.receive(action) for action in together]
        start = time.perf_counter()
        made = stages[together[0].stage].do(together, arrived, stages[together[-1].stage])
        end = time.perf_counter()
        for action in together:
            links.send(action, made.pop(0))
        del arrived
        for action in together:
            yield action, start, end
    links.finish()
