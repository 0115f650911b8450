"""Asynchronous pipelines: `autopar.AsynchronousPipeline`, which trains with weights that are some updates old.

NOT equal to synchronous training. PipeDream and PipeDream-2BW never flush the pipeline, so a gradient is one of older
weights than those that it updates (which ones: autopar/schedule/asynchronous.py); losses and weights differ from those
of `autopar.compile`. Nothing uses this unless it is asked for. What holds is that a micro-batch's forward and backward
read one version of the weights, and that a run gives the same numbers again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from ..codegen.rank_program import FORWARD
from ..codegen.split_batch import join, parts_of
from ..errors import InputError, MeshError, MicroBatchError, StageError, StrategyError
from ..frontend.call_signature import CallSignature, describe_call, split_example
from ..frontend.precision import AUTO, has_half
from ..ir.graph import fingerprint
from ..ir.mesh import Mesh
from ..planner.options import precision_on
from ..planner.pipeline.replan import cuts_of, with_owners
from ..planner.spmd.batch import of_samples, samples_of
from ..plans.pipeline import Pipeline, axis_of, inside
from ..plans.plan import Plan
from ..processes import agree, process_groups, watch
from ..runtime.asynchronous_stage import AsynchronousStage, check_apart, rank_of
from ..runtime.stage_links import StageLinks
from ..runtime.walk import walk
from ..schedule.asynchronous import BUFFERED, STASHING, Asynchronous
from . import entry as api

BALANCED = 4  # micro-batches a stage for which the stages of a pipeline without a flush are cut


class AsynchronousPipeline:
    """Trains a model on a mesh with an axis pp, without a flush and NOT as synchronous training does: see the module.

    `schedule`: "pipedream" (weight stashing), "pipedream_vertical_sync", or "pipedream_2bw". A batch of the first two
    is one micro-batch and one update; one of 2BW is cut into `micro_batches` (at least as many as stages, and as many
    unless given), and its mean loss makes one update. `optimizer` makes the optimizer of the parameters of this rank's
    stage; what looks at all parameters together, like clipping by their norm, sees those of the stage alone. Other
    arguments as in `autopar.compile`, which takes the model over; a given `plan` must have one stage a rank. All ranks
    call it together. Raises subclasses of AutoparError.

        sgd = lambda parameters: torch.optim.SGD(parameters, 0.1)
        pipeline = autopar.AsynchronousPipeline(model, mesh, batch, "pipedream", optimizer=sgd)
        losses = pipeline.run(batches)
        pipeline.module.save_pretrained("trained")

    `module` is what `autopar.compile` returns, with the newest weights, to evaluate and to save. The memory of its plan
    is that of synchronous training: older versions (`schedule.versions_held(stage)` less one) are not in it."""

    def __init__(
        self,
        model: nn.Module,
        mesh,
        example_inputs,
        schedule: str = STASHING,
        *,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        micro_batches: int | None = None,
        plan: Plan | None = None,
        hardware=None,
        memory=None,
        precision: str | torch.dtype = "auto",
        strategy: str | None = None,
        pin: Mapping[str, str] | None = None,
        loss_fn: Callable | None = None,
        weights=None,
    ):
        axis = axis_of(Mesh.of(mesh))
        if axis is None or not hasattr(mesh, "get_group"):
            raise MeshError(f"a pipeline needs a DeviceMesh with an axis pp of several devices, not {mesh}")
        if precision != AUTO or plan is None:
            precision = precision_on(mesh, hardware, precision, model)
        stages, name = Mesh.of(mesh).size(axis), str(schedule).lower().replace("-", "_")
        self.schedule = Asynchronous(name, stages, micro_batches or (stages if name == BUFFERED else 1))
        if plan is None:
            process_groups.check_world(Mesh.of(mesh), mesh)
            watch.start()
            options = dict(
                hardware=hardware, memory=memory, precision=precision, strategy=strategy, pin=pin, loss_fn=loss_fn
            )
            made = agree.from_rank_zero(
                lambda: _planned(model, mesh, example_inputs, self.schedule, **options).to_json()
            )
            plan = Plan.from_json(made)
        _check(plan, self.schedule)
        options = dict(
            hardware=hardware, memory=memory, precision=precision, strategy=strategy, loss_fn=loss_fn, weights=weights
        )
        self.module = api.compile(model, mesh, example_inputs, plan=plan, **options)
        self.plan = self.module.plan
        self._load(optimizer)

    def _load(self, optimizer: Callable) -> None:
        captures = self.module._captures
        self._captured, step, self._on = captures.table[0].traced.captured, captures.table[0].step, captures.stage
        if has_half(self._captured.graph):
            raise StrategyError(
                "float16 needs a scaled loss, and an asynchronous pipeline steps before anything could scale it",
                fix='precision="bf16"',
            )
        program = step.program
        if program.micro.tail is not None:
            raise program.micro.tail.needs
        agree.everywhere(lambda: check_apart(program.leaves, self._captured.graph))
        self._micro, self.pp_rank = program.micro, self._on.pp_rank
        (mine,) = program.stages.values()
        self._device = torch.device(self._on.device_mesh.device_type)
        (graphs,) = step.graphs.values()  # the same as in synchronous training
        if mine.copies is not None:
            mine = mine.alone
            graphs = graphs.with_others({FORWARD: mine.forward})
        state = {key: table[leaf] for key, (table, leaf) in step.tables.items()}
        parameters, self._buffers = (
            {name: value for (kind, name), value in state.items() if kind == wanted}
            for wanted in ("parameter", "buffer")
        )
        fixed = {name: buffer.clone() for name, buffer in self._buffers.items()}
        rank = agree.everywhere(lambda: rank_of(mine, self._on.coordinate, fixed, parameters, optimizer))
        self.optimizer = rank.optimizer
        self.stage = AsynchronousStage([rank], self._on.mesh, self.schedule, graphs, self._device)
        ahead = 4 * self.schedule.stages  # a stage is p micro-batches ahead at most
        self._links = StageLinks({self.pp_rank: self.stage}, self.pp_rank, range(self.schedule.stages), self._groups(),
                                 self._device, ahead=ahead)  # fmt: skip

    def _groups(self) -> dict[str, object]:
        """Return the process group of each way along the pipeline. NCCL has one stream for all messages of two ranks in
        a group, on which one of one way could wait for one of the other, without end: so each way has a group of its
        own there."""
        forward = backward = self._on.pp_group
        if dist.get_backend(forward) != "gloo":
            patience = timedelta(seconds=process_groups.FIRST_STEP * process_groups.timeout_seconds())
            mesh, axis = self.plan.mesh, self.plan.pipeline.axis
            for ranks in mesh.groups((axis,)):
                group = dist.new_group(list(ranks), timeout=patience)
                backward = group if dist.get_rank() in ranks else backward
        return {"F": forward, "B": backward}

    @property
    def versions_alive(self) -> int:
        """Return how many versions of the weights of this rank's stage are in memory, the newest included."""
        return self.stage.ranks[0].versions.alive

    @property
    def most_versions(self) -> int:
        """Return how many versions were in memory at once in the last run, at the most."""
        return self.stage.ranks[0].versions.most

    def run(self, batches: Iterable, on_update: Callable[[int], None] = lambda version: None) -> list[float]:
        """Train on batches, each given as to the model (a dict of keyword arguments, or a tuple), and return their
        losses, on all ranks. Every rank passes the same ones, taken as they are needed. `on_update(version)` is called
        on each rank after each update of its stage: the place to step a learning rate schedule. At the end the pipeline
        runs empty, so the first batches of another run meet newer weights than in one long run."""
        stream, stage, loss = _Stream(self, iter(batches)), self.stage, str(self._captured.returns.loss)
        losses: list[list[Tensor]] = []

        def give(i: int, name: str, values: list[Tensor]) -> None:
            if name == loss:
                losses.extend([[]] if i % self.schedule.group == 0 else [])
                losses[-1] += values

        stage.start(stream.has, stream.take, give)
        with torch.no_grad():
            actions = zip(self.schedule.walk(self.pp_rank, stream.has))  # one after the other
            for action, _, _ in walk(actions, {self.pp_rank: stage}, self._links):
                if action.kind == "U":
                    on_update(action.version)
            for name, buffer in self._buffers.items():
                buffer.copy_(stage.ranks[0].fixed[name])
            return self._everywhere([join(parts, self._micro.joins[loss]) for parts in losses], stream.count)

    def _everywhere(self, losses: list[Tensor], count: int) -> list[float]:
        """Return the losses of `count` batches on all ranks; only the last stage passes them."""
        if not count:
            return []
        found = torch.stack(losses).double() if losses else torch.empty(count, dtype=torch.float64, device=self._device)
        with watch.collective("the losses"):
            dist.broadcast(found, group=self._on.pp_group, group_src=self.schedule.stages - 1)
        return found.tolist()


class _Stream:
    """The micro-batches of a run, of which those that are needed are taken from the caller."""

    def __init__(self, pipeline: AsynchronousPipeline, batches: Iterator):
        self.pipeline, self.batches, self.group = pipeline, batches, pipeline.schedule.group
        self.count = 0  # of batches
        self.parts: dict[int, dict[str, Tensor]] = {}

    def has(self, i: int) -> bool:
        """Return whether there is a micro-batch `i`; take batches from the caller until it is there or none is left."""
        while i >= self.count * self.group:
            try:
                batch = next(self.batches)
            except StopIteration:
                return False
            for k, part in enumerate(self._parts(batch)):
                self.parts[self.count * self.group + k] = part
            self.count += 1
        return True

    def take(self, i: int) -> dict[str, Tensor]:
        """Return what micro-batch `i` is given, by placeholder, and forget it."""
        return self.parts.pop(i)

    def _parts(self, batch) -> list[dict[str, Tensor]]:
        captured, micro = self.pipeline._captured, self.pipeline._micro
        args, kwargs = split_example(batch)
        tensors = captured.signature.match(args, kwargs)
        if tensors is None:
            raise InputError(
                f"a batch {describe_call(args, kwargs)} is not of the form of example_inputs",
                fix="pass batches of one shape; drop or pad the last one",
            )
        if self.count == 0:
            agree.check_batches(captured.signature.tensor_names, tensors)
        named = dict(zip(captured.signature.tensor_names, tensors))
        values, whole = {}, {}
        for node in _placeholders(micro.captured.graph):
            role = node.meta["role"]
            if role.kind == "input":
                values[node.name] = named[role.name].to(self.pipeline._device)
            elif role.kind == "random":
                values[node.name] = whole[node.name] = self.pipeline.module.random.next()
        return [whole | part for part in parts_of(micro, values)]


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "placeholder"]


def _check(plan: Plan, schedule: Asynchronous) -> None:
    found = plan.pipeline
    p, m = schedule.stages, schedule.group
    if (found.ranks, found.stages_per_rank, found.micro_batches, found.row_chunks) != (p, 1, m, 1):
        raise StageError(
            f"{schedule.name} needs a plan of {p} stages, one a rank, and a batch in {m}, which the given one is not",
            fix=f'plan with schedule="1f1b" and micro_batches={m}, or leave plan= out',
        )
    if found.samples:
        raise StageError(
            f"{schedule.name} runs equal micro-batches, and a batch of {found.samples} samples cannot be cut into {m}",
            fix=f"pass batches of {found.samples - found.samples % m or m} samples",
        )


def _planned(model: nn.Module, mesh, example_inputs, schedule: Asynchronous, **options) -> Plan:
    """Plan for a batch, with the stages that are fastest for a long run of micro-batches. Raises as `autopar.plan`
    does."""
    if options["hardware"] is None:
        options["hardware"] = "cpu-gloo" if mesh.device_type == "cpu" else torch.cuda.get_device_name()
    options |= dict(baselines=False, fixes=False)

    def over_stages(inputs, micro_batches: int) -> Plan:
        found = api.search(model, mesh, inputs, schedule="1f1b", micro_batches=micro_batches, **options)
        return with_owners(found.captured, found.plan)

    if schedule.group > 1:
        return over_stages(example_inputs, schedule.group)
    signature, _ = CallSignature.of(*split_example(example_inputs))
    many = BALANCED * schedule.stages
    try:
        first = over_stages(of_samples(signature, many * samples_of(signature)), many)
    except (
        MicroBatchError
    ):  # such a batch cannot be cut; of one alone, which meets the stages one by one, no cut is the fastest
        return over_stages(example_inputs, 1)
    found = api.search(model, inside(first.mesh, first.pipeline.axis), example_inputs, refuses=False, **options)
    cuts = cuts_of(found.captured.graph, first.pipeline.owners)
    pipeline = Pipeline(first.pipeline.axis, first.pipeline.ranks, "1f1b", 1, 1, cuts, first.pipeline.costs)
    plan = replace(
        found.plan,
        mesh=first.mesh,
        pipeline=pipeline,
        fingerprint=fingerprint(found.captured.graph),
        peak_bytes=first.peak_bytes,
        memory=first.memory,
        at_peak=first.at_peak,
        step_seconds=first.step_seconds / many,
        bound=first.bound / many,
        gap=first.gap,
        alternatives=(),
    )
    return with_owners(found.captured, plan)
