"""From a captured graph to a Plan: build the problem, search, and write down what was decided and what it costs."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from ..capture import Captured
from ..collector import paused_collector
from ..cost.memory import StateBytes
from ..cost.redistribute import Redistributor
from ..errors import AutoparError, UnsupportedOpError
from ..graph import describe
from ..hardware import Hardware
from ..layout import Layout
from ..mesh import Mesh
from ..plan import Alternative, Collective, Plan, fingerprint
from ..precision import compute_dtype
from ..sharding import NodeSharding, Sharding
from .ascend import Search
from .evaluate import Pricer
from .fold import fold, unfolded
from .problem import STATE, Problem, build
from .regions import regions_of
from .restrict import Restriction
from .solve import Outcome, Solver


@dataclass(frozen=True)
class PlanOptions:
    """What a user may say about planning. `fixed`: layouts by placeholder name. `memory_bytes`: None takes the hardware's."""

    hardware: Hardware
    memory_bytes: float | None = None
    optimizer: str = "adamw"
    precision: str = "fp32"
    strategy: str | None = None
    pin: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Layout] = field(default_factory=dict)
    strict: bool = False
    baselines: bool = True
    folded: bool = True
    search: Search = Search()

    def check(self, mesh: Mesh) -> None:
        """Raises StrategyError or MeshError for what can be known to be wrong before the model is traced."""
        Restriction.of(self.strategy, mesh)
        compute_dtype(self.precision)
        StateBytes.of(self.optimizer, 4, 0)


@paused_collector()
def make_plan(
    captured: Captured,
    mesh: Mesh,
    options: PlanOptions,
    model: str = "model",
    report: Callable[[str], None] = lambda t: None,
) -> Plan:
    """Raises UnsupportedOpError (strict), StrategyError, or MemoryInfeasibleError."""
    options.check(mesh)
    start = time.perf_counter()
    hardware = options.hardware
    restriction = Restriction.of(options.strategy, mesh)
    links = hardware.links_for(mesh)
    redistribute = Redistributor(mesh, links, hardware.reached_memory_bytes_per_second)
    report("building the problem")
    problem = build(
        captured, mesh, hardware, options.optimizer,
        fold if options.folded else unfolded, dict(options.fixed), dict(options.pin),
    )  # fmt: skip
    warnings = _unruled(problem, options.strict)
    bucket_bytes = max(tier.bucket_bytes for tier in hardware.tiers_for(mesh).values())
    pricer = Pricer(problem, redistribute, bucket_bytes)
    limit = float(options.memory_bytes or hardware.memory_bytes)
    solver = Solver(problem, pricer, limit, options.search, report)
    others = solver.baselines() if options.baselines else {}
    report("searching")
    chosen = solver.solve(restriction, dict(options.pin))
    if restriction.name == "auto" and not options.pin:
        chosen = _not_worse(chosen, others)
    report("done")
    return _plan(problem, chosen, others, options, mesh, pricer, limit, model, warnings, time.perf_counter() - start)


def _unruled(problem: Problem, strict: bool) -> tuple[str, ...]:
    """What is said of ops without a rule: they run whole on every device."""
    if not problem.unruled:
        return ()
    lines = []
    for target, nodes in sorted(_by_target(problem).items()):
        seconds = sum(float(problem.choices(v).seconds[0]) for v in nodes)
        first = problem.vertices[nodes[0]].node
        where = f" at {first.meta['source']}" if first.meta.get("source") else ""
        lines.append(
            f"{target} has no sharding rule: {len(nodes)} ops run whole on every device, {seconds * 1e3:.3g} ms{where}"
        )
    if strict:
        raise UnsupportedOpError(
            f"{len(problem.unruled)} ops of {len(lines)} kinds have no sharding rule: " + "; ".join(lines),
            node=describe(problem.unruled[0]), mesh=problem.mesh, fix="leave out strict=True to run them whole on every device",
        )  # fmt: skip
    return tuple(lines)


def _by_target(problem: Problem) -> dict[str, list[int]]:
    unruled = set(problem.unruled)
    found = defaultdict(list)
    for v in problem.vertices:
        if v.node in unruled and v.kind == "op":
            found[str(v.node.target)].append(v.index)
    return found


def _not_worse(chosen: Outcome, others: dict[str, Outcome | AutoparError]) -> Outcome:
    """The free plan, or an expert's if that fits and is faster by the same model (the search stops at a small gap)."""
    for other in others.values():
        if isinstance(other, Outcome) and other.fits and other.evaluation.seconds < chosen.evaluation.seconds:
            chosen = Outcome(
                other.restriction, other.evaluation, min(chosen.bound_seconds, other.evaluation.seconds), True
            )
    return chosen


def _plan(problem: Problem, chosen: Outcome, others, options: PlanOptions, mesh: Mesh, pricer: Pricer, limit: float,
          model: str, warnings, seconds: float) -> Plan:  # fmt: skip
    e = chosen.evaluation
    alternatives = []
    for name, other in others.items():
        if isinstance(other, Outcome):
            o = other.evaluation
            alternatives.append(Alternative(name, o.seconds, o.communication_seconds, o.bytes_, other.fits))
        else:
            alternatives.append(Alternative(name, None, None, None, False, other.message))
    memory = {
        "parameters": 0.0, "gradients": 0.0, "optimizer": 0.0, "buffers": 0.0,
        "gathered parameters kept": sum(b for (v, _, _), b in e.saved.items() if problem.vertices[v].kind == "parameter"),
        "activations": sum(b for (v, _, _), b in e.saved.items() if problem.vertices[v].kind != "parameter"),
        "recomputed block": e.transient_bytes,
    }  # fmt: skip
    memory["gradients"] += e.whole_gradient_bytes
    for v in problem.vertices:
        resident = float(problem.choices(v.index).resident_bytes[e.choice[v.index]])
        if v.kind == "parameter":
            trainable, state = v.node.meta["role"].trainable, v.state_bytes(options.optimizer)
            elements = resident / state.resident(trainable)
            memory["parameters"] += elements * (state.master + state.copy)
            memory["gradients"] += elements * state.gradient if trainable else 0.0
            memory["optimizer"] += elements * state.optimizer if trainable else 0.0
        else:
            memory["buffers"] += resident
    return Plan(
        model=model, mesh=mesh, hardware=options.hardware.name, precision=options.precision, optimizer=options.optimizer,
        strategy=chosen.restriction.name, memory_limit_bytes=limit, step_seconds=e.seconds, compute_seconds=e.compute_seconds,
        communication_seconds=e.communication_seconds, recompute_seconds=e.recompute_seconds,
        bound=max(0.0, min(chosen.bound_seconds, e.seconds)), gap=chosen.gap, peak_bytes=e.bytes_,
        memory={k: v for k, v in memory.items() if v}, collectives=_collectives(e), regions=regions_of(problem, e),
        alternatives=tuple(alternatives), recomputed=tuple(sorted(e.recomputed_blocks)), warnings=warnings,
        layouts=_layouts(problem, e), sharding=_sharding(problem, e, pricer),
        reduce_scatter=options.hardware.reduce_scatter_lowering, bucket_bytes=float(pricer.bucket_bytes),
        fingerprint=fingerprint(problem.graph), planning_seconds=seconds,
        parameter_elements=_elements(problem, False), trained_elements=_elements(problem, True),
    )  # fmt: skip


def _elements(problem: Problem, trained: bool) -> int:
    """Elements of all parameters, or of those that train; of a quantized weight those that it has when it is dequantized."""
    found = {v.node for v in problem.vertices if v.kind == "parameter"}
    if trained:
        return sum(n.meta["val"].numel() for n in found if n.meta["role"].trainable)
    packed = {n.args[0]: n for n in problem.graph.nodes if n.target is torch.ops.autopar.dequantize.default}
    parts = {part for n in packed.values() for part in n.all_input_nodes}
    return sum(n.meta["val"].numel() for n in {*(found - parts), *packed.values()})


def _collectives(e) -> tuple[Collective, ...]:
    count, wire, seconds = Counter(), Counter(), Counter()
    for transfer in e.transfers:
        r = transfer.redistribution
        # a bucketed tensor pays part of the latency: its steps share what the plan charges for the transfer
        charged = transfer.seconds / max(r.latency_seconds + r.seconds_per_byte * transfer.bytes_, 1e-30)
        for step in r.steps:
            if step.move.kind == "slice":
                continue
            key = (step.move.kind, step.move.axes, transfer.phase)
            count[key] += 1
            wire[key] += step.wire_fraction * transfer.bytes_
            seconds[key] += charged * (step.latency_seconds + step.seconds_per_byte * transfer.bytes_)
    return tuple(
        Collective(kind, axes, phase, count[kind, axes, phase], wire[kind, axes, phase], seconds[kind, axes, phase])
        for kind, axes, phase in sorted(count, key=lambda k: (k[2] != "forward", k))
    )


def _layouts(problem: Problem, e) -> dict[str, str]:
    return {
        v.node.meta["role"].name: problem.choices(v.index).strategies[e.choice[v.index]].outputs[0].text()
        for v in problem.vertices
        if v.kind in ("parameter", "input")
    }


def _sharding(problem: Problem, e, pricer: Pricer) -> Sharding:
    def strategy(index: int):
        return problem.choices(index).strategies[e.choice[index]]

    nodes, leaves, outputs = {}, {}, []
    for v in problem.vertices:
        if v.kind == "op":
            s = strategy(v.index)
            nodes[v.name] = NodeSharding(s.inputs, s.outputs, s.choice)
        elif v.kind != "output":
            leaves[v.name] = strategy(v.index).outputs[0]
        for output, cast in v.casts.items():
            layout = strategy(v.index).outputs[output]
            nodes[cast.name] = NodeSharding((layout,), (layout,), ())
    for use in problem.output_uses:
        s = strategy(use.consumer)
        outputs.append(s.outputs[0] if use.slot == STATE else s.inputs[use.slot])
    kept = frozenset((*problem.vertices[v].tensor_name(o), layout) for v, o, layout in e.kept)
    redistribute = pricer.redistribute
    return Sharding(
        problem.mesh, redistribute.links, redistribute.memory_bytes_per_second, nodes, leaves, tuple(outputs), kept,
        frozenset(e.recomputed_blocks),
    )  # fmt: skip
