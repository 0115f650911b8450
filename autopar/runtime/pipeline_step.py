"""One call of a model that runs in micro-batches, through one stage or several: all of them, forward and backward, as
one differentiable function.

The call runs the whole schedule and keeps the gradients; `loss.backward()` scales and reduces them and hands them to
autograd. So the training loop is that of any module. The loss is known on every rank; another output is where its stage
is, and None elsewhere, or is sent from there to all ranks along the pipeline.

In float16 small gradients would vanish before they are scaled: there a schedule begins with the gradient that the loss
had in the last backward, which is the scale of torch.amp.GradScaler; before the first one that of the scaler that the
program has made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..codegen.rank_program import PipelineProgram, pairs_of
from ..compiler import lower_pipeline
from ..errors import CompilerError, InputError, StageError
from ..frontend.effects import has_tensor
from ..frontend.export import Captured
from ..frontend.precision import has_half
from ..frontend.user_lines import located
from ..ir.graph import OutputRole, output_node, outputs_of
from ..ir.layout import Layout, in_zigzag, local_part, local_shape
from ..plans.plan import Plan
from ..processes import agree, watch
from ..processes.dtensors import as_dtensor, redistributed, whole_of
from ..processes.process_groups import ProcessGroups
from ..processes.stage_mesh import StageMesh
from ..schedule.actions import Action, Schedule
from ..schedule.played import Played
from ..utils.format import size
from .accumulation import Accumulation
from .backward import refuse_second_derivatives
from .call import Call
from .inputs import WholeInputs
from .lengths import OwnLengths
from .optimizers import scale_of_scalers
from .outputs import OutputForm, OutputForms
from .parameters import tables_of
from .pipeline_call import PipelineCall
from .pipeline_check import border_of, check_pipeline
from .pipeline_gradients import StageGradients, Sums
from .rank_graphs import RankGraphs
from .stage_executor import StageExecutor
from .stage_links import StageLinks
from .unmade import unmade
from .walk import walk


class PipelineStep:
    """Runs the stages of `program` on the parameters and buffers of `module`. `everywhere`: all outputs are on all
    ranks. Raises StageError for a call that trains without a scalar loss."""

    takes = WholeInputs
    runs_layers = False

    def __init__(
        self,
        program: PipelineProgram,
        captured: Captured,
        plan: Plan,
        module: nn.Module,
        stage: StageMesh,
        groups: ProcessGroups,
        accumulation: Accumulation,
        trains: bool,
        everywhere: bool,
        forms: OutputForms,
    ):
        self.plan, self.micro, self.stage, self.groups, self.accumulation = (
            plan,
            program.micro,
            stage,
            groups,
            accumulation,
        )
        self.captured, self.returns, self.random = captured, captured.returns, module.random
        self.trains, self.is_deferring = trains, False
        leaves = (n.meta["role"] for n in captured.graph.nodes if n.op == "placeholder")
        self.draws = any(role.kind == "random" for role in leaves)
        if trains and captured.returns.loss is None:
            raise StageError(
                "stages and micro-batches train with a scalar loss of the model's own, and this call returns none",
                fix="return a loss from the model (output.loss), or pass loss_fn= to autopar.compile",
            )
        left = [effect.path for effect in captured.returns.effects if has_tensor(effect.value)]
        if left and not everywhere and len(stage.ranks) > 1:
            raise StageError(
                f"the forward leaves a tensor in {left[0]}, which the ranks of one stage alone would have",
                fix='pass outputs="everywhere" to autopar.compile, or return it',
            )
        self.device = torch.device(stage.device_mesh.device_type)
        half = trains and has_half(captured.graph)
        self.seed = torch.ones((), device=self.device) if half else None  # gradient of the loss
        self.is_seeded = not half
        self.follows: object = None  # what made the step for sizes that were not captured
        self._bind(program, module)
        self.take_forms(forms)
        self.compile_options: Mapping[str, object] | None = None  # of torch.compile, if graphs go through it
        self._load(program)
        roles = [r for p in program.stages.values() for r in output_node(p.stage.joint.graph).meta["roles"]]
        self.made_here = {role.name for role in roles if role.kind == "output"}
        if self.micro.tail is not None and any(role.kind == "joined" for role in roles):
            self.made_here |= {*self.micro.tail.outputs}
        everyone = list(enumerate(stage.from_all_pp_ranks(self.made_here, "where outputs are")))
        named = sorted({*self.forms} if everywhere else {str(captured.returns.loss)} & {*self.forms}, key=int)
        named = named if len(everyone) > 1 else []  # one stage has them all
        self.sources = {name: next(pp_rank for pp_rank, there in everyone if name in there) for name in named}

    def _load(self, program: PipelineProgram) -> None:
        """Load the program's graphs and check that its stages fit together; all ranks call this together."""
        self.program, pipeline = program, self.plan.pipeline
        self.groups.bind(
            agree.union([group for group, _, _ in program.collectives()])
        )  # also those that only other stages need
        self.schedule = pipeline.orders if self.trains else forwards(pipeline.orders)
        splits, order = self.schedule.splits_backward, self.schedule.together(self.stage.pp_rank)
        pairs = pairs_of(program.stages, order, self.micro.is_smaller)
        made = {i: p.graphs(splits, pairs[i], program.stages) for i, p in program.stages.items()}
        self.graphs = {  # of all stages, as loading binds what pairs of other stages are made of
            i: RankGraphs.of_stage(i, self.groups, self.device, self.plan).load(graphs) for i, graphs in made.items()
        }
        self.stages = {
            i: StageExecutor([p], self.graphs[i], self.micro.is_smaller, self.micro.chunks_of_row, self.device)
            for i, p in program.stages.items()
        }
        mine = {i: [border_of(size) for size in p.sizes] for i, p in program.stages.items()}
        everyone = self.stage.from_all_pp_ranks(mine, "what stages hand to each other")
        borders = {i: of_sizes for theirs in everyone for i, of_sizes in theirs.items()}
        for of_size in zip(*(borders[i] for i in sorted(borders)), strict=True):
            agree.everywhere(partial(check_pipeline, pipeline.orders, dict(enumerate(of_size))))
        self.links = self._links(self.schedule)
        self.times: list[tuple[Action, float, float]] = []  # of the last call, in seconds of time.perf_counter
        self.gradients = StageGradients(self.stages, self.names, self.specs, self.stage, self.accumulation)
        if self.compile_options is not None:
            self.compile(self.compile_options)

    def prepare_no_sync(self) -> None:
        """Make gradients wait for their reduction, where they are reduced as they are made until somebody wants them
        unreduced. All ranks call this together."""
        if not self.trains or self.plan.reduces_once or self.is_deferring:
            return
        self.is_deferring = True
        program = agree.everywhere(lambda: lower_pipeline(self.captured, self.plan, dist.get_rank(), waits=True))
        agree.check_programs(self.plan, program.collectives())
        self._load(program)

    @property
    def unreduced_bytes(self) -> int:
        """Return the bytes of this rank's gradients that are Partial inside of no_sync."""
        return self.gradients.unreduced_bytes

    def _bind(self, program: PipelineProgram, module: nn.Module) -> None:
        """Look up the parameters and buffers of this rank's stages."""
        self.tables = tables_of(module, [mine.stage.joint.graph for mine in program.stages.values()])
        trained = [r.name for r in output_node(self.captured.graph).meta["roles"] if r.kind == "gradient"]
        here = dict(module.named_parameters())  # also those of which another rank's stage alone makes the gradient
        self.names = [name for name in trained if name in here]
        self.parameters = [here[name] for name in self.names]
        self.specs = [p._spec for p in self.parameters]

    def take_forms(self, forms: OutputForms) -> None:
        """Find what outputs become, given their forms."""
        self.output_forms, self.forms = forms, dict[str, OutputForm]()
        self.empty: dict[str, Tensor] = {}  # outputs' shape and dtype on this rank, without values
        joins = [self.micro.of_rows.joins, *(chunks.joins for chunks in self.micro.chunks[:1])]
        large = {name for of in joins for name, how in of.items() if isinstance(how, int)} - {str(self.returns.loss)}
        self.unmade = large if self.trains and self.plan.unmade_bytes else set()
        self.gathered: dict[str, tuple[Layout, Layout]] = {}  # outputs gathered to be joined: before, after
        for role, layout in self._layouts_of_outputs():
            if role.kind == "output" and layout is not None:
                how, like = self.micro.of_rows.joins[role.name], forms.values[role.name]
                if self.micro.chunks and like.dim():
                    layout = _joined_layout(layout, self.micro.chunks[0].joins[role.name], self.micro.chunks_of_row)
                joined = self._joined_rows(layout, how) if like.dim() else layout
                if isinstance(how, int) and self.micro.smaller and layout != joined:
                    self.gathered[role.name] = layout, joined
                self.forms[role.name] = forms.form(role.name, joined)
                shape = local_shape(like.shape, joined, self.stage.mesh, self.stage.coordinate)
                self.empty[role.name] = torch.empty(shape, dtype=like.dtype, device="meta")

    def _layouts_of_outputs(self) -> list[tuple[OutputRole, Layout | None]]:
        """Return what the graph of a micro-batch and the tail of the step give, with layouts."""
        output = output_node(self.micro.captured.graph)
        found = [*zip(output.meta["roles"], self.plan.sharding.outputs)]
        if self.micro.tail is not None:
            made = outputs_of(self.micro.tail.graph_module.graph)
            found += [(role, Layout.replicated(value.meta["val"].dim())) for value, role in made]
        return found

    def _joined_rows(self, layout: Layout, how: str | int) -> Layout:
        """Return the layout of the micro-batches' outputs one after the other. No layout says it of micro-batches that
        are not equal: what is joined is not cut there then."""
        if self.micro.smaller is None or not isinstance(how, int):
            return _joined_layout(layout, how, self.micro.of_rows.micro_batches)
        dims = tuple(() if d == how else axes for d, axes in enumerate(layout.dims))
        return Layout(dims, layout.partial, layout.parts)

    def compile(self, options: Mapping[str, object]) -> None:
        """Run all graphs through torch.compile, with these options of it. Raises CompilerError for chunks of rows: it
        would compile each, which have other keys."""
        if self.micro.chunks:
            raise CompilerError(
                f"a row is cut into {self.micro.chunks_of_row} chunks of its tokens, which run op by op",
                fix='leave execution="compiled" and model.compile() out, or plan with sequence_chunks=1',
            )
        self.compile_options = options
        for graphs in self.graphs.values():
            graphs.compile(options)

    def measured(self) -> Played:
        """Return the last call as it ran on the ranks along the pipeline's axis, in seconds of their machines' clocks.
        Collective."""
        offset = time.time() - time.perf_counter()
        mine = [(action, start + offset, end + offset) for action, start, end in self.times]
        everyone = self.stage.from_all_pp_ranks(mine, "when the pipeline's actions ran")
        orders = tuple(tuple(a for a, _, _ in times) for times in everyone)
        starts, ends = (tuple(tuple(t[k] for t in times) for times in everyone) for k in (1, 2))
        return Played(replace(self.schedule, orders=orders), starts, ends)

    def expert_rows(self) -> dict[str, list[int]]:
        """Return by layer of experts the rows that this rank got in each of the latest forwards of micro-batches."""
        found: dict[str, list[int]] = {}
        for graphs in self.graphs.values():
            for layer, rows in graphs.expert_rows():
                found.setdefault(layer, []).extend(rows)
        return found

    def __call__(self, call: Call):
        """Return the model's output for a whole batch."""
        inputs, lengths = call.local(), call.lengths
        if self.trains and torch.is_grad_enabled():
            if not self.is_seeded:
                self.is_seeded = True
                self.seed = self.seed * min(agree.from_all(scale_of_scalers))
            anchor = torch.zeros(
                (), requires_grad=True
            )  # a rank may have nothing that trains, and its loop calls backward too
            outputs = list(_PipelineLoss.apply(self, inputs, lengths, anchor, *self.parameters))
        else:
            outputs, _ = self.run(inputs, lengths)
        return call.returns.rebuild(outputs)

    def run(self, inputs: list[Tensor], lengths: OwnLengths | None) -> tuple[list[Tensor | None], Sums]:
        """Run the schedule and return (outputs by position, what the stages leave of gradients)."""
        call = PipelineCall(self, inputs)
        with torch.no_grad():
            with watch.collective("the pipeline's schedule"):
                self.times = [*self._walk(call, self.schedule, self.links)]
            sums = {i: stage.end()[0] for i, stage in self.stages.items()}
            call.write_buffers()
            outputs = self._outputs(call, lengths)
        return outputs, sums

    def _links(self, schedule: Schedule) -> StageLinks:
        """Return links to the other stages for a schedule."""
        groups, ranks = dict.fromkeys("FB", self.stage.pp_group), schedule.rank_of_stage
        return StageLinks(self.stages, self.stage.pp_rank, ranks, groups, self.device, schedule)

    def _walk(self, call: PipelineCall, schedule: Schedule, links: StageLinks) -> Iterator[tuple[Action, float, float]]:
        """Begin a call on this rank's stages and walk through its actions in a schedule."""
        for stage in self.stages.values():
            stage.begin(call.leaf, call.output)
        return walk(schedule.together(self.stage.pp_rank), self.stages, links)

    def _outputs(self, call: PipelineCall, lengths: OwnLengths | None) -> list[Tensor | None]:
        """Return whole outputs: those of this rank's stages, and those that all ranks get."""
        values = self._everywhere(call.outputs.joined(self._before_joining), self.sources.keys() - call.unmade)
        outputs: list[Tensor | None] = [None] * self.returns.count
        for name, value in values.items():
            outputs[int(name)] = self.forms[name].of(value, lengths)
        for name in call.unmade & (self.made_here | self.sources.keys()):
            like = self.empty[name]
            local = torch.full((1,) * like.dim(), math.nan, device=self.device).to(like.dtype).expand(like.shape)
            outputs[int(name)] = unmade(self.forms[name], local, lengths, partial(self.made, name, call, lengths))
        return outputs

    def _everywhere(self, values: dict[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
        """Return this rank's parts of outputs, with those of other stages that all ranks get."""
        for name in sorted(names, key=int):
            what = "the loss" if int(name) == self.returns.loss else f"output {self.returns.names[int(name)]}"
            values[name] = self._from(self.sources[name], values.get(name), name, what)
        return values

    def made(self, name: str, call: PipelineCall, lengths: OwnLengths | None) -> Tensor:
        """Return an output that a call has let go of, from its forwards run a second time. Collective. Raises
        StageError where the ranks of one stage alone have it."""
        if name not in self.sources and len(self.stage.ranks) > 1:
            raise StageError(
                f"{self.returns.names[int(name)]} of all micro-batches takes {size(self.plan.unmade_bytes)} a device, "
                "which the plan has no room for, and one stage cannot make it again by itself",
                fix='pass outputs="everywhere" to autopar.compile and read it on all ranks, compute what you need of '
                "it inside of the model, or use more devices",
            )
        call, schedule = call.again(name), forwards(self.schedule)
        with torch.no_grad(), watch.collective(f"output {self.returns.names[int(name)]}, made when it is read"):
            for action, _, _ in self._walk(call, schedule, self._links(schedule)):
                self.stages[action.stage].saved.clear()
            for stage in self.stages.values():
                stage.end()
            values = call.outputs.joined(self._before_joining)
            return self.forms[name].of(self._everywhere(values, self.sources.keys() & {name})[name], lengths)

    def _before_joining(self, name: str, i: int, part: Tensor) -> Tensor:
        """Return this rank's part of an output of one micro-batch, in the layout in which it is joined with the
        others'."""
        if name not in self.gathered:
            return part
        how, (layout, joined) = self.micro.of_rows.joins[name], self.gathered[name]
        shape = list(self.forms[name].spec.shape)
        shape[how] = shape[how] // self.micro.samples * self.micro.of_rows.sizes[i]
        mesh, device_mesh = self.stage.mesh, self.stage.device_mesh
        if in_zigzag(layout):
            return local_part(whole_of(part, shape, layout, mesh, device_mesh), joined, mesh, self.stage.coordinate)
        return redistributed(as_dtensor(part, shape, layout, mesh, device_mesh), joined, mesh, device_mesh)

    def _from(self, pp_rank: int, mine: Tensor | None, name: str, what: str) -> Tensor:
        """Return this rank's part of an output that a rank along the pipeline has."""
        if self.stage.pp_rank == pp_rank:
            tensor = mine.contiguous()
        else:
            tensor = torch.empty_like(self.empty[name], device=self.device)
        with watch.collective(what):
            dist.broadcast(tensor, group=self.stage.pp_group, group_src=pp_rank)
        return tensor


class _PipelineLoss(torch.autograd.Function):
    """The outputs of a call that has computed its gradients already: those of the loss, so that the others take
    none."""

    @staticmethod
    def forward(ctx, step: PipelineStep, inputs: list[Tensor], lengths: OwnLengths | None, *anchor_and_parameters):
        ctx.seed = step.seed
        outputs, ctx.sums = step.run(inputs, lengths)
        ctx.step = step
        loss, differentiable = step.returns.loss, step.returns.differentiable
        ctx.mark_non_differentiable(
            *[o for o, wanted in zip(outputs, differentiable) if not wanted and isinstance(o, Tensor)]
        )
        ctx.set_materialize_grads(False)
        ctx.loss = loss
        return tuple(outputs)

    @staticmethod
    @located
    def backward(ctx, *tangents):
        refuse_second_derivatives()
        step, sums, ctx.sums = ctx.step, ctx.sums, None
        if sums is None:
            raise InputError(
                "a second backward through one call: with stages or micro-batches the first one takes the gradients "
                "away",
                fix="call the model again, or leave out retain_graph=True",
            )
        for name, tangent in zip(step.returns.names, tangents):
            if tangent is not None and name != step.returns.names[ctx.loss]:
                raise StageError(
                    f"a gradient arrives for {name}, and with stages or micro-batches the loss alone has one: the call "
                    "has computed the gradients of its parameters when it returns",
                    fix=f"add what you compute from {name} to the loss inside of the model, or detach it, or use one "
                    f"micro-batch and a mesh without pp",
                )
        scale = tangents[ctx.loss]
        if scale is None:
            return None, None, None, None, *[None] * len(step.names)
        if ctx.seed is not None:
            step.seed = torch.where(scale.isfinite() & (scale > 0), scale, step.seed)
            scale = scale / ctx.seed
        _, *nodes = [node for node, _ in ctx.next_functions]  # the first is the anchor's
        return None, None, None, None, *step.gradients(sums, scale, step.parameters, nodes)


def _joined_layout(layout: Layout, how: str | int, count: int) -> Layout:
    """Return the layout of so many parts one after the other, of which each is sharded for itself."""
    parts = [n * (count if d == how else 1) for d, n in enumerate(layout.parts)]
    return Layout(layout.dims, layout.partial, tuple(parts))


def forwards(schedule: Schedule) -> Schedule:
    """Return the forwards of a schedule alone, stage by stage on each rank, which ends for every placement."""
    orders = tuple(
        tuple(Action("F", s, i) for s in schedule.stages_of(rank) for i in range(schedule.micro_batches))
        for rank in range(schedule.ranks)
    )
    return Schedule(
        f"{schedule.name}, forwards alone", schedule.ranks, schedule.micro_batches, schedule.rank_of_stage, orders
    )
