"""`autopar.compile` and `autopar.plan`: the compiler's steps in the order they run.

    trace (the passes of autopar/compiler.py) -> plan -> lower (more of them) -> run

Everything up to the plan is the same for both; `plan` stops there and needs no process group, no device and no weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ..adapt import order
from ..adapt.lora import LoRA
from ..adapt.order import Adaptation
from ..codegen import pass_manager
from ..compiler import PASSES, trace, trace_to_plan
from ..errors import InputError, MemoryInfeasibleError, MeshError, MovedParameterError, StrategyError
from ..frontend import export
from ..frontend.constants import text_of
from ..frontend.export import Captured
from ..frontend.fake_parameters import Form, forms_of
from ..frontend.precision import compute_dtype
from ..hardware.profile import Hardware
from ..ir.compiler_pass import Pass
from ..ir.graph import fingerprint
from ..ir.layout import Layout
from ..ir.mesh import Mesh
from ..planner import accumulation
from ..planner.batch import of_samples, samples_of
from ..planner.explain import Explanation, explain_plan
from ..planner.explain_pipeline import PipelineExplanation, explain_pipeline
from ..planner.options import options_of
from ..planner.pipeline import mesh_search
from ..planner.pipeline.plan import PipelinePlanned, plan_pipeline
from ..planner.pipeline.replan import plan_same_stages, with_owners
from ..planner.plan import Planned, PlanOptions, make_plan
from ..planner.plan import search as search_plan
from ..planner.problem.hf_tp_plan import styles_of
from ..planner.remedies import Request, with_fixes
from ..plans.axes import check_axes
from ..plans.pipeline import axis_of, inside
from ..plans.plan import Plan
from ..processes import agree, process_groups, watch
from ..runtime import optimizers
from ..runtime.captures import Traced
from ..runtime.first_call import CompiledAtFirstCall
from ..runtime.inputs import global_example
from ..runtime.module import ParallelModule
from ..runtime.parameters import check_model, check_source
from ..runtime.same_values import share_values
from ..schedule import Schedule
from ..schedule.catalogue import canonical
from ..storage.weights import Weights, shapes_of


def plan(
    model: nn.Module,
    mesh,
    example_inputs,
    *,
    hardware: str | Path | Hardware | None = None,
    memory: float | str | None = None,
    optimizer: str = "adamw",
    precision: str = "fp32",
    strategy: str | None = None,
    pin: Mapping[str, str] | None = None,
    forbid: Mapping[str, str | Sequence[str]] | None = None,
    adapt: Sequence[Adaptation] = (),
    passes: Sequence[Pass] = (),
    loss_fn: Callable | None = None,
    strict: bool = False,
    baselines: bool = True,
    micro_batches: int | None = None,
    schedule: str | Schedule = "auto",
    stages_per_rank: int | None = None,
    recompute: str = "auto",
    offload: str = "none",
    fixes: bool = True,
    solver: str = "dual",
    name: str | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Plan a model for a mesh without running anything: `model` and `example_inputs` may be on the meta device.

    `mesh`: text ("dp=8,tp=8"), autopar.Mesh, a DeviceMesh, or a number of devices: then meshes are tried. `hardware`: a
    profile's name, a device's own name, a TOML file (default h100, or the DeviceMesh's own device). `memory`: bytes or
    text such as "40GiB" (default the hardware's). `pin`: glob of a parameter's name -> layout, "tp:S(0)" or "R";
    `forbid`: glob -> a layout that it may not take, or several. `strategy`: a recipe, or two for two axes,
    "megatron_sp+zero1". `precision`: "fp32", the model in its own types, or "bf16", mixed precision as
    autopar/frontend/precision.py says. `adapt`: LoRA, QLoRA, FakeQuant (autopar/adapt), planned with the rest.
    `passes`: autopar.Pass values of your own, each run after the compiler's pass that it names (docs/extending.md).
    `baselines=False` leaves the expert strategies out. With `micro_batches` the step is so many calls, `example_inputs`
    one of them, and gradients are added up; the plan says whether they are reduced once a step or in every call. On a
    mesh with an axis pp `example_inputs` are the whole batch, cut into that many (None: as many as are best) for a
    `schedule`: a name of autopar/schedule/catalogue.py, a Schedule, or "auto", the best, with so many stages a rank. For
    a number of devices the plan may have stages or not; it has some if a schedule is asked for. `recompute`: "auto", or
    "none", "selective" or "full" for all blocks. `offload`: whether parameters that train may live on the host, with
    their gradients and optimizer state: "none", "auto" (where memory is short), "optimizer" (all of them). `solver`:
    "dual", the search, or "ilp", which for a small model on a mesh without stages gives the full integer program to
    OR-tools, as a cross-check.
    Raises subclasses of AutoparError; MemoryInfeasibleError with `fixes`, what would fit instead, unless `fixes=False`
    leaves that out: it takes several searches."""
    return search(
        model, mesh, example_inputs, hardware=hardware, memory=memory, optimizer=optimizer, precision=precision,
        strategy=strategy, pin=pin, forbid=forbid, adapt=adapt, passes=passes, loss_fn=loss_fn, strict=strict,
        baselines=baselines, micro_batches=micro_batches, schedule=schedule, stages_per_rank=stages_per_rank,
        recompute=recompute, offload=offload, fixes=fixes, solver=solver, name=name, report=report,
    ).plan  # fmt: skip


def search(
    model: nn.Module, mesh, example_inputs, *, hardware=None, memory=None, optimizer="adamw", precision="fp32",
    strategy=None, pin=None, forbid=None, adapt=(), passes=(), loss_fn=None, strict=False, baselines=True,
    micro_batches=None, schedule="auto", stages_per_rank=None, recompute="auto", refuses=True, offload="none",
    fixes=True, solver="dual", name=None, report=lambda text: None,
) -> Planned | PipelinePlanned:  # fmt: skip
    """Plan as `plan` does, and return all that the search knows beside the plan. Without `refuses` what does not fit is
    planned all the same. `stages_per_rank`: of a pipeline (None: as many as are best)."""
    devices = mesh if isinstance(mesh, int) and not isinstance(mesh, bool) else None
    checked = Mesh.of(mesh) if devices is None else Mesh(("dp",), (devices,))
    check_model(model)
    has_stages = devices is None and axis_of(checked) is not None
    passes_ = 1 if has_stages or micro_batches is None else micro_batches
    options = options_of(
        mesh, hardware, memory, optimizer, precision, strategy, pin, strict, {}, baselines, forbid, passes_
    )
    options = replace(options, recompute=recompute, refuses=refuses, offload=offload, styles=styles_of(model),
                      search=replace(options.search, solver=solver))  # fmt: skip
    if devices is None:
        options.check(inside(checked) if has_stages else checked)
    adaptations, added = order.checked(adapt), pass_manager.check_added(passes, PASSES)
    name = name or type(model).__name__

    def traced(example, more: Sequence[Adaptation] = ()) -> Captured:
        report("tracing the model")
        with order.attached(model, (*adaptations, *more)):
            return trace_to_plan(model, example, loss_fn, forms_of(model), precision, (*adaptations, *more), added)

    captured = traced(example_inputs)
    try:
        if devices is not None:
            return mesh_search.search(captured, devices, options, name, schedule, stages_per_rank, report)
        if has_stages:
            planned = plan_pipeline(captured, checked, options, name, schedule=schedule, micro_batches=micro_batches,
                                    stages_per_rank=stages_per_rank, report=report)  # fmt: skip
        else:
            planned = search_plan(captured, checked, options, name, report)
        if strict:
            check_axes(planned.plan, strict)
        return planned
    except MemoryInfeasibleError as error:
        if not fixes or has_stages:
            raise
        raise _with_fixes(error, captured, options, adaptations, traced, report) from None


def _with_fixes(error: MemoryInfeasibleError, captured: Captured, options: PlanOptions, adapt: Sequence[Adaptation],
                traced: Callable[..., Captured], report=lambda text: None) -> MemoryInfeasibleError:  # fmt: skip
    """Return the refusal of a captured graph with what would fit instead. `traced(example, more)` traces another call
    of the model, or the same with more adaptations."""

    def retrace(samples: int, more: Sequence[Adaptation]) -> Captured:
        return traced(of_samples(captured.signature, samples), more)

    request = Request(captured, error.mesh, options, samples_of(captured.signature), bool(adapt), retrace)
    return with_fixes(error, request, report)


def explain(model: nn.Module | Planned | PipelinePlanned, pattern: str | None = None, mesh=None, example_inputs=None, *,
            alternatives: int = 6, **planning) -> Explanation | PipelineExplanation:  # fmt: skip
    """Explain why the plan of a model chose what it chose for the parameters, ops and modules whose names the glob
    `pattern` matches, and what up to `alternatives` others would cost each; `print` the result. `mesh`,
    `example_inputs` and `planning` as in `autopar.plan`; a finished search (`autopar.api.entry.search`) needs none of
    them. On a mesh with an axis pp the result also says why the pipeline is as it is, or says that alone without a
    pattern. Raises subclasses of AutoparError."""
    found = (Planned, PipelinePlanned)
    planned = (
        model if isinstance(model, found) else search(model, mesh, example_inputs, **{"baselines": False} | planning)
    )
    if isinstance(planned, PipelinePlanned):
        return explain_pipeline(planned, pattern, alternatives)
    if pattern is None:
        raise StrategyError(
            "without a pipeline there is nothing to explain but what a pattern names", fix='such as "*.weight"'
        )
    return explain_plan(planned, pattern, alternatives)


def compile(
    model: nn.Module,
    mesh,
    example_inputs=None,
    *,
    inputs: str = "global",
    outputs: str = "stage",
    plan: Plan | str | Path | None = None,
    hardware: str | Path | Hardware | None = None,
    memory: float | str | None = None,
    optimizer: str = "adamw",
    precision: str = "fp32",
    strategy: str | None = None,
    pin: Mapping[str, str] | None = None,
    adapt: Sequence[Adaptation] = (),
    passes: Sequence[Pass] = (),
    loss_fn: Callable | None = None,
    weights=None,
    strict: bool = False,
    micro_batches: int | None = None,
    offload: str = "none",
    schedule: str | Schedule = "auto",
    stages_per_rank: int | None = None,
) -> nn.Module:
    """Return a drop-in module that runs `model` on all devices of a DeviceMesh: same call, same gradients for the same
    global batch.

    `inputs="global"`: every rank passes the same global batch; "local": each rank its own part of it (example_inputs
    too). `plan`: a Plan or the path of one, instead of planning. `weights`: a Hugging Face safetensors folder from
    which each rank reads its shards; the model may be on the meta device. Other arguments as in `autopar.plan`. The
    source model's parameters are taken over; where ranks built it with different values, rank 0's count
    (runtime/same_values.py). Without example_inputs the model is compiled at its first call.

    With `micro_batches=K`, or a plan made with it, `example_inputs` are one micro-batch and the loop calls the model K
    times a step, each loss divided by K; if `model.plan.reduces_once`, all but the last backward run inside of
    `model.no_sync()`. Any other number of calls gives right gradients too: K only decides what is fastest.

    An axis named pp makes stages of the model, on a rank or several each. A call then takes the whole batch, cuts it
    into `micro_batches` (None: as many as the planner finds best) and runs them through the stages by `schedule`: a
    name of autopar/schedule/catalogue.py, a Schedule, or "auto", with `stages_per_rank` (None: as many as are best). It
    computes the gradients at once, `loss.backward()` hands them out. The loss is known on every rank; other outputs are
    known (`outputs="stage"`) where their stage is, None elsewhere, or ("everywhere") on all ranks, of which each gets its
    shard of them. Each rank has the parameters of its stages. With inputs="local" the ranks along pp pass the same
    part, as those along tp do. Raises subclasses of AutoparError, the same one on every rank."""
    if inputs not in ("global", "local"):
        raise InputError(f"inputs is {inputs!r}", fix='use "global" or "local"')
    if outputs not in ("stage", "everywhere"):
        raise InputError(f"outputs is {outputs!r}", fix='use "stage" or "everywhere"')
    adaptations, added = order.checked(adapt), pass_manager.check_added(passes, PASSES)
    compute_dtype(precision)
    if not hasattr(mesh, "get_group"):
        raise MeshError(
            f"compile needs a DeviceMesh, got {type(mesh).__name__}",
            fix='torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))',
        )
    arguments = dict(
        inputs=inputs, outputs=outputs, plan=plan, hardware=hardware, memory=memory, optimizer=optimizer,
        precision=precision, strategy=strategy, pin=pin, loss_fn=loss_fn, strict=strict, weights=weights,
        adapt=adaptations, passes=added, micro_batches=micro_batches, offload=offload, schedule=schedule,
        stages_per_rank=stages_per_rank,
    )  # fmt: skip
    accumulation.check(1 if micro_batches is None else micro_batches)
    if isinstance(schedule, Schedule):  # every rank has to know it by its name
        arguments["schedule"] = canonical(schedule)

    def compile_for(example):
        return _compile(model, mesh, example, **arguments)

    return CompiledAtFirstCall(model, compile_for) if example_inputs is None else compile_for(example_inputs)


def _compile(model, device_mesh, example_inputs, *, inputs, outputs, plan, loss_fn, weights, adapt, passes, **options):
    process_groups.check_world(Mesh.of(device_mesh), device_mesh)
    watch.start()

    def opened() -> Weights | None:
        check_source(model, weights is not None)
        return Weights(model, weights) if weights is not None else None

    values = agree.everywhere(opened)
    share_values(model, device_mesh.device_type, shapes_of(model) if values is not None else ())
    seed = agree.from_rank_zero(torch.initial_seed)
    attachment = agree.everywhere(lambda: order.attach(model, adapt, "cpu", seed, weights is not None))
    try:
        compiler = _Compiler(model, device_mesh, inputs, plan, loss_fn, options, adapt, passes)
        module = ParallelModule(
            model, compiler, example_inputs, inputs, device_mesh, values, attachment, outputs == "everywhere"
        )
        optimizers.follow(module)
        return module
    except BaseException:
        with contextlib.suppress(MovedParameterError):  # what was taken over cannot be given back
            attachment.undo()
        raise
    finally:
        if values is not None:
            values.close()


class _Compiler:
    """Traces and plans calls of one model, on all ranks together (see runtime/captures.py)."""

    def __init__(self, model: nn.Module, device_mesh, inputs: str, given: Plan | str | Path | None, loss_fn,
                 options: dict, adapt: Sequence[Adaptation] = (), passes: Sequence[Pass] = ()):  # fmt: skip
        self.adapt, self.passes = adapt, passes
        self.model, self.device_mesh, self.mesh = model, device_mesh, Mesh.of(device_mesh)
        self.axis = axis_of(self.mesh)
        self.inputs, self.given, self.loss_fn, self.options = inputs, given, loss_fn, options
        self.forms = forms_of(model)  # of the parameters before they are taken over

    def trace(
        self, example_inputs, gradients: bool, adapters: bool = True, trains: Mapping[str, bool] | None = None
    ) -> Traced:
        """Trace a call of the model. Without `gradients` no parameter trains; else `trains` says which do, by name,
        where that has changed. Without `adapters` LoRA's are left out."""
        forms = self.forms.training(trains or {}) if gradients else self.forms.without_gradients()
        whole = lambda: global_example(example_inputs, self.inputs, self.mesh)  # noqa: E731
        return self._agreed(whole, forms, adapters, True, gradients or torch.is_grad_enabled())

    def trace_again(self, traced: Traced, adapters: bool = True, trains: Mapping[str, bool] | None = None) -> Traced:
        """Trace a capture's call again, for gradients of all differentiable outputs rather than of the loss alone."""
        signature = traced.captured.signature
        form = zip(signature.shapes, signature.dtypes, signature.differentiated)
        whole = [torch.empty(s, dtype=d, device="meta", requires_grad=g) for s, d, g in form if s is not None]
        forms = self.forms.training(trains or {})
        return self._agreed(lambda: (signature.rebuild(whole), traced.fixed), forms, adapters, False)

    def _agreed(self, example: Callable[[], tuple], forms: Mapping[str, Form], adapters: bool, loss_alone: bool,
                with_gradients: bool = True) -> Traced:  # fmt: skip
        """Trace the same graph on all ranks; `example` gives the call on global shapes, and the layouts that the user's
        tensors fix."""
        adapt = [a for a in self.adapt if adapters or not isinstance(a, LoRA)]

        def traced():
            whole, given = example()
            options = self.options["precision"], adapt, loss_alone, with_gradients
            return trace(self.model, whole, self.loss_fn, forms, *options, self.passes), given

        captured, given = agree.everywhere(traced)
        signature = captured.signature
        shapes = [f"{n} {tuple(s)}" if s is not None else f"{n}={text_of(c)}" for n, s, c in
                  zip(signature.names, signature.shapes, signature.constants)]  # fmt: skip
        found = fingerprint(captured.graph)
        agree.check_captures(shapes, found)
        return Traced(captured, given, found)

    def _traced_to_plan(self, example, more: Sequence[Adaptation]) -> Captured:
        adapt = (*self.adapt, *more)
        with order.attached(self.model, more):
            return trace_to_plan(
                self.model, example, self.loss_fn, forms_of(self.model), self.options["precision"], adapt, self.passes
            )

    def plan(self, traced: Traced, first: Plan | None = None, layouts: Mapping[str, Layout] | None = None) -> Plan:
        """Return the plan of a traced call, made or loaded on rank 0 and the same on all ranks. For a later call
        `first` is the plan of the first one, and parameters keep their `layouts`, by name."""
        graph = traced.captured.graph
        leaves = {n.meta["role"]: n.name for n in graph.nodes if n.op == "placeholder"}
        # a pipeline has the whole batch on every rank, whatever is passed
        inputs = traced.fixed if self.axis is None else {}
        known = {"input": inputs, "parameter": layouts or {}}
        fixed = {name: known[r.kind][r.name] for r, name in leaves.items() if r.name in known.get(r.kind, ())}

        def make() -> dict:
            options = dict(self.options)
            if first is not None:  # gradients and optimizer state stay in memory when a graph has no backward
                trains = any(role.kind == "parameter" and role.trainable for role in leaves)
                held = 0.0 if trains else first.memory.get("gradients", 0.0) + first.memory.get("optimizer", 0.0)
                here = first.sharding.on_host & set(leaves.values())  # parameters stay where they are
                options = options | dict(pin=None, memory=first.memory_limit_bytes - held, offload="none", on_host=here)
                if self.given is not None:
                    options["strategy"] = first.strategy
            elif self.given is not None:
                return (self.given if isinstance(self.given, Plan) else Plan.load(self.given)).to_json()
            compares = first is None and options["strategy"] is None  # a recipe was asked for: nothing to choose from
            staged = {name: options.pop(name) for name in ("schedule", "stages_per_rank", "micro_batches")}
            micro_batches = staged["micro_batches"]
            count = 1 if self.axis is not None or micro_batches is None else micro_batches
            options = options_of(self.device_mesh, **options, fixed=fixed, baselines=compares, micro_batches=count)
            options = replace(options, styles=styles_of(self.model))
            name = type(self.model).__name__
            if self.axis is not None and first is not None:
                return plan_same_stages(traced.captured, first, options, name).to_json()
            if self.axis is not None:
                options = replace(options, baselines=False)  # told beside a plan, which nobody may look at here
                planned = plan_pipeline(traced.captured, self.mesh, options, name, **staged)
                return with_owners(traced.captured, planned.plan).to_json()
            try:
                return make_plan(traced.captured, self.mesh, options, name).to_json()
            except MemoryInfeasibleError as error:
                if first is not None:
                    raise
                raise _with_fixes(error, traced.captured, options, self.adapt, self._traced_to_plan) from None

        def checked() -> dict:
            made = make()
            if self.options["strict"] and first is None and self.given is None:
                check_axes(Plan.from_json(made), True)
            return made

        agreed = Plan.from_json(agree.from_rank_zero(checked))
        agreed.check_fits(graph, self.mesh)
        pass_manager.planned(agreed)
        export.move(traced.captured, torch.device(self.device_mesh.device_type))
        return agreed
