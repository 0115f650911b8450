"""Run an asynchronous pipeline (autopar/schedule/asynchronous.py) in one process, on all ranks of all stages.

It does what the ranks of `autopar.AsynchronousPipeline` do (the same stages, autopar/runtime/asynchronous_stage.py), in
the order in which the schedule is played; what passes between stages is kept until it is received. Each rank has an
optimizer of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..codegen.rank_program import StageProgram
from ..codegen.split_batch import join, parts_of
from ..errors import StageError, VerifyError
from ..frontend.export import Captured
from ..ir.graph import output_node
from ..ir.layout import Layout, local_part
from ..plans.plan import Plan
from ..runtime.asynchronous_stage import AsynchronousStage, check_apart, rank_of
from ..schedule.asynchronous import Asynchronous
from ..schedule.play import play
from .collectives import Simulator, assemble
from .pipeline import Lowered

GRAPHS = {
    "forward": lambda program: program.forward_alone,
    "backward": lambda program: program.backward,
    "reduce": lambda program: program.deferred.reduce,
}


class SimulatedAsynchronous:
    """The stages of a plan for one micro-batch (or for the group of "pipedream_2bw"), with the parameters and buffers
    in `values`: global tensors by placeholder name, as of autopar/simulate/oracle.py. Raises StageError for stages that
    share what trains."""

    def __init__(self, captured: Captured, plan: Plan, schedule: Asynchronous, values: Mapping[str, Tensor],
                 optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]):  # fmt: skip
        if captured.returns.loss is None:
            raise StageError("a pipeline trains with a scalar loss of the model's own, and this call returns none")
        self.captured, self.mesh, self.schedule = captured, plan.sharding.mesh, schedule
        lowered = Lowered.of(captured, plan, check=False)
        if (len(lowered.stages), lowered.micro.micro_batches) != (schedule.stages, schedule.group):
            raise StageError(f"the plan has {len(lowered.stages)} stages and {lowered.micro.micro_batches} "
                             f"micro-batches, the schedule {schedule.stages} and {schedule.group}")  # fmt: skip
        self.micro, self.values = lowered.micro, values
        check_apart([programs[0].stage.leaves for programs in lowered.stages], captured.graph)
        self.stages = [self._stage(programs, optimizer) for programs in lowered.stages]

    def _stage(self, programs: Sequence[StageProgram], optimizer) -> AsynchronousStage:
        simulator, ranks = Simulator(self.mesh), []
        for place, program in enumerate(programs):
            fixed, parameters, coordinate = {}, {}, self.mesh.coordinate(place)
            for node in program.forward_alone.graph.nodes:
                role = node.meta["role"] if node.op == "placeholder" else None
                if role is not None and role.kind in ("parameter", "buffer"):
                    local = local_part(self.values[node.name], node.meta["layout"], self.mesh, coordinate)
                    if role.kind == "buffer":
                        fixed[role.name] = local
                    else:
                        parameters[role.name] = nn.Parameter(local, requires_grad=role.trainable)
            ranks.append(rank_of(program, coordinate, fixed, parameters, optimizer))

        def run(what: str, inputs: list[list[Tensor]]) -> list[tuple]:
            return simulator.run([GRAPHS[what](program) for program in programs], inputs)

        return AsynchronousStage(ranks, self.mesh, self.schedule, run, torch.device("cpu"))

    @torch.no_grad()
    def run(self, batches: Sequence[Mapping[str, Tensor]],
            on_update: Callable[[int, int], None] = lambda stage, version: None) -> list[Tensor]:  # fmt: skip
        """Return the losses of batches, given by placeholder name: their inputs, and the random state if there is one.
        `on_update(stage, version)` is called after each update."""
        group, last, passing = self.schedule.group, self.schedule.stages - 1, {}
        losses: list[list[Tensor]] = [[] for _ in batches]
        parts = [part for batch in batches for part in parts_of(self.micro, self.values | batch)]
        for batch, part in zip((b for b in batches for _ in range(group)), parts):
            for name, value in batch.items():
                part.setdefault(name, value)
        for stage in self.stages:
            stage.begin()

        def take(stage: int, i: int, names: Sequence[str]) -> dict[str, list[Tensor]]:
            missing = [name for name in names if (stage, i, name) not in passing]
            if missing:
                raise VerifyError(f"stage {stage} waits for {', '.join(missing)} of micro-batch {i}, which nobody sent")
            return {name: passing.pop((stage, i, name)) for name in names}

        played = play(self.schedule.without_updates(len(parts)))
        for _, action, _, _ in sorted(played, key=lambda event: (event[2], event[0])):
            stage, i = self.stages[action.stage], action.micro_batch
            if action.kind == "F":
                sent, outputs = stage.forward(i, parts[i], take(action.stage, i, stage.received))
                passing |= {(action.stage + 1, i, name): values for name, values in sent.items()}
                if action.stage == last:
                    losses[i // group].append(self._loss(outputs))
                continue
            returned = stage.backward(i, take(action.stage, i, stage.arriving))
            passing |= {(action.stage - 1, i, name): values for name, values in returned.items()}
            if (i + 1) % group == 0:
                stage.update(more=stage.next_forward < len(parts))
                on_update(action.stage, (i + 1) // group)
        if passing:
            raise VerifyError(f"sent and never received: {', '.join(sorted(name for _, _, name in passing))}")
        return [join(values, self.micro.joins[str(self.captured.returns.loss)]) for values in losses]

    def _loss(self, outputs: Mapping[str, list[Tensor]]) -> Tensor:
        name, program = str(self.captured.returns.loss), self.stages[-1].program
        output = output_node(program.stage.joint.graph)
        at = next(k for k, r in enumerate(output.meta["roles"]) if (r.kind, r.name) == ("output", name))
        return assemble(outputs[name], program.plan.sharding.outputs[at], self.mesh, ())

    def parameters(self, stage: int) -> dict[str, Tensor]:
        """Return copies of the newest version of what trains in a stage, global, by name."""
        ranks = self.stages[stage].ranks
        program, found = ranks[0].program, [rank.versions.at(rank.versions.newest) for rank in ranks]
        leaves = {n.meta["role"].name: n for n in program.stage.joint.graph.nodes if n.op == "placeholder"}
        whole = {}
        for name in found[0]:
            shape = leaves[name].meta["val"].shape
            layout = program.plan.sharding.leaves.get(leaves[name].name, Layout.replicated(len(shape)))
            whole[name] = assemble([f[name] for f in found], layout, self.mesh, shape)
        return whole
