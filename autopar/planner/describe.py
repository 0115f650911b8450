"""What a finished search says as a Plan: costs, memory by kind, collectives, layouts, and the decisions that the lowering reads."""

from __future__ import annotations

from collections import Counter

import torch

from ..plan import Alternative, Collective, Plan, fingerprint
from ..sharding import NodeSharding, Sharding
from .evaluate import Evaluation, Pricer
from .live_bytes import staying_bytes
from .make import Planned
from .problem import STATE, Problem
from .regions import regions_of
from .solve import Outcome


def describe_plan(planned: Planned) -> Plan:
    """The plan of a search."""
    problem, options, chosen, pricer = planned.problem, planned.options, planned.chosen, planned.pricer
    e = chosen.evaluation
    alternatives = []
    for name, other in planned.others.items():
        if isinstance(other, Outcome):
            o = other.evaluation
            alternatives.append(Alternative(name, o.seconds, o.communication_seconds, o.bytes_, other.fits))
        else:
            alternatives.append(Alternative(name, None, None, None, False, other.message))
    memory = staying_bytes(problem, e, options.optimizer) | {
        "gathered parameters kept": sum(b for (v, _, _), b in e.saved.items() if problem.vertices[v].kind == "parameter"),
        "activations": sum(b for (v, _, _), b in e.saved.items() if problem.vertices[v].kind != "parameter"),
        "recomputed block": e.transient_bytes,
    }
    return Plan(
        model=planned.model, mesh=problem.mesh, hardware=options.hardware.name, precision=options.precision,
        optimizer=options.optimizer, strategy=chosen.restriction.name, memory_limit_bytes=planned.solver.limit_bytes,
        step_seconds=e.seconds, compute_seconds=e.compute_seconds,
        communication_seconds=e.communication_seconds, recompute_seconds=e.recompute_seconds,
        simulated_seconds=planned.timeline.seconds, exposed_seconds=planned.timeline.exposed_seconds,
        bound=max(0.0, min(chosen.bound_seconds, e.seconds)), gap=chosen.gap, peak_bytes=e.bytes_,
        memory={k: v for k, v in memory.items() if v}, collectives=_collectives(e), regions=regions_of(problem, e),
        alternatives=tuple(alternatives), recomputed=tuple(sorted(e.recomputed_blocks)), warnings=planned.warnings,
        layouts=_layouts(problem, e), sharding=_sharding(problem, e, pricer),
        reduce_scatter=options.hardware.reduce_scatter_lowering, bucket_bytes=float(pricer.bucket_bytes),
        fingerprint=fingerprint(problem.graph), planning_seconds=planned.seconds,
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


def _collectives(e: Evaluation) -> tuple[Collective, ...]:
    count, wire, seconds = Counter(), Counter(), Counter()
    for transfer in e.transfers:
        for step, charged in transfer.step_seconds:
            if step.move.kind == "slice":
                continue
            key = (step.move.kind, step.move.axes, transfer.phase)
            count[key] += 1
            wire[key] += step.wire_fraction * transfer.bytes_
            seconds[key] += charged
    return tuple(
        Collective(kind, axes, phase, count[kind, axes, phase], wire[kind, axes, phase], seconds[kind, axes, phase])
        for kind, axes, phase in sorted(count, key=lambda k: (k[2] != "forward", k))
    )


def _layouts(problem: Problem, e: Evaluation) -> dict[str, str]:
    return {
        v.node.meta["role"].name: problem.choices(v.index).strategies[e.choice[v.index]].outputs[0].text()
        for v in problem.vertices
        if v.kind in ("parameter", "input")
    }


def _sharding(problem: Problem, e: Evaluation, pricer: Pricer) -> Sharding:
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
