"""Describe the outputs of a call in a plan: their layouts, and what it takes to gather one that is read.

They stay in the layouts that their ops leave them in (autopar/runtime/outputs.py), so no step contains these seconds.
"""

from __future__ import annotations

from ..frontend.export import Captured
from ..ir.graph import bytes_of, output_node, outputs_of
from ..ir.layout import Layout
from ..plans.plan import Output
from ..plans.sharding import Sharding
from .objective.evaluate import Pricer
from .problem.problem import Problem


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
        name, seconds = call.returns.names[int(role.name)], pricer.prices.pair(layout, whole, bytes_of(value))
        found.append(Output(name, tuple(value.shape), layout.text(), sent, seconds))
    return tuple(found) if any(output.wire_bytes for output in found) else ()
