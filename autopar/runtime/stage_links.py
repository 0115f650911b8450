"""Send and receive between this rank's stages and those of other ranks along a pipeline's axis, message by message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..processes import watch
from ..schedule.actions import Action, Schedule
from ..schedule.transfers import STEP, awaited, receives, sent, taken_before
from .stage_executor import StageExecutor, Values
from .walk import Links


class StageLinks(Links):
    """`rank_of_stage` gives ranks of the process groups along the axis: `groups` has one for each kind of message.

    With a `schedule`, messages are received in its order and let go of when they are known to have arrived. Without
    one, each is received when it is waited for, and at most `ahead` are on their way."""

    def __init__(
        self,
        stages: Mapping[int, StageExecutor],
        rank: int,
        rank_of_stage: Sequence[int],
        groups: Mapping,
        device: torch.device,
        schedule: Schedule | None = None,
        ahead: int | None = None,
    ):
        super().__init__(stages, len(rank_of_stage))
        self.rank, self.rank_of_stage, self.groups, self.device, self.ahead = rank, rank_of_stage, groups, device, ahead
        self.receives = receives(schedule, rank) if schedule is not None else {}
        self.taken = taken_before(schedule, rank) if schedule is not None else {}
        self.receiving: dict[Action, tuple[dict[str, Tensor], list[dist.Work]]] = {}
        self.sending: dict[Action, tuple[list[Tensor], list[dist.Work]]] = {}  # oldest first

    def receive(self, action: Action) -> Values:
        """Return what an action waits for, after it has begun to receive what is sent by then."""
        for message in self.receives.get(action, ()):
            self._begin(message)
        message = awaited(action, self.count)
        if message is None or self.rank_of_stage[message.stage - STEP[message.kind]] == self.rank:
            return super().receive(action)
        with watch.collective(f"{'an activation' if message.kind == 'F' else 'a gradient'} for stage {message.stage}"):
            if message not in self.receiving:
                self._begin(message)
            values, works = self.receiving.pop(message)
            for work in works:
                work.wait()
        for other in self.taken.get(message, ()):
            self._let_go(other)
        return {name: [value] for name, value in values.items()}

    def _begin(self, message: Action) -> None:
        likes = self.stages[message.stage].expects(message)
        values = {n: torch.empty(tuple(v.shape), dtype=v.dtype, device=self.device) for n, v in likes.items()}
        group, source = self.groups[message.kind], self.rank_of_stage[message.stage - STEP[message.kind]]
        self.receiving[message] = values, [dist.irecv(v, group=group, group_src=source) for v in values.values()]

    def send(self, action: Action, values: Values) -> None:
        """Send what an action has made, without waiting for the other side."""
        message = sent(action, self.count)
        if message is None or self.rank_of_stage[message.stage] == self.rank:
            return super().send(action, values)
        tensors, group, to = [v.contiguous() for (v,) in values.values()], self.groups[message.kind], message.stage
        works = [dist.isend(v, group=group, group_dst=self.rank_of_stage[to]) for v in tensors]
        self.sending[message] = tensors, works
        while self.ahead is not None and len(self.sending) > self.ahead:
            self._let_go(next(iter(self.sending)))

    def _let_go(self, message: Action) -> None:
        _, works = self.sending.pop(message)
        with watch.collective(f"a message to stage {message.stage}"):
            for work in works:
                work.wait()

    def finish(self) -> None:
        """Wait for all messages that are still on their way."""
        for message in [*self.sending]:
            self._let_go(message)
        super().finish()
