"""The compiler: one list names every pass, in the order they run, and a few functions run parts of it.

    a model's call -> joint graph     `trace`: MODEL
    joint graph -> a plan             autopar/planner
    plan -> one rank's graphs         `lower_plan`: MICRO_BATCHES and STAGES, where there are several, then RANK

A pass that a user adds (`passes=[autopar.Pass(...)]`) belongs to the capture and runs wherever its list does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import fx, nn

from ._torch import OpenSizes, lazy_code
from .adapt.lora import LoRA
from .adapt.order import Adaptation
from .codegen import pass_manager
from .codegen.rank_program import OF_ACTIONS, DeferredProgram, LoweredProgram, PipelineProgram, StageProgram
from .codegen.verify_graph import check_global, check_local, check_sharding, check_values
from .errors import CaptureError, VerifyError
from .frontend import autocast, export
from .frontend.block_lists import repeated_blocks_of
from .frontend.dtypes import check_types
from .frontend.equal_blocks import equal_blocks_of
from .frontend.export import Captured, Exported
from .frontend.fake_parameters import Form, tie_map
from .frontend.lasting import removed_again
from .frontend.output_gradients import differentiable_outputs
from .frontend.precision import compute_dtype, reduce_type
from .frontend.shorten import shorten
from .frontend.unroll import unroll
from .ir.compiler_pass import CAPTURE, Pass
from .ir.graph import annotate, output_node
from .passes.adapt.fake_quant import fake_quant
from .passes.adapt.fp8 import fp8
from .passes.adapt.lora import check_gradients, lora
from .passes.adapt.quantize import quantize
from .passes.canonicalize.autocast_kernels import traced_as
from .passes.canonicalize.clean import clean
from .passes.canonicalize.dispatch import dispatch
from .passes.canonicalize.explicit_casts import explicit_casts
from .passes.canonicalize.grad_regions import grad_regions
from .passes.canonicalize.rewrite import canonicalize
from .passes.canonicalize.upcast import upcast
from .passes.distribute import defer
from .passes.distribute.add_rounds import add_rounds
from .passes.distribute.beside_exchange import beside_exchange
from .passes.distribute.bucket import bucket
from .passes.distribute.by_tier import by_tier
from .passes.distribute.in_place import in_place
from .passes.distribute.keep_keys import keep_keys
from .passes.distribute.localize import localize
from .passes.distribute.loop import loop
from .passes.distribute.lower_ops import lower_ops
from .passes.distribute.overlap import overlap
from .passes.distribute.partition import partition
from .passes.distribute.recompute import recompute
from .passes.distribute.save_on_host import save_on_host
from .passes.distribute.tile import tile
from .passes.pipeline.compute_once import compute_once
from .passes.pipeline.micro_batch import MicroBatched, micro_batch
from .passes.pipeline.sequence_chunks import in_chunks
from .passes.pipeline.stages import Stage, cut
from .passes.pipeline.tail import check_waits
from .plans.check import check_decisions
from .plans.pipeline import rank_inside
from .plans.plan import Plan
from .utils.gc_pause import paused_collector


@dataclass(frozen=True)
class ModelCall:
    """The context of the passes of MODEL: the call that is captured, and how it computes (see `trace`). `around`: what
    autocast says outside of the model, on `device`."""

    model: nn.Module
    example_inputs: object
    loss_fn: Callable | None
    forms: Mapping[str, Form] | None
    precision: str | torch.dtype
    adapt: Sequence[Adaptation]
    loss_alone: bool
    with_gradients: bool
    around: autocast.State
    device: str


@dataclass(frozen=True)
class Local:
    """The context of the passes of RANK: the plan, and whose graph it is to be."""

    plan: Plan
    rank: int


def _export(model: nn.Module, call: ModelCall) -> Exported:
    how = call.loss_fn, call.forms, compute_dtype(call.precision), call.loss_alone, call.with_gradients
    with traced_as(call.device, call.around):
        return export.export(model, call.example_inputs, *how)


def _explicit_casts(graph_module: fx.GraphModule, call: ModelCall) -> None:
    explicit_casts(graph_module, call.around, call.device)
    check_types(graph_module.graph)


def _differentiate(exported: Exported, call: ModelCall) -> Captured:
    if call.adapt:
        returns = exported.returns
        loss = returns.loss if returns.loss_alone else None
        found = differentiable_outputs(exported.graph_module, exported.inputs, loss)
        returns.differentiable = found[: returns.count]
    captured = export.differentiate(exported)
    if any(isinstance(a, LoRA) for a in call.adapt):
        check_gradients(captured)
    return captured


def _adapts(name: str, call: ModelCall) -> bool:
    return any(adaptation.name == name for adaptation in call.adapt)


def _itself(call: ModelCall) -> tuple[ModelCall]:
    return (call,)


def _model(call: ModelCall) -> tuple[nn.Module]:
    return (call.model,)


def _localized(here: Local) -> tuple:
    plan = here.plan
    lowering = "native" if plan.sharding.hierarchy else plan.reduce_scatter  # else by_tier lowers it
    experts = plan.expert_capacity, plan.hot_experts
    return plan.sharding, here.rank, lowering, None, reduce_type(plan.reduce_dtype), *experts


MODEL = (
    Pass("export", _export, _itself, takes=CAPTURE),
    Pass("explicit_casts", _explicit_casts, _itself),
    Pass("grad_regions", grad_regions),
    Pass("canonicalize", canonicalize),
    Pass("lora", lora, _model, partial(_adapts, "lora"), CAPTURE, needs="--lora or --qlora"),
    Pass("quantize", quantize, _model, partial(_adapts, "quantize"), CAPTURE, needs="--qlora"),
    Pass("fake_quant", fake_quant, _model, partial(_adapts, "fake_quant"), CAPTURE, needs="--qat"),
    Pass("fp8", fp8, _model, partial(_adapts, "fp8"), CAPTURE, needs="--fp8"),
    Pass("differentiate", _differentiate, _itself, takes=CAPTURE),
    Pass("upcast", upcast, when=lambda call: compute_dtype(call.precision) is not None, needs="--precision bf16"),
    Pass("clean", lambda graph_module: dispatch(clean(graph_module))),
)
FORWARD, JOINT = MODEL[:-3], MODEL[-3:]
UNROLL = Pass("unroll", unroll, takes=CAPTURE, needs="a model of many equal blocks")  # of a capture with few of them
PARTS, CHUNKS = "--micro-batches 2", "--mesh pp=2 --sequence-chunks 2"
MICRO_BATCHES = (
    Pass("micro_batch", micro_batch, lambda p: (p.micro_batches // p.row_chunks,), takes=CAPTURE, needs=PARTS),
    Pass("sequence_chunks", in_chunks, lambda p: (p.row_chunks,), lambda p: p.row_chunks > 1, CAPTURE, needs=CHUNKS),
)  # fmt: skip
STAGES = (Pass("cut", cut, lambda pipeline: (pipeline.cuts,), takes=CAPTURE, needs="an axis pp: --mesh pp=2,dp=2"),)
RANK = (
    Pass("localize", localize, _localized),
    Pass("keep_keys", keep_keys, lambda here: (here.plan.row_chunks,),
         lambda here: here.plan.row_chunks > 1, needs=CHUNKS),
    Pass("add_rounds", add_rounds, when=lambda here: bool(here.plan.expert_capacity), needs="--expert-capacity 1.25"),
    Pass("tile", tile, lambda here: (here.plan.tiled,), lambda here: bool(here.plan.tiled), needs="--tile loss+mlp"),
    Pass("recompute", recompute, lambda here: (here.plan.sharding.recomputed, bool(here.plan.tiled))),
    Pass("save_on_host", save_on_host, lambda here: (here.plan.saved_on_host,),
         lambda here: here.plan.saved_on_host is not None, needs="--offload activations and little --memory"),
    Pass("loop", loop, lambda h: (h.plan.sharding.loops,), lambda h: bool(h.plan.sharding.loops), needs="--loops auto"),
    Pass("lower_ops", lower_ops),
    Pass("beside_exchange", beside_exchange, lambda here: (here.plan.sharding.exchanges,),
         lambda here: bool(here.plan.sharding.exchanges), needs="rows of experts that are sent beside products"),
    Pass("bucket", bucket, lambda here: (here.plan.bucket_bytes, here.plan.overlaps)),
    Pass("by_tier", by_tier,
         lambda here: (here.plan.sharding.mesh, here.plan.sharding.hierarchy, here.plan.reduce_scatter),
         lambda here: bool(here.plan.sharding.hierarchy), needs="a profile with two tiers of links"),
    Pass("in_place", in_place),
    Pass("overlap", overlap, lambda here: (here.plan.overlaps,)),
)  # fmt: skip
PARTITION = Pass("partition", partition, takes=CAPTURE)
COMPUTE_ONCE = Pass("compute_once", compute_once, takes=CAPTURE, needs=PARTS)  # of a stage
PASSES = (*MODEL, UNROLL, *MICRO_BATCHES, *STAGES, *RANK, PARTITION, COMPUTE_ONCE, *OF_ACTIONS)


@paused_collector()
def trace(
    model: nn.Module,
    example_inputs,
    loss_fn: Callable | None = None,
    forms: Mapping[str, Form] | None = None,
    precision: str | torch.dtype = "fp32",
    adapt: Sequence[Adaptation] = (),
    loss_alone: bool = True,
    with_gradients: bool = True,
    passes: Sequence[Pass] = (),
) -> Captured:
    """Return the annotated joint graph of a model's call, in canonical ops. `forms`: shapes and dtypes of the
    parameters, if not their own; `precision`: as in autopar/frontend/precision.py; `adapt`: what is attached to the
    model (see autopar/adapt/order.py); `loss_alone`: of the outputs, the loss alone has a tangent if there is one, not
    all that are differentiable; `with_gradients`: whether the call is made where gradients are recorded; `passes`: a
    user's own. Raises CaptureError, InputError, UnsupportedOpError, AdaptError, PassError."""
    around = autocast.ambient()
    device = autocast.device_of(model, around)
    call = ModelCall(
        model, example_inputs, loss_fn, forms, precision, adapt, loss_alone, with_gradients, around, device
    )
    with torch.inference_mode(False), torch.enable_grad(), lazy_code():  # a first call may be an evaluation
        if passes or pass_manager.is_watched():  # who looks at passes sees all blocks
            captured = pass_manager.run_all(pass_manager.with_added(MODEL, passes), model, call, _check_added)
        else:
            captured = _of_few_blocks(model, call) or _joint(pass_manager.run_all(FORWARD, model, call), model, call)
    captured.passes = tuple(passes)
    return captured


def open_sizes(
    model: nn.Module,
    example_inputs,
    dims: Mapping[str, Mapping[int, int]],
    captured: Captured,
    loss_fn: Callable | None,
    forms: Mapping[str, Form],
    precision: str | torch.dtype,
    with_gradients: bool,
) -> OpenSizes:
    """Return for which sizes of these dims of the inputs, by name and dim the place of the size, a call of the model
    takes the way through the user's code that `captured` took, and its numbers. Raises what `trace` raises, also where
    a size that is not known cannot be traced."""
    around = autocast.ambient()
    how = captured.as_eager, loss_fn, forms, compute_dtype(precision), captured.returns.loss_alone, with_gradients
    inside = torch.inference_mode(False), torch.enable_grad(), traced_as(autocast.device_of(model, around), around)
    with inside[0], inside[1], inside[2]:
        return export.open_sizes(model, example_inputs, dims, *how)


def _of_few_blocks(model: nn.Module, call: ModelCall) -> Captured | None:
    """Return the joint graph of a model of which five of many equal blocks are exported, None if it is not known that
    this is the whole model's."""
    how = call.loss_fn, compute_dtype(call.precision), call.loss_alone, call.with_gradients
    with traced_as(call.device, call.around):
        found = equal_blocks_of(model, call.example_inputs, call.forms, *how)
    if found is None:
        return None
    with contextlib.suppress(CaptureError):
        with found.blocks.shortened():
            short = pass_manager.run_all(MODEL, model, call)
        if not short.as_eager:  # it was, when it was compared
            return found.completed(pass_manager.run(UNROLL, short, found.blocks, found.run.ties))
    return None


def _joint(exported: Exported, model: nn.Module, call: ModelCall) -> Captured:
    """Return the joint graph of a forward, in less time where it has many equal blocks."""
    if (short := shorten(exported, model)) is not None:
        with contextlib.suppress(CaptureError):  # gradients may tell blocks apart
            captured = short.completed(pass_manager.run_all(JOINT, short.exported, call))
            return pass_manager.run(UNROLL, captured, short.blocks, exported.ties)
    return pass_manager.run_all(JOINT, exported, call)


def _check_added(subject: Exported | Captured) -> None:
    """Check and annotate the graph that a user's pass left before there is a plan."""
    # a forward may change: it is not differentiated yet
    check_values(subject.graph_module.graph, renew=isinstance(subject, Exported))
    if isinstance(subject, Captured):
        annotate(subject.graph)
        check_global(subject.graph_module)
    subject.graph_module.recompile()


def trace_to_plan(
    model: nn.Module,
    example_inputs,
    loss_fn: Callable | None,
    forms: Mapping[str, Form],
    precision: str | torch.dtype = "fp32",
    adapt: Sequence[Adaptation] = (),
    passes: Sequence[Pass] = (),
    kept: Callable[[Callable[[], Captured]], Captured] = lambda traced: traced(),
) -> Captured:
    """Return the same graph as `trace` does, in less time where the model has many equal blocks (see
    autopar/frontend/unroll.py). `kept`: gives the capture of the model as it is when called, which its argument traces,
    in another way if there is one."""
    whole = partial(kept, partial(trace, model, example_inputs, loss_fn, forms, precision, adapt, passes=passes))
    if not passes and (repeated := repeated_blocks_of(model)):  # a user's pass sees all blocks
        with contextlib.suppress(CaptureError):  # a model may count its blocks, or read them all: then all are traced
            with repeated.shortened(), removed_again(model):
                short = whole()
            return pass_manager.run(UNROLL, short, repeated, tie_map(model))
    return whole()


def lower_plan(
    captured: Captured, plan: Plan, rank: int, check: bool | None = None
) -> LoweredProgram | PipelineProgram:
    """Return what a rank runs of a plan: one program, or those of its stages. Raises as these do."""
    return (lower if plan.pipeline.is_one_program else lower_pipeline)(captured, plan, rank, check)


def lower(captured: Captured, plan: Plan, rank: int, check: bool | None = None) -> LoweredProgram:
    """Run the passes of RANK for one rank; with `check` (default: AUTOPAR_CHECK=1) the verifier runs after each."""
    check = os.environ.get("AUTOPAR_CHECK") == "1" if check is None else check
    if check:
        check_global(captured.graph_module)
        check_sharding(captured.graph_module, plan.sharding)
    local = _local(captured, captured.graph_module, plan, rank, check)
    return LoweredProgram(rank, pass_manager.run(PARTITION, local), local)


def _local(
    captured: Captured, graph_module: fx.GraphModule, plan: Plan, rank: int, check: bool = False, prefix: str = ""
) -> fx.GraphModule:
    """Return the local joint graph of a rank, of the capture's graph or one that is made of it."""
    passes = pass_manager.with_added(RANK, captured.passes)
    checked = partial(check_local, mesh=plan.mesh, computes=bool(captured.passes))
    return pass_manager.run_all(passes, graph_module, Local(plan, rank), checked, check, prefix)


def lower_deferred(captured: Captured, plan: Plan, rank: int, saved: tuple[str, ...]) -> DeferredProgram:
    """Return a rank's graphs for gradient accumulation beside a forward that saves `saved`. Raises VerifyError."""
    graph = captured.graph
    unreduced = replace(plan, sharding=defer.without_reductions(graph, plan.sharding))
    parts = partition(_local(captured, captured.graph_module, unreduced, rank, prefix="deferred "))
    if parts.saved != saved:
        raise VerifyError("without reductions a backward needs other saved values than with them", mesh=plan.mesh)
    reduce, sharding = defer.reductions(graph, plan.sharding)
    reduce = _local(captured, reduce, replace(plan, sharding=sharding, saved_on_host=None), rank, prefix="reductions ")
    return DeferredProgram(parts.backward, reduce, defer.unreduced_layouts(graph, plan.sharding))


def stages_of(captured: Captured, plan: Plan) -> tuple[MicroBatched, list[Stage]]:
    """Cut the graph of the whole batch into the stages of a plan. Raises MicroBatchError, StageError."""
    micro = pass_manager.run_all(MICRO_BATCHES, captured, plan.pipeline)
    check_waits(micro.tail, plan.pipeline.orders)
    check_decisions(micro.captured.graph, plan.sharding)
    return micro, pass_manager.run_all(STAGES, micro.captured.graph_module, plan.pipeline)


def smaller_stages_of(micro: MicroBatched, plan: Plan) -> list[Stage] | list[None]:
    """Cut the graph of the micro-batches with one sample less into the same stages; return Nones if there are none."""
    if micro.smaller is None:
        return [None] * (len(plan.pipeline.cuts) + 1)
    check_decisions(micro.smaller.graph, plan.sharding)
    return pass_manager.run_all(STAGES, micro.smaller.graph_module, plan.pipeline)


def lower_pipeline(
    captured: Captured, plan: Plan, rank: int, check: bool | None = None, waits: bool = False
) -> PipelineProgram:
    """Return what a rank runs of a plan with stages or micro-batches; with `waits` gradients wait for their reduction
    also where the plan does not want that. Raises as `stages_of` and `lower` do."""
    micro, stages = stages_of(captured, plan)
    smaller = smaller_stages_of(micro, plan)
    pipeline, coordinate = plan.pipeline, plan.mesh.coordinate(rank)
    here = rank_inside(plan.sharding.mesh, coordinate)
    leaves = [
        frozenset().union(*(stages[i].leaves for i in pipeline.stages_of(pp_rank))) for pp_rank in range(pipeline.ranks)
    ]
    mine = pipeline.stages_of(pipeline.pp_rank_of(coordinate))
    programs = {i: lower_stage(stages[i], micro, plan, here, check, waits, smaller[i]) for i in mine}
    return PipelineProgram(rank, micro, programs, tuple(leaves))


def lower_stage(stage: Stage, micro: MicroBatched, plan: Plan, rank: int, check: bool | None = None,
                waits: bool = False, smaller: Stage | None = None) -> StageProgram:  # fmt: skip
    """Return one rank's graphs for one stage, with those for micro-batches of one sample less if it has `smaller`.
    `rank`: in the stage's mesh. Raises VerifyError if the two share less than copies and gradients."""
    program = _lowered(stage, micro, plan, rank, check, waits)
    if smaller is None:
        return program
    less = _lowered(smaller, micro, plan, rank, check, waits)
    if _shared(program) != _shared(less):
        raise VerifyError(f"stage {stage.index} makes other copies for smaller micro-batches", mesh=plan.mesh)
    return replace(program, smaller=replace(less, copies=None))


def _shared(program: StageProgram) -> tuple:
    """Return what micro-batches of all sizes share: copies of parameters and gradients, by name, shape and layout."""
    made = output_node(program.copies.graph) if program.copies is not None else None
    leaving = () if made is None else zip(made.args[0], made.meta["roles"])
    copies = [(role.name, tuple(value.meta["val"].shape)) for value, role in leaving]
    return copies, None if program.deferred is None else program.deferred.layouts


def _lowered(stage: Stage, micro: MicroBatched, plan: Plan, rank: int, check: bool | None, waits: bool) -> StageProgram:
    captured = replace(micro.captured, graph_module=stage.joint)
    plan = stage.plan(plan)
    whole = lower(captured, plan, rank, check)
    waits = (waits or plan.reduces_once) and whole.parts.backward is not None
    deferred = lower_deferred(captured, plan, rank, whole.parts.saved) if waits else None
    forward, copies = whole.parts.forward, None
    if micro.micro_batches > 1:
        forward, copies = pass_manager.run(COMPUTE_ONCE, forward)
    return StageProgram(stage, captured, plan, whole, forward, copies, deferred)
