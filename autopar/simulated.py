"""Whole training steps in one process, on real values: what `autopar verify` and many tests stand on.

`simulate_step` lowers a plan for every rank, runs forward and backward in the simulator and puts outputs and gradients
together again. `verify_model` compares such a step with the unsharded model in plain eager torch, or, if the model draws random
numbers, with the unsharded joint graph on the same random state (torch's own generator draws others).
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx, nn

from . import api, debug
from .calls import CallSignature, Returns, split_example
from .capture import Captured, FlatCall
from .errors import InputError
from .graph import is_tensor, output_node, tensor_arguments
from .layout import Layout, local_part
from .lower import RankProgram, lower
from .plan import Plan
from .precision import compute_dtype
from .runtime.random_state import RandomState
from .simulate import Simulator, assemble, local_inputs
from .simulate import simulate_step as run_parts
from .verify import check_ranks

TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2}  # relative: sums in another order differ by some roundings
# errors are taken relative to at least this much of the largest norm: a gradient may be zero but for rounding
FLOOR = {"fp32": 1e-4, "bf16": 1e-2}


@dataclass(frozen=True)
class StepResult:
    """One simulated step. `outputs`, `gradients` (by parameter name) and `buffers` (new values by name) are global tensors;
    `bytes_sent` has one number a rank; `collectives` counts what rank 0 calls as (kind, axes)."""

    loss: Tensor | None
    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    bytes_sent: tuple[float, ...]
    collectives: Counter
    programs: tuple[RankProgram, ...]


def plan_and_capture(model: nn.Module, mesh: object, example_inputs, **options) -> tuple[Plan, Captured]:
    """`autopar.plan`, with the capture that the plan was made for."""
    results = {}
    with debug.observe(lambda stage: results.update({stage.name: stage.result})):
        plan = api.plan(model, mesh, example_inputs, **options)
    return plan, results.get("unroll") or results["differentiate"]


def simulate_step(captured: Captured, plan: Plan, values: Mapping[str, Tensor]) -> StepResult:
    """One forward and backward of all ranks. `values`: global tensors by placeholder name, tangents included (see
    `global_values`). Raises VerifyError if the ranks' programs do not fit together."""
    mesh = plan.mesh
    programs = tuple(lower(captured, plan, rank) for rank in range(mesh.devices))
    check_ranks([p.local for p in programs])
    inputs, tangents = zip(*(local_inputs(p.local, values) for p in programs))
    simulator = Simulator(mesh)
    outputs, gradients = run_parts(simulator, [p.parts for p in programs], inputs, tangents)
    ranks = [(*o, *g) for o, g in zip(outputs, gradients)]

    output = output_node(captured.graph)
    roles = output.meta["roles"]
    is_forward = [r.kind in ("output", "mutation") for r in roles]
    order = sorted(range(len(roles)), key=lambda i: not is_forward[i])  # as the parts return them
    whole: dict[str, dict[str, Tensor]] = {"output": {}, "gradient": {}, "input_gradient": {}, "mutation": {}}
    for position, i in enumerate(order):
        blocks, shape = [values[position] for values in ranks], output.args[0][i].meta["val"].shape
        whole[roles[i].kind][roles[i].name] = assemble(blocks, plan.sharding.outputs[i], mesh, shape)
    returned = tuple(whole["output"][name] for name in sorted(whole["output"], key=int))
    loss = None if captured.returns.loss is None else returned[captured.returns.loss]
    calls = Counter((debug.kind_of(op), axes) for op, axes, group in simulator.calls if 0 in group)
    return StepResult(
        loss, returned, whole["gradient"], whole["mutation"], tuple(simulator.bytes_sent), calls, programs
    )  # fmt: skip


def global_values(captured: Captured, model: nn.Module, example_inputs) -> dict[str, Tensor]:
    """Copies of a model's parameters and buffers and of a call's tensors, by placeholder name; tangents are ones, and the random
    state is the first that a run from torch's present seed takes."""
    args, kwargs = split_example(example_inputs)
    inputs = dict(zip(captured.signature.tensor_names, CallSignature.of(args, kwargs)[1], strict=True))
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    values = {}
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            role, like = node.meta["role"], node.meta["val"]
            if role.kind == "tangent":
                values[node.name] = torch.ones(tuple(like.shape), dtype=like.dtype)
            elif role.kind == "random":
                values[node.name] = RandomState(torch.initial_seed()).next()
            else:
                values[node.name] = (inputs if role.kind == "input" else state)[role.name].detach().clone()
    return values


# comparison with the unsharded model ----------------------------------------------------------------------------------


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
    """A simulated step against eager torch. `loss_error` is relative (of all outputs if there is no loss); `gradient_errors`
    has the largest of each group of parameters ("h.*.attn.c_attn.weight"), `buffer_errors` that of buffers with new values;
    bytes are what a rank sends in a step."""

    plan: Plan
    loss: float | None
    loss_error: float
    gradient_errors: dict[str, float]
    buffer_errors: dict[str, float]
    predicted_bytes: float
    sent_bytes: tuple[float, ...]
    collectives: Counter
    diverging: Divergence | None = None

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.plan.precision]

    @property
    def match(self) -> bool:
        errors = (self.loss_error, *self.gradient_errors.values(), *self.buffer_errors.values())
        return all(error <= self.tolerance for error in errors)  # an error that is not a number is no match

    def __str__(self) -> str:
        from .view.verify_text import verify_text

        return verify_text(self)


def verify_model(
    model: nn.Module,
    example_inputs,
    mesh: object,
    *,
    loss_fn: Callable | None = None,
    hardware: object = "cpu-gloo",
    report: Callable[[str], None] = lambda text: None,
    **options,
) -> VerifyReport:
    """Plan a model, simulate one step of all ranks, and compare it with the model itself, which has real weights and is left
    as it is. Without a loss the gradients are those of the sum of all outputs. `options` (strategy, pin, ...) are those of
    `autopar.plan`. Raises subclasses of AutoparError."""
    plan, captured = plan_and_capture(
        model, mesh, example_inputs, loss_fn=loss_fn, hardware=hardware, report=report, baselines=False, **options
    )
    return verify_plan(captured, plan, model, example_inputs, loss_fn, report)


def verify_plan(
    captured: Captured,
    plan: Plan,
    model: nn.Module,
    example_inputs,
    loss_fn: Callable | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> VerifyReport:
    """`verify_model` for a plan that is there already, of the model's call as it was captured."""
    values = global_values(captured, model, example_inputs)
    if missing := [name for name, value in values.items() if value.is_meta]:
        raise InputError(f"{missing[0]} is on the meta device and has no values", fix="verify with real inputs")
    report("simulating one step")
    step = simulate_step(captured, plan, values)
    report("running the unsharded model")
    if any(n.op == "placeholder" and n.meta["role"].kind == "random" for n in captured.graph.nodes):
        outputs, gradients, buffers = one_device_step(captured, values)
    else:
        outputs, gradients, buffers = _eager_step(captured, model, values, loss_fn, plan.precision)
    loss = captured.returns.loss
    compared = zip(outputs, step.outputs) if loss is None else [(outputs[loss], step.loss)]
    kept = {name: buffer.detach() for name, buffer in model.named_buffers()}  # those without a new value keep theirs
    result = VerifyReport(
        plan, None if step.loss is None else step.loss.item(), _worst(*(_error(mine, whole) for whole, mine in compared)),
        _group_errors(gradients, step.gradients, FLOOR[plan.precision]),
        _group_errors(buffers, kept | step.buffers, FLOOR[plan.precision]),
        sum(c.wire_bytes for c in plan.collectives), step.bytes_sent, step.collectives,
    )  # fmt: skip
    if result.match:
        return result
    report("looking for the first node that differs")
    return replace(result, diverging=first_divergence(captured, step.programs, values, TOLERANCE[plan.precision]))


def first_divergence(
    captured: Captured, programs, values: Mapping[str, Tensor], tolerance: float = TOLERANCE["fp32"]
) -> Divergence | None:
    """The first node in graph order whose assembled local values are not the global value. Local nodes keep the names of the
    global nodes that they are parts of, so every node of the joint graph that is left after lowering is compared."""
    reference = _interpret(captured.graph_module, values)
    graphs = [_returning_everything(p.local, reference) for p in programs]
    mesh = programs[0].local.meta["mesh"]
    inputs = [
        [local_part(values[n.name], n.meta["layout"], mesh, mesh.coordinate(p.rank)) for n in p.local.graph.nodes
         if n.op == "placeholder"]
        for p in programs
    ]  # fmt: skip
    results = Simulator(mesh).run(graphs, inputs)
    position = {node.name: i for i, node in enumerate(output_node(graphs[0].graph).args[0])}
    local = {node.name: node for node in programs[0].local.graph.nodes}
    for node in captured.graph.nodes:
        if node.name not in position:
            continue
        value, layout = reference[node.name], local[node.name].meta["layout"]
        mine = assemble([r[position[node.name]] for r in results], layout, mesh, value.shape)
        terms = max((_norm(reference[a.name]) for a in tensor_arguments(node)), default=0.0)
        error = _error(mine, value, FLOOR["fp32"] * terms)  # what cancels out is no more exact than its terms
        if not error <= tolerance:
            return Divergence(
                node.name, error, str(layout), node.meta.get("module", ""), node.meta.get("source", "")
            )  # fmt: skip
    return None


def one_device_step(captured: Captured, values: Mapping[str, Tensor]):
    """(outputs, gradients by parameter name, new buffers by name) of the unsharded joint graph."""
    known, output = _interpret(captured.graph_module, values), output_node(captured.graph)
    found: dict[str, dict[str, Tensor]] = {"output": {}, "gradient": {}, "mutation": {}}
    for node, role in zip(output.args[0], output.meta["roles"]):
        found.setdefault(role.kind, {})[role.name] = known[node.name]
    outputs = [found["output"][name] for name in sorted(found["output"], key=int)]
    return outputs, found["gradient"], found["mutation"]


def _interpret(module: fx.GraphModule, values: Mapping[str, Tensor]) -> dict[str, object]:
    """The value of every node of the joint graph, by name."""
    result: dict[str, object] = {}
    for node in module.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: result[n.name])
        if node.op == "placeholder":
            result[node.name] = values[node.name]
        elif node.op == "get_attr":
            result[node.name] = operator.attrgetter(node.target)(module)
        elif node.op == "call_function":
            result[node.name] = node.target(*args, **kwargs)
    return result


def _returning_everything(local: fx.GraphModule, names: Mapping[str, object]) -> fx.GraphModule:
    """A copy of one rank's graph that returns every value which is a part of one of the global nodes `names`."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(local.graph, copies)
    wanted = [n for n in local.graph.nodes if n.name in names and is_tensor(n) and isinstance(n.meta.get("layout"), Layout)]
    for node in wanted:
        copies[node].name = node.name
    graph.output(tuple(copies[n] for n in wanted))
    return fx.GraphModule(local, graph)


def _eager_step(captured: Captured, model: nn.Module, values, loss_fn, precision: str):
    """(outputs, gradients by parameter name, new buffers by name) of the model itself, in a precision. Buffers get their old
    values back."""
    inputs = {n.meta["role"].name: values[n.name] for n in captured.graph.nodes if _is_input(n)}
    returns = Returns()
    call = FlatCall(model, captured.signature, returns, loss_fn, compute_dtype(precision))
    old = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    try:
        outputs = call(*(inputs[name] for name in captured.signature.tensor_names))
    except RuntimeError as error:  # tracing looks at shapes only
        raise InputError(f"the model itself fails on these inputs: {error}", fix="check that model(**inputs) runs") from error
    wanted = outputs if returns.loss is None else [outputs[returns.loss]]
    sums = [o.sum() for o in wanted if o.requires_grad]
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(sums, list(parameters.values()), allow_unused=True) if sums and parameters else ()
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(old[name])
    return outputs, {name: g for name, g in zip(parameters, gradients) if g is not None}, buffers


def _is_input(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.meta["role"].kind == "input"


def _group_errors(reference: Mapping[str, Tensor], mine: Mapping[str, Tensor], share: float) -> dict[str, float]:
    """The largest relative error of each group of tensors whose names differ only in the numbers of their modules; infinite
    where one is missing."""
    floor = share * max(map(_norm, reference.values()), default=0.0)
    errors: dict[str, float] = {}
    for name, value in reference.items():
        group = ".".join("*" if word.isdigit() else word for word in name.split("."))
        error = _error(mine[name], value, floor) if name in mine else math.inf
        errors[group] = _worst(errors.get(group, 0.0), error)
    return errors


def _worst(*errors: float) -> float:
    """The largest, or the first that is not a number."""
    return next((e for e in errors if e != e), max(errors))


def _error(mine: Tensor, reference: Tensor, floor: float = 0.0) -> float:
    difference = _norm(mine.double() - reference.double())
    return difference / max(_norm(reference), floor) if difference else 0.0


def _norm(value: object) -> float:
    return value.detach().double().norm().item() if isinstance(value, Tensor) else 0.0
