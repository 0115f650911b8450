"""A simulated step against the unsharded model: what `autopar verify` and many tests stand on."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, fx, nn

from .._torch import tree_map
from ..errors import AutoparError, InputError
from ..frontend.device import move
from ..frontend.export import Captured
from ..frontend.fake_parameters import buffers_of
from ..ir.graph import is_tensor, output_node, tensor_arguments, values_of
from ..ir.layout import Layout, local_part
from ..plans.plan import Plan
from .collectives import Simulator, assemble
from .oracle import (
    OneDevice,
    eager_step,
    global_values,
    group_errors,
    interpret,
    norm,
    one_device_step,
    relative_error,
    upcast_capture,
    upcast_value,
    worst,
    written_parameters,
)
from .report_text import verify_text
from .step import plan_and_capture, simulate_step
from .tolerances import CAPTURED, FLOOR, ROUNDING_FACTOR, TOLERANCE

NARROW = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
UNKNOWN = "the first node that differs is looked for without stages and micro-batches only"
WIDE = {"fp32": "fp64", "bf16": "fp32", "fp16": "fp32"}


@dataclass(frozen=True)
class Divergence:
    """A node of which the ranks together hold another value than the unsharded graph computes."""

    node: str
    error: float
    layout: str
    module: str
    source: str


@dataclass(frozen=True)
class VerifyReport:
    """A simulated step against the unsharded model in the same precision. `loss_error` is relative (of all outputs if
    there is no loss); `gradient_errors` has the largest of each group of parameters ("h.*.attn.c_attn.weight") and
    inputs ("input x"), `buffer_errors` that of buffers and of parameters and inputs that the forward writes to; bytes
    are what a rank sends in a step, under a pipeline what one rank of every stage sends inside of it. `sends`: between
    stages, how many values, forward and backward. `diverging`: where the ranks differ first, or why that is not known.

    Rounding may hide a mistake or look like one: mixed precision rounds by more than most mistakes are large, and what
    cancels out is nothing but rounding. So such a step is run once more in the next wider type, where only a mistake
    can be seen (`wide`; in fp32 only if the step misses the tolerance), and in its own precision it may be as far from
    one device as that is from the wider type (`rounding`, by the names of the errors and "loss"), times
    `ROUNDING_FACTOR`. Lest a graph that is not the model's pass for rounding, one device's is compared with the model
    in the wider type as well (`capture_errors`, where the model runs in it and draws no random numbers)."""

    plan: Plan
    precision: str
    loss: float | None
    loss_error: float
    gradient_errors: dict[str, float]
    buffer_errors: dict[str, float]
    predicted_bytes: float
    sent_bytes: tuple[float, ...]
    collectives: Counter
    rounding: dict[str, float] = field(default_factory=dict)
    capture_errors: dict[str, float] = field(default_factory=dict)
    wide: VerifyReport | None = None
    diverging: Divergence | str | None = None
    sends: Counter = field(default_factory=Counter)
    passes: tuple[str, ...] = ()

    @property
    def errors(self) -> dict[str, float]:
        """Return the relative errors by name: "loss", then those of gradients and of new values."""
        return {"loss": self.loss_error, **self.gradient_errors, **self.buffer_errors}

    def tolerance(self, name: str) -> float:
        """Return how large one of `errors` may be."""
        least = TOLERANCE[self.precision]
        return max(least, ROUNDING_FACTOR * self.rounding[name]) if name in self.rounding else least

    @property
    def match(self) -> bool:
        """Return whether all errors are tolerated, those of the captured graph and in the wider type included."""
        mine = all(error <= self.tolerance(name) for name, error in self.errors.items())  # a NaN is no match
        mine = mine and all(error <= CAPTURED for error in self.capture_errors.values())
        return mine and (self.wide is None or self.wide.match)

    def __str__(self) -> str:
        return verify_text(self)


def verify(model: nn.Module, mesh: object, example_inputs, **options) -> VerifyReport:
    """Plan a model on the CPU for a mesh, simulate one step of all ranks in this process and compare its loss, its
    gradients and new values of its buffers with the model's own, which is left as it is; `print` the result, or read
    its `match`. With `device="cuda"` all ranks run on one GPU. Other options are those of `autopar.plan`. Raises
    subclasses of AutoparError."""
    return verify_model(model, example_inputs, mesh, **options)


def verify_model(
    model: nn.Module,
    example_inputs,
    mesh: object,
    *,
    loss_fn: Callable | None = None,
    hardware: object = "cpu-gloo",
    device: str | torch.device = "cpu",
    report: Callable[[str], None] = lambda text: None,
    **options,
) -> VerifyReport:
    """Plan a model, simulate one step of all ranks, and compare it with the model itself, which has real weights and is
    left as it is. Without a loss the gradients are those of the sum of all outputs. On a GPU, `device`, all ranks run
    there, with its kernels. `options` (strategy, pin, ...) are those of `autopar.plan`. Raises subclasses of
    AutoparError."""
    if options.get("adapt"):
        raise InputError(
            "verify compares a model with itself, and what adapt= adds is not in it",
            fix="leave out adapt=, or compare the losses of a compiled model with those of PEFT",
        )
    plan, captured = plan_and_capture(
        model, mesh, example_inputs, loss_fn=loss_fn, hardware=hardware, report=report, baselines=False, **options
    )
    if (on := torch.device(device)).type != "cpu":
        move(captured, on)
        captured.graph_module.to(on)
        model, example_inputs = copy.deepcopy(model).to(on), tree_map(partial(_on, on), example_inputs)
    return verify_plan(captured, plan, model, example_inputs, loss_fn, report)


def _on(device: torch.device, value: object) -> object:
    return value.to(device) if isinstance(value, Tensor) else value


def verify_plan(
    captured: Captured,
    plan: Plan,
    model: nn.Module,
    example_inputs,
    loss_fn: Callable | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> VerifyReport:
    """Verify as `verify_model` does a plan that is there already, of the model's call as it was captured."""
    values = global_values(captured, model, example_inputs)
    if missing := [name for name, value in values.items() if value.is_meta]:
        raise InputError(f"{missing[0]} is on the meta device and has no values", fix="verify with real inputs")
    buffers = {name: buffer.detach() for name, buffer in buffers_of(model).items()} | written_parameters(
        captured, model
    )
    report("running the unsharded model")
    if has_random(captured):
        reference = one_device_step(captured, values)
    else:
        reference = eager_step(captured, model, values, loss_fn, plan.precision)
    report("simulating one step")
    precision = _precision_of(captured, plan)
    result, programs = _compared(captured, plan, values, reference, precision, buffers)
    if precision != "fp32" or not result.match:
        report(f"simulating one step in {WIDE[precision]}")
        result = _with_rounding(result, captured, plan, values, reference, buffers, model, loss_fn)
    if result.match or not programs:
        return result
    report("looking for the first node that differs")
    return replace(result, diverging=first_divergence(captured, programs, values, TOLERANCE[precision]))


def has_random(captured: Captured) -> bool:
    """Return whether the model draws random numbers."""
    return any(n.op == "placeholder" and n.meta["role"].kind == "random" for n in captured.graph.nodes)


def _precision_of(captured: Captured, plan: Plan) -> str:
    """Return what the model computes in, by its own autocast too; or what gradients are reduced in, else the plan's
    precision."""
    made = {v.dtype for n in captured.graph.nodes if n.op == "call_function" for v in values_of(n)}
    return next((name for name in ("bf16", "fp16") if NARROW[name] in made), plan.reduce_dtype or plan.precision)


def _with_rounding(
    result: VerifyReport, captured: Captured, plan: Plan, values, reference: OneDevice, buffers, model, loss_fn
) -> VerifyReport:
    """Return the report with what one device loses by rounding, and the step in the wider type."""
    narrow, precision = NARROW[result.precision], WIDE[result.precision]
    wide, values = upcast_capture(captured, narrow), {n: upcast_value(v, narrow) for n, v in values.items()}
    buffers = {n: upcast_value(b, narrow) for n, b in buffers.items()}
    try:
        exact = one_device_step(wide, values)
        exact = exact._replace(buffers=buffers | exact.buffers)
        check, _ = _compared(wide, replace(plan, reduce_dtype=None), values, exact, precision, buffers)
    except (RuntimeError, AutoparError):  # some kernels take one type alone: the report stays as it is
        return result
    loss, gradients, others = _errors(captured, exact, reference, result.precision)
    rounding = {"loss": loss, **gradients, **others}
    is_asked = result.precision == plan.precision  # else it is the model's autocast, which stays on in any type
    seen = _capture_errors(captured, model, values, loss_fn, narrow, exact) if is_asked else {}
    return replace(result, wide=check, rounding=rounding, capture_errors=seen)


def _capture_errors(
    captured: Captured, model: nn.Module, values, loss_fn: Callable | None, narrow: torch.dtype, exact: OneDevice
) -> dict[str, float]:
    """Return how far the graph's step on one device is from the model's own, both in the wider type; empty where the
    model does not run in it, or draws random numbers."""
    if has_random(captured):
        return {}
    try:
        wide = copy.deepcopy(model).to(upcast_value(torch.empty(0, dtype=narrow), narrow).dtype)
        eager = eager_step(captured, wide, values, loss_fn, "fp32")
        loss, gradients, _ = _errors(captured, eager, exact, "fp32")
    except (RuntimeError, AutoparError, TypeError):
        return {}
    return {"loss": loss, **gradients}


def _wire_bytes(plan: Plan) -> float:
    """Return the bytes that a device sends in the forward and the backward."""
    return sum(c.wire_bytes for c in plan.collectives if c.phase != "optimizer")


def _compared(captured: Captured, plan: Plan, values, reference: OneDevice, precision: str, buffers):
    """Return (report, the ranks' programs if a step is one program) of a simulated step. `buffers` of the model have
    the values before it."""
    step = simulate_step(captured, plan, values)
    mine = OneDevice(step.outputs, step.gradients, buffers | step.buffers)
    report = VerifyReport(
        plan,
        precision,
        None if step.loss is None else step.loss.item(),
        *_errors(captured, reference, mine, precision),
        _wire_bytes(plan),
        step.bytes_sent,
        step.collectives,
        sends=step.sends,
        diverging=None if step.programs else UNKNOWN,
        passes=tuple(one.name for one in captured.passes),
    )
    return report, step.programs


def _errors(captured: Captured, reference: OneDevice, mine: OneDevice, precision: str):
    """Return (loss error, gradient errors, buffer errors) of one step against another."""
    loss = captured.returns.loss
    pairs = zip(reference.outputs, mine.outputs) if loss is None else [(reference.outputs[loss], mine.outputs[loss])]
    return (
        worst(*(relative_error(got, whole) for whole, got in pairs)),
        group_errors(reference.gradients, mine.gradients, FLOOR[precision]),
        group_errors(reference.buffers, mine.buffers, FLOOR[precision]),
    )


def first_divergence(
    captured: Captured, programs, values: Mapping[str, Tensor], tolerance: float = TOLERANCE["fp32"]
) -> Divergence | None:
    """Find the first node in graph order whose assembled local values are not the global value. Local nodes keep the
    names of the global nodes that they are parts of, so every node of the joint graph that is left after lowering is
    compared."""
    reference = interpret(captured.graph_module, values)
    graphs = [_returning_everything(p.local, reference) for p in programs]
    mesh = programs[0].local.meta["mesh"]
    inputs = [
        [
            local_part(values[n.name], n.meta["layout"], mesh, mesh.coordinate(p.rank))
            for n in p.local.graph.nodes
            if n.op == "placeholder"
        ]
        for p in programs
    ]
    results = Simulator(mesh).run(graphs, inputs)
    position = {node.name: i for i, node in enumerate(output_node(graphs[0].graph).args[0])}
    local = {node.name: node for node in programs[0].local.graph.nodes}
    for node in captured.graph.nodes:
        if node.name not in position:
            continue
        value, layout = reference[node.name], local[node.name].meta["layout"]
        mine = assemble([r[position[node.name]] for r in results], layout, mesh, value.shape)
        terms = max((norm(reference[a.name]) for a in tensor_arguments(node)), default=0.0)
        error = relative_error(mine, value, FLOOR["fp32"] * terms)  # what cancels out is no more exact than its terms
        if not error <= tolerance:
            return Divergence(node.name, error, str(layout), node.meta.get("module", ""), node.meta.get("source", ""))
    return None


def _returning_everything(local: fx.GraphModule, names: Mapping[str, object]) -> fx.GraphModule:
    """Return a copy of one rank's graph that returns every value which is a part of one of the global nodes `names`."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(local.graph, copies)
    wanted = [
        n for n in local.graph.nodes if n.name in names and is_tensor(n) and isinstance(n.meta.get("layout"), Layout)
    ]
    for node in wanted:
        copies[node].name = node.name
    graph.output(tuple(copies[n] for n in wanted))
    return fx.GraphModule(local, graph)
