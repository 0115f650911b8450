"""One call of a model under a pipeline: all its micro-batches, forward and backward, as one differentiable function.

The call runs the whole schedule and keeps the gradients; `loss.backward()` scales them and hands them to autograd. So the training
loop is that of any module. The loss is known on every rank; another output is where its stage is, and None elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import _torch
from ..capture import Captured
from ..errors import InputError, StageError
from ..graph import output_node
from ..layout import Layout, local_part
from ..micro_batches import join, parts_of
from ..pipeline import PipelineProgram
from ..plan import Plan
from ..schedule.actions import Action, Schedule
from ..schedule.played import Played
from . import agree, watch
from .backward import refuse_second_derivatives
from .dtensors import spec_of
from .loaded import LoadedGraph
from .parameters import table_of
from .pipeline_check import border_of, check_pipeline
from .pipeline_engine import Batch, Engine, EngineStage, StageGraphs
from .process_groups import ProcessGroups
from .stage_mesh import StageMesh


class PipelineStep:
    """Runs the stages of `program` on the parameters and buffers of `module`. Raises StageError for a call that trains without a
    scalar loss."""

    backward = None  # gradients are reduced in every call: no_sync has nothing to put off

    def __init__(self, program: PipelineProgram, captured: Captured, plan: Plan, module: nn.Module, stage: StageMesh,
                 groups: ProcessGroups, trains: bool):  # fmt: skip
        self.program, self.plan, self.micro, self.stage = program, plan, program.micro, stage
        self.returns, self.random = captured.returns, module.random
        self.trains = trains
        if trains and captured.returns.loss is None:
            raise StageError(
                "a pipeline trains with a scalar loss of the model's own, and this call returns none",
                fix="return a loss from the model (output.loss), or pass loss_fn= to autopar.compile",
            )
        self.device = torch.device(stage.device_mesh.device_type)
        self._bind(module)
        pipeline = plan.pipeline
        groups.bind(agree.union([group for group, _, _ in program.collectives()]))  # on all ranks, whose stages need different ones
        schedule = pipeline.orders if trains else forwards(pipeline.orders)
        self.graphs = [StageGraphs(p, groups, self.device, schedule.splits_backward) for p in program.stages.values()]
        self.stages = [EngineStage(g, schedule.stages, self.device, stage.line) for g in self.graphs]
        self.engine = Engine(self.stages, schedule)
        mine = {i: border_of(p) for i, p in program.stages.items()}
        everyone = stage.from_all_places(mine, "what stages hand to each other")
        borders = {i: border for theirs in everyone for i, border in theirs.items()}
        agree.everywhere(lambda: check_pipeline(pipeline.orders, borders))
        self.reduce = {i: LoadedGraph(p.deferred.reduce, groups, self.device, f"reduction of stage {i}")
                       for i, p in program.stages.items() if p.deferred and p.deferred.layouts}  # fmt: skip
        self._tie()

    def _bind(self, module: nn.Module) -> None:
        """Looks up the parameters and buffers of this rank's stages, and what outputs become."""
        leaves: dict[str, tuple[str, object]] = {}
        trained: set[str] = set()
        self.buffers = {}
        for program in self.program.stages.values():
            for node in program.stage.joint.graph.nodes:
                if node.op == "placeholder":
                    role = node.meta["role"]
                    if role.kind == "parameter":
                        leaves[role.name] = table_of(module, role.name, "_parameters")
                    elif role.kind == "buffer":
                        self.buffers[role.name] = table_of(module, role.name, "_buffers")
            trained |= {r.name for r in output_node(program.stage.joint.graph).meta["roles"] if r.kind == "gradient"}
        self.tables = leaves
        self.names = [name for name in leaves if name in trained]
        self.parameters = [leaves[name][0][leaves[name][1]] for name in self.names]
        self.specs = [p._spec for p in self.parameters]
        inputs = [n for n in self.micro.captured.graph.nodes if n.op == "placeholder" and n.meta["role"].kind == "input"]
        self.input_layouts = {n.name: self.plan.sharding.leaves.get(n.name, Layout.replicated(n.meta["val"].dim())) for n in inputs}
        self.output_specs = {}
        output = output_node(self.micro.captured.graph)
        for value, role, layout in zip(output.args[0], output.meta["roles"], self.plan.sharding.outputs):
            if role.kind == "output" and value.meta["val"].dim():
                how, like, shape = self.micro.joins[role.name], value.meta["val"], list(value.meta["val"].shape)
                if isinstance(how, int):
                    shape[how] *= self.micro.micro_batches
                joined = self._joined_layout(layout, how)
                self.output_specs[role.name] = spec_of(joined, shape, like.dtype, self.stage.mesh, self.stage.device_mesh)

    def _joined_layout(self, layout: Layout, how: str | int) -> Layout:
        """Of the micro-batches' outputs one after the other: each is sharded for itself."""
        if not isinstance(how, int):
            return layout
        parts = [n * (self.micro.micro_batches if d == how else 1) for d, n in enumerate(layout.parts)]
        return Layout(layout.dims, layout.partial, tuple(parts))

    def _tie(self) -> None:
        """Parameters that several ranks along the axis train: each has a part of the gradient. Collective."""
        everyone = self.stage.from_all_places(self.names, "which stages share parameters")
        shared = sorted(name for name in {*sum(everyone, [])} if sum(name in names for names in everyone) > 1)
        self.tied = [(name, [r for r, names in enumerate(everyone) if name in names]) for name in shared]

    def compile(self, options: Mapping[str, object]) -> None:
        """All graphs through torch.compile, with these options of it."""
        for graphs in self.graphs:
            graphs.compile(options)
        for graph in self.reduce.values():
            graph.compile(options)

    def measured(self) -> Played:
        """The last call as it ran on the ranks along the pipeline's axis, in seconds of their machines' clocks. Collective."""
        offset = time.time() - time.perf_counter()
        mine = [(action, start + offset, end + offset) for action, start, end in self.engine.times]
        everyone = self.stage.from_all_places(mine, "when the pipeline's actions ran")
        orders = tuple(tuple(a for a, _, _ in times) for times in everyone)
        starts, ends = (tuple(tuple(t[k] for t in times) for times in everyone) for k in (1, 2))
        return Played(replace(self.engine.schedule, orders=orders), starts, ends)

    def __call__(self, inputs: list[Tensor]):
        """The model's output for a whole batch."""
        if self.trains and torch.is_grad_enabled():
            anchor = torch.zeros((), requires_grad=True)  # a rank may have nothing that trains, and its loop calls backward too
            outputs = list(_PipelineLoss.apply(self, inputs, anchor, *self.parameters))
        else:
            outputs, _ = self.run(inputs)
        return self.returns.rebuild(outputs)

    def run(self, inputs: list[Tensor]) -> tuple[list[Tensor | None], list[Tensor]]:
        """(outputs by position, gradients of the parameters `names` as DTensors)."""
        call = _Call(self, inputs)
        batch = Batch(call.leaf, call.output)
        with torch.no_grad():
            with watch.meeting("the pipeline's schedule"):
                self.engine.run(batch)
            call.write_buffers()
            outputs = self._outputs(call.outputs)
            gradients = self._gradients(batch.gradients) if self.trains else []
        return outputs, gradients

    def _outputs(self, parts: dict[str, dict[int, Tensor]]) -> list[Tensor | None]:
        """Whole outputs: those of this rank's stages, and the loss."""
        outputs: list[Tensor | None] = [None] * self.returns.count
        for name, values in parts.items():
            whole = join([values[i] for i in sorted(values)], self.micro.joins[name])
            spec = self.output_specs.get(name)
            outputs[int(name)] = whole if spec is None else _torch.as_dtensor(whole, spec)
        if self.returns.loss is not None:
            mine = outputs[self.returns.loss]
            loss = mine if mine is not None else torch.empty((), dtype=self._loss_dtype(), device=self.device)
            last = self.plan.pipeline.orders.rank_of_stage[-1]
            with watch.meeting("the loss"):
                dist.broadcast(loss, group=self.stage.line, group_src=last)
            outputs[self.returns.loss] = loss
        return outputs

    def _loss_dtype(self) -> torch.dtype:
        output = output_node(self.micro.captured.graph)
        found = {r.name: v.meta["val"].dtype for v, r in zip(output.args[0], output.meta["roles"]) if r.kind == "output"}
        return found[str(self.returns.loss)]

    def _gradients(self, by_stage: dict[int, dict[str, Tensor]]) -> list[Tensor]:
        """Reduced over the stage's ranks, summed over the stages that share a parameter."""
        total: dict[str, Tensor] = {}
        for i, sums in by_stage.items():
            if i in self.reduce:
                waiting = list(self.program.stages[i].deferred.layouts)
                results = self.reduce[i].run([sums[name] for name in waiting])
                sums |= dict(zip(waiting, results))
            for name, gradient in sums.items():
                total[name] = total[name] + gradient if name in total else gradient
        for name, places in self.tied:
            if self.stage.place in places:
                with watch.meeting(f"the gradient of {name}, which stages share"):
                    total[name] = self._exchange(total[name].contiguous(), places)
        return [_torch.as_dtensor(total[name], spec) for name, spec in zip(self.names, self.specs)]

    def _exchange(self, mine: Tensor, places: list[int]) -> Tensor:
        """The sum over some ranks along the axis, in their order on all of them, so that the sums are equal."""
        others = [p for p in places if p != self.stage.place]
        received = {p: torch.empty_like(mine) for p in others}
        work = [dist.isend(mine, group=self.stage.line, group_dst=p) for p in others]
        work += [dist.irecv(received[p], group=self.stage.line, group_src=p) for p in others]
        for w in work:
            w.wait()
        parts = received | {self.stage.place: mine}
        total = parts[places[0]].clone()
        for p in places[1:]:
            total += parts[p]
        return total


class _Call:
    """The leaves and outputs of one call's micro-batches."""

    def __init__(self, step: PipelineStep, inputs: list[Tensor]):
        self.step, nodes = step, step.micro.captured.graph.nodes
        self.names = {n.meta["role"]: n.name for n in nodes if n.op == "placeholder"}
        named = dict(zip(step.micro.captured.signature.tensor_names, inputs))
        values = {leaf: named[role.name] for role, leaf in self.names.items() if role.kind == "input"}
        for role, leaf in self.names.items():  # on all ranks alike, whichever stages draw
            if role.kind == "random":
                values[leaf] = step.random.next()
        with torch.no_grad():
            self.parts = parts_of(step.micro, values)
        self.outputs: dict[str, dict[int, Tensor]] = {}
        self.buffers: dict[str, Tensor] = {}

    def leaf(self, role, i: int) -> Tensor:
        step = self.step
        if role.kind in ("parameter", "buffer"):
            table, leaf = (step.tables if role.kind == "parameter" else step.buffers)[role.name]
            return _torch.local_of(table[leaf]) if role.kind == "parameter" else table[leaf]
        whole = self.parts[i][self.names[role]]
        if role.kind != "input":
            return whole
        return local_part(whole, step.input_layouts[self.names[role]], step.stage.mesh, step.stage.coordinate)

    def output(self, role, i: int, value: Tensor) -> None:
        if role.kind == "mutation":
            self.buffers[role.name] = value
        else:
            self.outputs.setdefault(role.name, {})[i] = value

    def write_buffers(self) -> None:
        for name, value in self.buffers.items():
            table, leaf = self.step.buffers[name]
            table[leaf].copy_(value)


class _PipelineLoss(torch.autograd.Function):
    """The outputs of a call that has computed its gradients already. The loss is the only one that is differentiable."""

    @staticmethod
    def forward(ctx, step: PipelineStep, inputs: list[Tensor], *anchor_and_parameters):
        outputs, ctx.gradients = step.run(inputs)
        loss = step.returns.loss
        ctx.mark_non_differentiable(*[o for at, o in enumerate(outputs) if at != loss and isinstance(o, Tensor)])
        ctx.set_materialize_grads(False)
        ctx.loss = loss
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *tangents):
        refuse_second_derivatives()
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise InputError(
                "a second backward through one call: under a pipeline the first one takes the gradients away",
                fix="call the model again, or leave out retain_graph=True",
            )
        scale = tangents[ctx.loss]
        if scale is None:
            return None, None, None, *[None] * len(gradients)
        local = [_torch.local_of(g) for g in gradients]
        if local:
            torch._foreach_mul_(local, scale)
        return None, None, None, *gradients


def forwards(schedule: Schedule) -> Schedule:
    """The forwards of a schedule alone, stage by stage on each rank, which ends for every placement."""
    orders = tuple(
        tuple(Action("F", s, i) for s in schedule.stages_of(rank) for i in range(schedule.micro_batches))
        for rank in range(schedule.ranks)
    )
    return Schedule(f"{schedule.name}, forwards alone", schedule.ranks, schedule.micro_batches, schedule.rank_of_stage, orders)
