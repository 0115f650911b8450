"""`autopar.compile` and `autopar.plan`: the compiler's steps in the order they run.

    trace (the passes of autopar/compiler.py) -> plan -> lower (more of them) -> run

Everything up to the plan is the same for both; `plan` stops there and needs no process group, no device and no weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..adapt import order
from ..adapt.order import Adaptation
from ..codegen import pass_manager
from ..compiler import PASSES, trace_to_plan
from ..cost.compute import COMPILED
from ..errors import InputError, MeshError, MovedParameterError, StrategyError
from ..frontend.export import Captured
from ..frontend.fake_parameters import forms_of
from ..frontend.precision import reduce_type, state_type
from ..frontend.user_lines import located
from ..hardware.profile import Hardware
from ..ir.compiler_pass import Pass
from ..ir.mesh import Mesh
from ..planner import free_batch
from ..planner.explain import Explanation, explain_plan
from ..planner.explain_pipeline import PipelineExplanation, explain_pipeline
from ..planner.options import device_type_of, execution_on, hardware_of, precision_on
from ..planner.problem.hf_tp_plan import styles_of
from ..planner.remedies import planned_or_fixes
from ..planner.request import PlanRequest
from ..planner.spmd import accumulation
from ..planner.spmd.batch import AUTO
from ..planner.spmd.planned import Planned
from ..plans.plan import Plan
from ..processes import agree, last_words, process_groups, watch
from ..processes.machines import fitted_to_machines
from ..runtime import optimizers
from ..runtime.equal_ranks import EVERY
from ..runtime.first_call import CompiledAtFirstCall
from ..runtime.inputs import check_local
from ..runtime.lengths import Padding
from ..runtime.module import ParallelModule
from ..runtime.parameters import check_model, check_source
from ..runtime.same_values import share_values
from ..schedule import Schedule
from ..schedule.catalogue import canonical
from ..storage.compile_cache import CompileCache
from ..storage.weights import Weights, shapes_of
from ..utils.gc_pause import paused_collector
from ..utils.host_memory import keep_freed_pages
from . import fp8_choice, words
from .cache_keys import capture_key, sources
from .call_compiler import CallCompiler
from .kept_capture import kept_or_traced

NO_CACHE = CompileCache(None)


@located
def plan(
    model: nn.Module,
    mesh: str | int | Mesh | DeviceMesh | Mapping[str, int],
    example_inputs: Any,
    *,
    hardware: str | Path | Hardware | None = None,
    memory: float | str | None = None,
    optimizer: words.Optimizer = "adamw",
    precision: str | torch.dtype = "auto",
    strategy: words.Strategy | None = None,
    reduce_dtype: str | torch.dtype | None = None,
    state_dtype: str | torch.dtype | None = None,
    execution: words.Execution | None = None,
    expert_load: words.ExpertLoad = 1.0,
    expert_capacity: float | None = None,
    hot_experts: words.HotExperts = "auto",
    pin: Mapping[str, str] | None = None,
    forbid: Mapping[str, str | Sequence[str]] | None = None,
    adapt: Sequence[Adaptation] = (),
    passes: Sequence[Pass] = (),
    loss_fn: Callable | None = None,
    strict: bool = False,
    baselines: bool | str = True,
    micro_batches: words.MicroBatches | None = None,
    schedule: words.Schedule | Schedule = "auto",
    stages_per_rank: int | None = None,
    sequence_chunks: int | None = None,
    recompute: words.Recompute = "auto",
    tile: words.Tile = "auto",
    loops: words.Loops = "never",
    offload: words.Offload = "none",
    fixes: bool = True,
    solver: words.Solver = "dual",
    tokens_per_second: bool = False,
    name: str | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Plan a model for a mesh without running anything: `model` and `example_inputs` may be on the meta device.

    `mesh`: text ("dp=8,tp=8"), autopar.Mesh, a DeviceMesh, or a number of devices: then meshes are tried. `hardware`: a
    profile's name, a device's own name, a TOML file (default h100, or the DeviceMesh's own device). `memory`: bytes or
    text such as "40GiB" (default the hardware's). `pin`: glob of a parameter's name -> layout, "tp:S(0)" or "R";
    `forbid`: glob -> a layout that it may not take, or several. `strategy`: a recipe, or two for two axes,
    "megatron_sp+zero1". `precision`: "fp32", the model in its own types, or "bf16" or "fp16", mixed precision as
    autopar/frontend/precision.py says; torch.bfloat16 and the like mean the same; "auto" is bf16 where the hardware
    computes faster in it and the model is in fp32, but never on a DeviceMesh of CPUs. `reduce_dtype`: "bf16" or "fp16",
    in which gradients are added up over devices, if it is narrower than theirs. `state_dtype`: "bf16", in which the
    optimizer's tensors are kept from step to step (runtime/narrow_state.py). `execution`: "eager", op by op, or
    "compiled", through torch.compile, pointwise ops fused and launches hidden; None: as `compile` runs graphs on the
    devices of the profile, compiled on GPUs, unless values may wait on the host. `expert_load`: rows of the busiest
    device's experts over the mean, as a number or an ExpertBalance has it, or those of each expert. `expert_capacity`:
    times the mean, the most that a device holds at a time; more go in further rounds. `hot_experts` of a layer are
    copied to all devices in the place of their rows ("auto": if that pays). `adapt`: LoRA, QLoRA, FakeQuant, FP8,
    planned with the rest. `passes`: autopar.Pass values of your own (docs/extending.md). `baselines=False` leaves the
    expert strategies out, "pipelines" adds experts' pipelines on the devices of a mesh without stages, which takes
    longer. `example_inputs` are the whole batch of a step, which is cut into `micro_batches`, whose gradients add up;
    the plan says whether they are reduced once a step or each ("auto": the fewest that fit without recomputation; None:
    one, or on a mesh with an axis pp as many as are best). The stages along pp follow a `schedule`: a name of
    autopar/schedule/catalogue.py, a Schedule, or "auto", the best, with so many stages a rank; a causal model's rows
    may follow one another through them in `sequence_chunks` of their tokens (None: where a batch has few rows and that
    is faster; docs/sequences.md). For a number of devices the plan may have stages or not; it has some if a schedule is
    asked for. `recompute`: "auto", or "none", "selective" or "full" for all blocks. `tile`: what is computed in pieces
    of rows: the last linear layer and its loss, without logits ("loss"), MLPs ("mlp"), attention's queries ("queries"),
    several of them ("loss+mlp"), "none", or "auto", where memory is short and that is faster (docs/sequences.md).
    `loops`: which gathers and reduce-scatters go round beside the products that read or make what they move: "never",
    "auto", where that is faster, or "always" where it can be (docs/planning.md). `offload`: what the host holds:
    "none"; where memory is short, values that the backward reads ("activations"), or also parameters that train, with
    their gradients and optimizer state ("auto"); or all of those parameters ("optimizer"). `solver`: "dual", the
    search, or "ilp", which for a small model on a mesh without stages gives the full integer program to OR-tools, as a
    cross-check. With `tokens_per_second` the batch is free: that of `example_inputs` times powers of two, and the plan
    is that of the one with the most tokens a second that fits. Raises subclasses of AutoparError; MemoryInfeasibleError
    with `fixes`, what would fit instead, unless `fixes=False` leaves that out: it takes several searches."""
    return search(
        model, mesh, example_inputs, hardware=hardware, memory=memory, optimizer=optimizer, precision=precision,
        reduce_dtype=reduce_dtype, state_dtype=state_dtype, execution=execution, expert_load=expert_load,
        expert_capacity=expert_capacity, hot_experts=hot_experts, strategy=strategy, pin=pin,
        forbid=forbid, adapt=adapt, passes=passes, loss_fn=loss_fn, strict=strict, baselines=baselines,
        micro_batches=micro_batches, schedule=schedule, stages_per_rank=stages_per_rank, solver=solver,
        sequence_chunks=sequence_chunks, recompute=recompute, tile=tile, loops=loops, offload=offload, fixes=fixes,
        tokens_per_second=tokens_per_second, name=name, report=report,
    ).plan  # fmt: skip


def search(
    model: nn.Module, mesh, example_inputs, *, adapt=(), passes=(), loss_fn=None, fixes=True, name=None,
    report=lambda text: None, hardware=None, memory=None, optimizer="adamw", precision="auto", strategy=None, pin=None,
    strict=False, baselines=True, forbid=None, offload="none", reduce_dtype=None, state_dtype=None,
    execution=None, tokens_per_second=False, cache=NO_CACHE, **staged,
) -> Planned:  # fmt: skip
    """Plan as `plan` does, and return all that the search knows beside the plan. `cache`: a CompileCache, in which
    captures are looked for and kept. `staged`: what `PlanRequest.of` takes besides, `refuses=False` too, with which
    what does not fit is planned all the same."""
    check_model(model)
    precision = precision_on(Mesh.of(mesh) if isinstance(mesh, Mapping) else mesh, hardware, precision, model)
    device_type = "cuda" if hardware_of(mesh, hardware).is_gpu else None
    execution = execution_on(device_type, execution, offload)
    asked = dict(hardware=hardware, memory=memory, optimizer=optimizer, precision=precision, strategy=strategy, pin=pin)
    asked |= dict(strict=strict, fixed={}, baselines=baselines, forbid=forbid, offload=offload, execution=execution)
    asked |= dict(reduce_dtype=reduce_dtype, state_dtype=state_dtype, styles=styles_of(model))
    request = PlanRequest.of(mesh, name or type(model).__name__, **asked, **staged)
    adaptations, added = order.checked(adapt), pass_manager.check_added(passes, PASSES)

    def traced(adaptations: Sequence[Adaptation], inputs=example_inputs) -> Captured:
        report("tracing the model")
        with order.attached(model, adaptations):
            call, precision = (model, inputs, loss_fn, forms_of(model)), request.options.precision

            def kept(trace: Callable[[], Captured]) -> Captured:
                is_kept = cache.folder is not None and not added and not pass_manager.is_watched()
                key = capture_key(sources(model), *call, precision, adaptations, True, True) if is_kept else None
                return kept_or_traced(trace, *call, cache, key)

            return trace_to_plan(*call, precision, adaptations, added, kept)

    def planned(adaptations: Sequence[Adaptation]) -> Planned:
        if tokens_per_second:

            def of(samples: int) -> Planned:
                return request.find(traced(adaptations, free_batch.with_samples(example_inputs, samples)), report)

            return free_batch.fastest(of, *free_batch.samples_and_tokens(example_inputs))

        def retraced(more: Sequence[Adaptation] = ()) -> Captured:
            return traced((*adaptations, *more))

        return planned_or_fixes(request, retraced(), bool(adaptations), retraced, fixes, report)

    return fp8_choice.fastest(model, adaptations, planned)


@located
def explain(
    model: nn.Module | Planned,
    pattern: str | None = None,
    mesh=None,
    example_inputs=None,
    *,
    alternatives: int = 6,
    report=lambda text: None,
    **planning,
) -> Explanation | PipelineExplanation:
    """Explain why the plan of a model chose what it chose for the parameters, ops and modules whose names the glob
    `pattern` matches, and what up to `alternatives` others would cost each; `print` the result. `mesh`,
    `example_inputs` and `planning` as in `autopar.plan`; a finished search (`autopar.api.entry.search`) needs none of
    them. With an axis pp the result also says why the pipeline is as it is. Raises subclasses of AutoparError."""
    planned = model
    if not isinstance(model, Planned):
        planned = search(model, mesh, example_inputs, report=report, **{"baselines": False} | planning)
    if planned.staged:
        return explain_pipeline(planned, pattern, alternatives, report)
    if pattern is None:
        raise StrategyError("without a pipeline there is nothing to explain but a pattern", fix='use "*.weight"')
    return explain_plan(planned, pattern, alternatives, report=report)


@located
def compile(
    model: nn.Module,
    mesh: DeviceMesh,
    example_inputs: Any = None,
    *,
    inputs: words.Inputs = "global",
    outputs: words.Outputs = "stage",
    plan: Plan | str | Path | None = None,
    hardware: str | Path | Hardware | None = None,
    memory: float | str | None = None,
    optimizer: words.Optimizer = "adamw",
    precision: str | torch.dtype = "auto",
    strategy: words.Strategy | None = None,
    reduce_dtype: str | torch.dtype | None = None,
    state_dtype: str | torch.dtype | None = None,
    execution: words.Execution | None = None,
    expert_load: words.ExpertLoad = 1.0,
    expert_capacity: float | None = None,
    hot_experts: words.HotExperts = "auto",
    pin: Mapping[str, str] | None = None,
    adapt: Sequence[Adaptation] = (),
    passes: Sequence[Pass] = (),
    loss_fn: Callable | None = None,
    weights: str | Path | None = None,
    strict: bool = False,
    baselines: bool = False,
    micro_batches: words.MicroBatches | None = None,
    offload: words.Offload = "none",
    tile: words.Tile = "auto",
    loops: words.Loops = "never",
    schedule: words.Schedule | Schedule = "auto",
    stages_per_rank: int | None = None,
    sequence_chunks: int | None = None,
    pad: Padding | None = None,
    check_every: int | None = EVERY,
) -> ParallelModule:
    """Return a drop-in module that runs `model` on all devices of a DeviceMesh: same call, same gradients for the same
    global batch.

    `inputs="global"`: every rank passes the same global batch; "local": each rank its own part of it (example_inputs
    too). Outputs are plain tensors, gathered when something reads them: of the whole batch, or with "local" of the
    samples that the rank passed, whose loss counts as that of one part of the batch, as under DDP. With
    `outputs="sharded"` they are DTensors of the whole batch. `pad`: for batches that each rank pads to its own longest
    sample, by the name of an input the value that it is padded with, or (value, "left"): {"input_ids": 0, "labels":
    -100, "attention_mask": 0}. Ranks then agree on a length in every call, and outputs have the rank's own
    (runtime/lengths.py). `plan`: a Plan or the path of one, instead of planning, whose precision "auto" then means.
    `weights`: a Hugging Face safetensors folder from which each rank reads its shards; the model may be on the meta
    device. `baselines=True` sets the experts' strategies beside the plan, which takes as long as the search itself;
    else they are looked at only where the plan may be more than 0.2% from the best. `execution`: "eager" or "compiled",
    by torch.compile; None: as `plan` says, else compiled on GPUs (op by op, with one warning, if that fails, or if
    values wait on the host). Other arguments as in `autopar.plan`. The source model's parameters are taken over; where
    ranks built it with different values, rank 0's count (runtime/same_values.py). Before every `check_every`-th call
    that trains, ranks compare their parameters and batches, and look for NaN (runtime/equal_ranks.py); None: never.
    Without example_inputs the model is compiled at its first call.

    With `micro_batches=K`, or a plan made with it, a call takes the whole batch, cuts it into K and runs them one after
    the other. It computes the gradients at once, and `loss.backward()` hands them out: those of the whole batch. A loop
    that accumulates by itself leaves `micro_batches` out and calls all but its last backward inside of
    `model.no_sync()`.

    An axis named pp makes stages of the model, on a rank or several each, through which micro-batches (None: as many as
    the planner finds best) run by `schedule`: a name of autopar/schedule/catalogue.py, a Schedule, or "auto", with
    `stages_per_rank` and `sequence_chunks` of rows (None: as many as are best). The loss is known on every rank; other
    outputs are known (`outputs="stage"`) where their stage is, None elsewhere, or ("everywhere") on all ranks. Each
    rank has the parameters of its stages. With inputs="local" the ranks along pp pass the same part, as those along tp
    do. Raises subclasses of AutoparError, the same one on every rank."""
    if inputs not in ("global", "local"):
        raise InputError(f"inputs is {inputs!r}", fix='use "global" or "local"')
    if pad and inputs != "local":
        raise InputError("pad is for ranks that pass batches of their own", fix='pass inputs="local", or leave it out')
    if outputs not in ("stage", "everywhere", "sharded"):
        raise InputError(f"outputs is {outputs!r}", fix='use "stage", "everywhere" or "sharded"')
    adaptations, added = order.checked(adapt), pass_manager.check_added(passes, PASSES)
    reduce_type(reduce_dtype)
    state_type(state_dtype)
    if check_every is not None and (type(check_every) is not int or check_every < 1):
        raise InputError(f"check_every is {check_every!r}", fix="a number of calls of 1 or more, or None for no check")
    if not hasattr(mesh, "get_group"):
        raise MeshError(
            f"compile needs a DeviceMesh, got {type(mesh).__name__}",
            fix='torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))',
        )
    if inputs == "local":
        check_local(Mesh.of(mesh))
    if precision != AUTO or plan is None:
        precision = precision_on(mesh, hardware, precision, model)
    arguments = dict(
        inputs=inputs,
        outputs=outputs,
        plan=plan,
        hardware=hardware,
        memory=memory,
        optimizer=optimizer,
        precision=precision,
        reduce_dtype=reduce_dtype,
        state_dtype=state_dtype,
        execution=execution,
        expert_load=expert_load,
        expert_capacity=expert_capacity,
        hot_experts=hot_experts,
        strategy=strategy,
        pin=pin,
        loss_fn=loss_fn,
        strict=strict,
        baselines=baselines,
        weights=weights,
        adapt=adaptations,
        passes=added,
        micro_batches=micro_batches,
        offload=offload,
        tile=tile,
        loops=loops,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        sequence_chunks=sequence_chunks,
        pad=pad,
        check_every=check_every,
    )
    if micro_batches not in (None, AUTO):
        accumulation.check(micro_batches)
    if isinstance(schedule, Schedule):  # every rank has to know it by its name
        arguments["schedule"] = canonical(schedule)

    def compile_for(example):
        return _compile(model, mesh, example, **arguments)

    if example_inputs is None:
        return cast(ParallelModule, CompiledAtFirstCall(model, compile_for))  # which it becomes
    return compile_for(example_inputs)


@paused_collector()
def _compile(
    model, device_mesh, example, *, inputs, outputs, plan, loss_fn, weights, adapt, passes, pad, check_every, **options
):
    process_groups.check_world(Mesh.of(device_mesh), device_mesh)
    last_words.tell()
    watch.start()
    if device_mesh.device_type == "cpu":
        keep_freed_pages()
    numbers, cores = watch.machines()
    if any(numbers) or cores < 1.0:
        options["hardware"] = agree.from_rank_zero(
            lambda: fitted_to_machines(hardware_of(device_mesh, options["hardware"]), numbers, cores)
        )
    if options["precision"] == AUTO:
        given = agree.from_rank_zero(lambda: (plan if isinstance(plan, Plan) else Plan.load(plan)).precision)
        options["precision"] = given

    def opened() -> Weights | None:
        check_source(model, weights is not None)
        return Weights(model, weights) if weights is not None else None

    values = agree.everywhere(opened)
    share_values(model, device_mesh.device_type, shapes_of(model) if values is not None else ())
    seed = agree.from_rank_zero(torch.initial_seed)
    execution = options["execution"]
    options["execution"] = execution_on(device_type_of(device_mesh), execution, options["offload"])
    asked = options | {"loss_fn": loss_fn, "passes": passes}
    adapt, fp8 = fp8_choice.agreed(search, model, device_mesh, example, inputs, plan, adapt, asked)
    attachment = agree.everywhere(lambda: order.attach(model, adapt, "cpu", seed, weights is not None))
    try:
        compiler = CallCompiler(model, device_mesh, inputs, plan, loss_fn, options, adapt, passes, fp8)
        module = ParallelModule(
            model, compiler, example, inputs, device_mesh, values, attachment, outputs, pad, check_every
        )
        optimizers.follow(module)
        if (execution or module.plan.execution) == COMPILED:
            module.compile_graphs(falls_back=execution is None)
        return module
    except BaseException:
        with contextlib.suppress(MovedParameterError):  # what was taken over cannot be given back
            attachment.undo()
        raise
    finally:
        if values is not None:
            values.close()
