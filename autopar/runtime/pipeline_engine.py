"""One rank's stages on the engine of torch.distributed.pipelining: it walks through the schedule, sends, receives and
waits.

torch's stages run a module under autograd; these run graphs that were split before. Of torch's stage only the place in
the pipeline is used: what is received, sent and run is said here. A value between two stages of one rank is handed over
as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch
from ..codegen.rank_program import StageProgram
from ..ir.graph import output_node
from ..processes.process_groups import ProcessGroups
from ..schedule.actions import Action, Schedule
from .loaded import LoadedGraph
from .pipeline_backward import StageBackward

_Base, _Runtime, _actions, _with_sends = _torch.pipelining()


@dataclass(frozen=True)
class Passing:
    """Tensors that one stage hands to another: names, and local shapes and dtypes of this rank."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @staticmethod
    def of(graph, names: Sequence[str]) -> Passing:
        """Return the Passing of the tensors `names`, which are placeholders of `graph`."""
        leaves = {n.name: n.meta["val"] for n in graph.nodes if n.op == "placeholder"} if graph is not None else {}
        values = [leaves[name] for name in names]
        return Passing(tuple(names), tuple(tuple(v.shape) for v in values), tuple(v.dtype for v in values))

    def empty(self, device: torch.device) -> dict[str, Tensor]:
        """Return tensors to receive them in, by name."""
        return {n: torch.empty(s, dtype=d, device=device) for n, s, d in zip(self.names, self.shapes, self.dtypes)}


class StageGraphs:
    """A stage's graphs, loaded: what each takes and gives by role."""

    def __init__(self, program: StageProgram, groups: ProcessGroups, device: torch.device, splits: bool):
        stage = program.stage
        what = f"stage {stage.index}"
        self.index, self.saved = stage.index, len(program.saved)
        self.received = Passing.of(program.forward.graph, stage.received)
        self.arriving = Passing.of(
            program.backward.graph if program.backward else None, stage.arriving if program.backward else ()
        )
        self.takes = [n.meta["role"] for n in program.forward.graph.nodes if n.op == "placeholder"]
        self.gives = [r for r in output_node(program.forward.graph).meta["roles"] if r is not None]
        self.sent = tuple(r.name for r in self.gives if r.kind == "activation")
        self.has_backward = program.backward is not None
        self.forward = LoadedGraph(program.forward, groups, device, f"forward of {what}")
        self.copies = (
            None if program.copies is None else LoadedGraph(program.copies, groups, device, f"copies of {what}")
        )
        self.copied = _roles(program.copies, "placeholder"), _roles(program.copies, "output")
        self.tangents, self.split = (), None
        if not self.has_backward:
            return
        self.tangents = [n for n in program.backward.graph.nodes if n.op == "placeholder"][self.saved :]
        self.tangents = [(n.meta["role"], n.meta["val"]) for n in self.tangents]
        repeats = program.deferred is not None
        if splits:
            split = program.split
            self.split = split.kept, len(split.stash)
            self.input = StageBackward(split.input, groups, device, f"input gradients of {what}", repeats)
            self.weight = StageBackward(split.weight, groups, device, f"weight gradients of {what}", repeats)
        self.backward = StageBackward(program.backward, groups, device, f"backward of {what}", repeats)

    def compile(self, options: Mapping[str, object]) -> None:
        """Run the forward and backward graphs through torch.compile, with these options of it."""
        backward = (self.backward,) if self.has_backward else ()
        for graph in (self.forward, *backward, *((self.input, self.weight) if self.split else ())):
            graph.compile(options)


def _roles(graph, op: str) -> list:
    """Return the roles of a graph's placeholders, or of its outputs."""
    if graph is None:
        return []
    if op == "output":
        return output_node(graph.graph).meta["roles"]
    return [n.meta["role"] for n in graph.graph.nodes if n.op == op]


@dataclass
class Batch:
    """What one call gives the stages: `leaf(role, micro-batch)` finds an argument of a forward; `output(role,
    micro-batch, value)` takes an output of the call or a buffer's new value. `gradients`: local sums by stage and
    parameter."""

    leaf: Callable
    output: Callable
    gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)


class EngineStage(_Base):
    """A stage as torch's engine knows it. `group`: the process group along the pipeline's axis."""

    def __init__(self, graphs: StageGraphs, count: int, device: torch.device, group, smaller: StageGraphs | None = None,
                 first_smaller: int = 0):  # fmt: skip
        """Take the stage's graphs. `smaller`: the graphs for micro-batches from `first_smaller` on, which share copies
        and gradients with those before."""
        super().__init__(torch.nn.Identity(), graphs.index, count, device, group)
        self.graphs, self.smaller, self.first_smaller, self.batch = graphs, smaller, first_smaller, None
        self.arrived: Callable[[Action], None] = lambda action: None
        self.times: list[tuple[Action, float, float]] = []

    def of(self, i: int) -> StageGraphs:
        """Return the graphs that a micro-batch runs."""
        return self.smaller if self.smaller is not None and i >= self.first_smaller else self.graphs

    def begin(self, batch: Batch) -> None:
        """Begin a call: drop what is left of the last one, and make the copies that all micro-batches share."""
        self.batch = batch
        self.inputs: dict[int, dict[str, Tensor]] = {}
        self.gradient_inputs: dict[int, dict[str, Tensor]] = {}
        self.outbox: dict[tuple[str, int], list[Tensor]] = {}
        self.sending: dict[
            tuple[str, int], list[dist.Work]
        ] = {}  # with the tensors, which live until the others have them
        self.saved: dict[int, list] = {}
        self.stash: dict[int, list] = {}
        self.times = []
        self.copies: dict[str, Tensor] = {}
        if self.graphs.copies is not None:
            takes, gives = self.graphs.copied
            made = self.graphs.copies.run([batch.leaf(role, 0) for role in takes])
            self.copies = {role.name: value for role, value in zip(gives, made)}
        batch.gradients[self.graphs.index] = {}

    def end(self) -> None:
        """Let go of what belongs to the call."""
        self.batch, self.copies = None, {}

    def _prepare_forward_infra(self, *args, **kwargs):
        return None

    def _prepare_backward_infra(self, *args, **kwargs):
        return None

    def _create_grad_recv_info(self, *args, **kwargs):
        return ()

    # what travels
    # --------------------------------------------------------------------------------------------------------

    def _peer(self, stage: int) -> int:
        return self.stage_index_to_group_rank[stage]

    def _receive(self, box: dict[int, dict[str, Tensor]], passing: Passing, i: int, stage: int) -> list:
        box[i] = passing.empty(self.device)
        return [dist.P2POp(dist.irecv, t, group=self.group, group_peer=self._peer(stage)) for t in box[i].values()]

    def _send(self, what: str, i: int, stage: int) -> list:
        """Send, and give torch's engine nothing to send: it would keep what is sent to the end of the step."""
        tensors, peer = self.outbox.pop((what, i), ()), self._peer(stage)
        self.sending[what, i] = [dist.isend(t, group=self.group, group_dst=peer) for t in tensors]
        return []

    def let_go(self, what: str, i: int) -> None:
        """Let go of what was sent, which has arrived or is waited for."""
        for work in self.sending.pop((what, i), ()):
            work.wait()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list:
        """Return the receives of a micro-batch's activations from the stage before."""
        return self._receive(self.inputs, self.of(fwd_chunk_id).received, fwd_chunk_id, self.stage_index - 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list:
        """Return the receives of a micro-batch's gradients from the next stage."""
        return self._receive(self.gradient_inputs, self.of(bwd_chunk_id).arriving, bwd_chunk_id, self.stage_index + 1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list:
        """Send a micro-batch's activations to the next stage."""
        return self._send("forward", fwd_chunk_id, self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list:
        """Send a micro-batch's gradients to the stage before."""
        return self._send("backward", bwd_chunk_id, self.stage_index - 1)

    def set_local_fwd_input(self, prev_stage_outputs, mb_index: int) -> None:
        """Take a micro-batch's activations from the stage before, which is on this rank."""
        self.inputs[mb_index] = dict(zip(self.graphs.received.names, prev_stage_outputs))

    def get_local_bwd_output(self, mb_index: int):
        """Hand over a micro-batch's gradients for the stage before, which is on this rank."""
        return self.outbox.pop(("backward", mb_index), [])

    def set_local_bwd_input(self, next_stage_bwd_outputs, mb_index: int) -> None:
        """Take a micro-batch's gradients from the next stage, which is on this rank."""
        self.gradient_inputs[mb_index] = dict(zip(self.graphs.arriving.names, next_stage_bwd_outputs))

    # what runs
    # -----------------------------------------------------------------------------------------------------------

    def forward_one_chunk(self, fwd_chunk_id: int, args, kwargs=None, save_forward_output: bool = True):
        """Run a micro-batch's forward and return what goes to the next stage."""
        start, i, graphs = time.perf_counter(), fwd_chunk_id, self.of(fwd_chunk_id)
        self.arrived(Action("F", graphs.index, i))
        arrived = self.inputs.pop(i, {})
        values = [self._given(role, i, arrived) for role in graphs.takes]
        results = list(graphs.forward.run(values))
        sent = []
        for role, value in zip(graphs.gives, results):
            if role.kind == "activation":
                sent.append(value)
            else:
                self.batch.output(role, i, value)
        if graphs.has_backward:
            self.saved[i] = results[len(graphs.gives) :]
        del results
        if not self._next_is_here():
            self.outbox["forward", i] = [t.contiguous() for t in sent]
        self.times.append((Action("F", graphs.index, i), start, time.perf_counter()))
        return sent

    def _given(self, role, i: int, arrived: dict[str, Tensor]) -> Tensor:
        if role.kind == "activation":
            return arrived.pop(role.name)
        return self.copies[role.name] if role.kind == "copy" else self.batch.leaf(role, i)

    def _next_is_here(self) -> bool:
        last = self.stage_index + 1 == self.num_stages
        return last or self._peer(self.stage_index + 1) == self.group_rank

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss=None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run a micro-batch's backward; without `full_backward` only its input part, which leaves a stash for the
        weight part."""
        start, i, graphs = time.perf_counter(), bwd_chunk_id, self.of(bwd_chunk_id)
        if not graphs.has_backward:  # of a stage that only computes other outputs than the loss
            self.times.append((Action("B" if full_backward else "I", graphs.index, i), start, start))
            return
        self.arrived(Action("B", graphs.index, i))
        arrived = self.gradient_inputs.pop(i, {})
        values = self.saved.pop(i)
        values += [arrived.pop(r.name) if r.kind == "arriving" else torch.ones(v.shape, dtype=v.dtype, device=self.device)
                   for r, v in graphs.tangents]  # fmt: skip
        sums = self.batch.gradients[graphs.index]
        if full_backward:
            returned = graphs.backward.run(values, sums)
        else:
            kept, count = graphs.split
            stash = [values[k] for k in kept]
            returned = graphs.input.run(values, sums)
            returned, self.stash[i] = returned[: len(returned) - count], stash + returned[len(returned) - count :]
        if returned:
            self.outbox["backward", i] = [t.contiguous() for t in returned]
        self.times.append((Action("B" if full_backward else "I", graphs.index, i), start, time.perf_counter()))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the weight part of a micro-batch's backward, from the stash of its input part."""
        start, i, graphs = time.perf_counter(), bwd_chunk_id, self.of(bwd_chunk_id)
        if graphs.has_backward:
            graphs.weight.run(self.stash.pop(i), self.batch.gradients[graphs.index])
        self.times.append((Action("W", graphs.index, i), start, time.perf_counter()))


class Engine(_Runtime):
    """Runs a schedule's orders on this rank's stages."""

    def __init__(self, stages: Sequence[EngineStage], schedule: Schedule):
        super().__init__(list(stages), schedule.micro_batches, loss_fn=None, scale_grads=False)
        self.schedule = schedule
        self.stage_index_to_group_rank = dict(enumerate(schedule.rank_of_stage))
        for stage in stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank
            stage.arrived = self._let_go
        self.sent_before = sent_before(schedule, stages[0].group_rank) if stages else {}
        self.by_index = {stage.stage_index: stage for stage in stages}
        orders = [[(a.kind, a.stage, a.micro_batch) for a in order] for order in schedule.orders]
        self.pipeline_order_with_comms = _with_sends(
            _actions(orders), lambda s: self.stage_index_to_group_rank[s], schedule.stages
        )

    def _initialize_stages(self, *args, **kwargs) -> None:
        """Do nothing: shapes are known and nothing has to be met before the first step."""

    def run(self, batch: Batch) -> None:
        """Run all micro-batches of a call."""
        for stage in self._stages:
            stage.begin(batch)
        nothing = [()] * self._n_microbatches
        self._step_microbatches(nothing, [{}] * self._n_microbatches, return_outputs=False)
        for stage in self._stages:
            for what, i in [*stage.sending]:
                stage.let_go(what, i)
            stage.end()

    def _let_go(self, action: Action) -> None:
        for kind, stage, i in self.sent_before.get(action, ()):
            self.by_index[stage].let_go("forward" if kind == "F" else "backward", i)

    @property
    def times(self) -> list[tuple[Action, float, float]]:
        """Return when each action of the last run began and ended on this rank, in seconds of time.perf_counter."""
        return sorted((t for stage in self._stages for t in stage.times), key=lambda t: t[1])


def sent_before(schedule: Schedule, rank: int) -> dict[Action, list[Action]]:
    """Return, for each of a rank's F and B that begin with a message, the F and B whose own messages the sender had
    taken before it sent this one. A backward is B here, in parts or not."""
    found: dict[Action, list[Action]] = {}
    last = schedule.stages - 1

    def is_mine(stage: int) -> bool:
        return 0 <= stage <= last and schedule.rank_of_stage[stage] == rank

    for other, order in enumerate(schedule.orders):
        taken: list[Action] = []
        for kind, stage, i in [action for action in order if other != rank and action.kind != "W"]:
            kind, step = ("F", 1) if kind == "F" else ("B", -1)
            if is_mine(stage - step):
                taken.append(Action(kind, stage - step, i))
            if is_mine(stage + step):
                found[Action(kind, stage + step, i)] = taken
                taken = []
    return found
