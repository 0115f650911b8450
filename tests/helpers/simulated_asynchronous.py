"""Run an asynchronous pipeline (autopar/schedule/asynchronous.py) in one process, on all ranks of all stages.

It does what the ranks of `autopar.AsynchronousPipeline` do (the same stages, autopar/runtime/asynchronous_stage.py), in
the order in which the schedule is played; what passes between stages is kept until it is received. Each rank has an
optimizer of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from autopar.codegen.rank_program import StageProgram
from autopar.codegen.split_batch import join, parts_of
from autopar.errors import StageError
from autopar.frontend.export import Captured
from autopar.ir.graph import OutputRole
from autopar.ir.layout import Layout, local_part
from autopar.plans.plan import Plan
from autopar.runtime.asynchronous_stage import AsynchronousStage, check_apart, rank_of
from autopar.runtime.walk import Links, walk
from autopar.schedule.actions import Action
from autopar.schedule.asynchronous import Asynchronous, Update
from autopar.schedule.play import play
from autopar.simulate.collectives import assemble
from autopar.simulate.pipeline import Lowered, SimulatedStage, whole_output


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
        programs, ranks = [program.alone for program in programs], []
        for rank, program in enumerate(programs):
            fixed, parameters, coordinate = {}, {}, self.mesh.coordinate(rank)
            for node in program.forward.graph.nodes:
                role = node.meta["role"] if node.op == "placeholder" else None
                if role is not None and role.kind in ("parameter", "buffer"):
                    local = local_part(self.values[node.name], node.meta["layout"], self.mesh, coordinate)
                    if role.kind == "buffer":
                        fixed[role.name] = local
                    else:
                        parameters[role.name] = nn.Parameter(local, requires_grad=role.trainable)
            ranks.append(rank_of(program, coordinate, fixed, parameters, optimizer))

        run = SimulatedStage(programs, self.mesh)
        return AsynchronousStage(ranks, self.mesh, self.schedule, run, torch.device("cpu"))

    @torch.no_grad()
    def run(self, batches: Sequence[Mapping[str, Tensor]],
            on_update: Callable[[int, int], None] = lambda stage, version: None) -> list[Tensor]:  # fmt: skip
        """Return the losses of batches, given by placeholder name: their inputs, and the random state if there is one.
        `on_update(stage, version)` is called after each update."""
        group, name = self.schedule.group, str(self.captured.returns.loss)
        losses: list[list[Tensor]] = [[] for _ in batches]
        parts = [{**batch, **part} for batch in batches for part in parts_of(self.micro, self.values | batch)]
        stages = dict(enumerate(self.stages))

        def give(stage: AsynchronousStage, i: int, output: str, values: list[Tensor]) -> None:
            if output == name:
                losses[i // group].append(whole_output(stage.program, OutputRole("output", name), values))

        for stage in self.stages:
            stage.start(lambda i: i < len(parts), parts.__getitem__, partial(give, stage))
        for action, _, _ in walk(zip(self._actions(len(parts))), stages, Links(stages, len(stages))):
            if action.kind == "U":
                on_update(action.stage, action.version)
        return [join(values, self.micro.joins[name]) for values in losses]

    def _actions(self, micro_batches: int) -> Iterator[Action | Update]:
        """Iterate over the actions of all stages as they are played, each backward that ends a group with the update
        that follows."""
        played = play(self.schedule.without_updates(micro_batches))
        for _, action, _, _ in sorted(played, key=lambda event: (event[2], event[0])):
            yield action
            if action.kind == "B" and (action.micro_batch + 1) % self.schedule.group == 0:
                yield Update("U", action.stage, (action.micro_batch + 1) // self.schedule.group)

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
