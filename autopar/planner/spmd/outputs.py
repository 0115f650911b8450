"""Describe the outputs of a call in a plan: their layouts, what it takes to gather one that is read, and whether those
of all micro-batches are kept.

They stay in the layouts that their ops leave them in (autopar/runtime/outputs.py), so no step contains these seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from ...frontend.export import Captured
from ...ir.graph import bytes_of, output_node, outputs_of
from ...ir.layout import Layout
from ...plans.entries import Output
from ...plans.plan import Plan
from ...plans.sharding import Sharding
from ...utils.format import size
from ..objective.evaluate import Evaluation, Pricer
from ..objective.memory_timeline import TRANSIENT
from ..problem.problem import Problem
from ..problem.vertices import STATE


def outputs_in(sharding: Sharding, problem: Problem, pricer: Pricer, call: Captured) -> tuple[Output, ...]:
    """Return the outputs of a whole call in their order, none if all of them are whole on every device. `problem`: that
    of the call, or of a micro-batch, which the sharding is about."""
    roles = output_node(problem.graph).meta["roles"]
    layouts = {r.name: x for r, x in zip(roles, sharding.outputs) if r.kind == "output" and x is not None}
    found = []
    for node, role in outputs_of(call.graph):
        layout = layouts.get(role.name) if role.kind == "output" else None
        if layout is None or int(role.name) >= len(call.returns.names):
            continue
        value, whole = node.meta["val"], Layout.replicated(len(layout.dims))
        gather = pricer.redistribute(layout, whole)
        sent = float(gather.wire_fraction * bytes_of(value)) if gather is not None else 0.0
        name = call.returns.names[int(role.name)]
        seconds = pricer.prices.at_once.pair(layout, whole, bytes_of(value))
        found.append(Output(name, tuple(value.shape), layout.text(), sent, seconds))
    return tuple(found) if any(output.wire_bytes for output in found) else ()


def may_be_unmade(call: Captured) -> bool:
    """Return whether what a call returns beside its loss may be let go of and made again when it is read: of a forward
    that writes to nothing which a second one would read."""
    writes = any(role.kind == "mutation" for _, role in outputs_of(call.graph))
    return call.returns.loss is not None and not writes


def bytes_of_outputs(problem: Problem, e: Evaluation, pricer: Pricer) -> Iterator[tuple[fx.Node, float]]:
    """Iterate over the outputs of a call that are no numbers, with their bytes of a device in the layouts in which they
    leave it."""
    for (value, role), use in zip(outputs_of(problem.graph), problem.output_uses):
        if role.kind == "output" and value.meta["val"].dim():
            strategy = problem.choices(use.consumer).strategies[e.choice[use.consumer]]
            layout = strategy.outputs[0] if use.slot == STATE else strategy.inputs[use.slot]
            yield value, pricer.bytes_of(value.meta["val"], layout)


def held_bytes(problem: Problem, e: Evaluation, pricer: Pricer, micro_batches: float) -> float:
    """Return the bytes of a device that the outputs of all micro-batches of a step without stages take beside the one
    at work. `micro_batches`: the step's, of the largest."""
    return (
        micro_batches * sum(bytes_ for _, bytes_ in bytes_of_outputs(problem, e, pricer)) if micro_batches > 1 else 0.0
    )


def kept_bytes(held: float, room: float, call: Captured) -> float:
    """Return what a device keeps of the outputs of all micro-batches, which take the bytes `held`: nothing if there is
    no room and they can be made again."""
    return 0.0 if held > room and may_be_unmade(call) else held


def with_outputs(plan: Plan, held: float, call: Captured) -> Plan:
    """Return the plan of a step without stages with the outputs of all its micro-batches, which take the bytes `held`,
    in its memory, or without them if there is no room. A plan with outputs that have to be kept all the same warns of
    it."""
    if not held:
        return plan
    room = plan.memory_limit_bytes - plan.peak_bytes
    kept = kept_bytes(held, room, call)
    memory, at_peak = ({**kinds, TRANSIENT: kinds.get(TRANSIENT, 0.0) + kept} for kinds in (plan.memory, plan.at_peak))
    text = f"outputs of all micro-batches take {size(held)} a device, more than the {size(max(room, 0.0))} that is left"
    return replace(
        plan,
        peak_bytes=plan.peak_bytes + kept,
        memory=memory,
        at_peak=at_peak,
        unmade_bytes=held - kept,
        warnings=(*plan.warnings, *([text] if kept > room else [])),
    )
