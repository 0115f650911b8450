"""What passes between this rank's stage of an asynchronous pipeline and the two beside it, message by message."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, fx

from .. import _torch
from ..codegen.rank_program import StageProgram
from ..plans.plan import Plan
from ..processes import watch
from ..processes.process_groups import FIRST_STEP, ProcessGroups, timeout_seconds


class StageLinks:
    """Messages of one way are sent and received in one order. NCCL has one stream for all messages of two ranks in a
    group, on which one of one way could wait for one of the other, without end: so each way has a group of its own
    there."""

    def __init__(self, plan: Plan, groups: ProcessGroups, program: StageProgram, device: torch.device):
        axis = plan.pipeline.axis
        self.place, self.device, self.most = plan.mesh.coordinate(groups.rank)[axis], device, 2 * plan.pipeline.ranks
        self.forward = self.backward = _torch.group_of(groups.bind([axis])[axis])
        if dist.get_backend(self.forward) != "gloo":
            patience = timedelta(seconds=FIRST_STEP * timeout_seconds())
            for ranks in sorted({tuple(sorted(plan.mesh.group((axis,), r))) for r in range(plan.mesh.devices)}):
                group = dist.new_group(list(ranks), timeout=patience)
                self.backward = group if groups.rank in ranks else self.backward
        self.received = self._likes(program.forward.graph, program.stage.received)
        self.arriving = (
            self._likes(program.backward.graph, program.stage.arriving) if program.backward is not None else {}
        )
        self.sending: deque[tuple[list, list[Tensor]]] = deque()

    @staticmethod
    def _likes(graph: fx.Graph, names: Sequence[str]) -> dict[str, Tensor]:
        found = {n.name: n.meta["val"] for n in graph.nodes if n.op == "placeholder"}
        return {name: found[name] for name in names}

    def from_before(self) -> dict[str, list[Tensor]]:
        """Receive a micro-batch's activations from the stage before."""
        return self._receive(self.received, self.forward, self.place - 1, "an activation")

    def from_next(self) -> dict[str, list[Tensor]]:
        """Receive a micro-batch's gradients from the next stage."""
        return self._receive(self.arriving, self.backward, self.place + 1, "a gradient")

    def to_next(self, values: Mapping[str, list[Tensor]]) -> None:
        """Send a micro-batch's activations to the next stage."""
        self._send(values, self.forward, self.place + 1)

    def to_before(self, values: Mapping[str, list[Tensor]]) -> None:
        """Send a micro-batch's gradients to the stage before."""
        self._send(values, self.backward, self.place - 1)

    def _receive(self, likes: Mapping[str, Tensor], group, place: int, what: str) -> dict[str, list[Tensor]]:
        if not likes:
            return {}
        found = {name: torch.empty(tuple(v.shape), dtype=v.dtype, device=self.device) for name, v in likes.items()}
        with watch.meeting(f"{what} from stage {place}"):
            for work in [dist.irecv(t, group=group, group_src=place) for t in found.values()]:
                work.wait()
        return {name: [value] for name, value in found.items()}

    def _send(self, values: Mapping[str, list[Tensor]], group, place: int) -> None:
        """Send without waiting for the other side, but for what it has received long ago: a stage is at most p
        micro-batches ahead."""
        if not values:
            return
        tensors = [value.contiguous() for (value,) in values.values()]
        self.sending.append(([dist.isend(t, group=group, group_dst=place) for t in tensors], tensors))
        while len(self.sending) > 2 * self.most:
            self._wait()

    def _wait(self) -> None:
        works, _ = self.sending.popleft()
        with watch.meeting("a message to the next stage"):
            for work in works:
                work.wait()

    def finish(self) -> None:
        """Wait for all messages that are still on their way."""
        while self.sending:
            self._wait()
