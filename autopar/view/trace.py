"""The predicted step as a Chrome trace, which Perfetto opens: a row for the compute stream, one for the links of each
mesh axis.

Names are those that torch.profiler gives the same work, so that a prediction and a measurement can be read in one
window.
"""

from __future__ import annotations

from ..ir.graph import values_of
from ..ir.layout import Layout, local_shape
from ..ops import autopar
from ..planner.objective.timeline import COMPUTE, FROM_HOST, TO_HOST, Event, Timeline, ends_of
from ..planner.spmd.planned import Planned

EMITTED = {  # canonical ops as passes/distribute/lower_ops.py emits them
    autopar.linear.default: "aten::linear",
    autopar.linear_dx.default: "aten::matmul",
    autopar.linear_dw.default: "aten::mm",
    autopar.matmul.default: "aten::matmul",
    autopar.attention.default: "aten::_scaled_dot_product_flash_attention_for_cpu",
    autopar.attention_bw.default: "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    autopar.attention_bias_bw.default: "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
}
UNCUT = {  # and these, where the rows of the table are on every device
    autopar.embedding.default: ("aten::embedding", lambda strategy: strategy.inputs[0]),
    autopar.embedding_dw.default: ("aten::embedding_dense_backward", lambda strategy: strategy.outputs[0]),
}
MOVES = {
    "all_reduce": "c10d::allreduce_",
    "all_gather": "_c10d_functional::all_gather_into_tensor",
    "reduce_scatter": "_c10d_functional::reduce_scatter_tensor",
    "all_to_all": "_c10d_functional::all_to_all_single",
    "slice": "aten::slice",
    TO_HOST: "Memcpy DtoH",
    FROM_HOST: "Memcpy HtoD",
}


def trace_of(planned: Planned, timeline: Timeline | None = None) -> dict:
    """Return the trace as plain data for `json.dump`: times in microseconds, bytes of memory as a counter. `timeline`:
    another one than the plan's own, such as with a slowdown."""
    timeline = planned.timeline if timeline is None else timeline
    mesh = planned.problem.mesh
    rows = {name: i for i, name in enumerate(timeline.busy_seconds)}
    events = [_named("process_name", 0, f"predicted step of {planned.model} on mesh {mesh}")]
    for name, row in rows.items():
        events += [_named("thread_name", row, name if name == COMPUTE else f"links of {name}"),
                   {"ph": "M", "pid": 0, "tid": row, "name": "thread_sort_index",
                    "args": {"sort_index": row}}]  # fmt: skip
    for event in timeline.events:
        arguments = _arguments(planned, event)
        for stream in event.streams:
            events.append(
                {
                    "ph": "X",
                    "pid": 0,
                    "tid": rows[stream],
                    "cat": event.phase,
                    "name": profiler_name(planned, event),
                    "ts": _us(event.start_seconds),
                    "dur": _us(event.duration_seconds),
                    "args": arguments,
                }
            )
    for kinds, end in _memory(planned, timeline):
        events.append({"ph": "C", "pid": 0, "name": "bytes of a device", "ts": _us(end), "args": kinds})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def profiler_name(planned: Planned, event: Event) -> str:
    """Return what torch.profiler calls the work of an event."""
    if event.kind in (TO_HOST, FROM_HOST):
        return MOVES[event.kind]
    if event.step is not None:
        kind = event.step.move.kind
        is_exchange = kind == "reduce_scatter" and planned.options.hardware.reduce_scatter_lowering == "all_to_all"
        return MOVES["all_to_all" if is_exchange else kind]
    node = planned.whole[0].vertices[event.vertex].node
    if node.target in UNCUT:
        name, table = UNCUT[node.target]
        if not table(_strategy(planned, event.vertex)).dims[0]:
            return name
    return EMITTED.get(node.target) or node.target._schema.name


def _named(what: str, row: int, name: str) -> dict:
    return {"ph": "M", "pid": 0, "tid": row, "name": what, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 4)


def _strategy(planned: Planned, vertex: int):
    problem, evaluation = planned.whole
    return problem.choices(vertex).strategies[evaluation.choice[vertex]]


def _arguments(planned: Planned, event: Event) -> dict:
    if event.kind in (TO_HOST, FROM_HOST):
        return _where(event, planned.whole[0].vertices[event.vertex]) | {"bytes": round(event.bytes_)}
    return _move_arguments(planned, event) if event.step is not None else _op_arguments(planned, event)


def _op_arguments(planned: Planned, event: Event) -> dict:
    problem = planned.whole[0]
    v, strategy = problem.vertices[event.vertex], _strategy(planned, event.vertex)
    read = [problem.vertices[p].values[o] for p, o in v.inputs]
    return _where(event, v) | {
        "inputs": [_placed(planned, x.shape, layout) for x, layout in zip(read, strategy.inputs)],
        "outputs": [_placed(planned, x.shape, layout) for x, layout in zip(values_of(v.node), strategy.outputs)],
    }


def _move_arguments(planned: Planned, event: Event) -> dict:
    v, step = planned.whole[0].vertices[event.vertex], event.step
    shape = v.values[event.output].shape
    return _where(event, v) | {
        "move": str(step.move), "before": _placed(planned, shape, step.before),
        "after": _placed(planned, shape, step.after), "bytes sent": round(event.bytes_),
    }  # fmt: skip


def _where(event: Event, v) -> dict:
    recomputed = {"recomputed": True} if event.recomputed else {}
    found = {"node": event.name, "module": event.module, "source": v.node.meta.get("source", "")}
    return {key: value for key, value in found.items() if value} | recomputed


def _placed(planned: Planned, shape, layout: Layout) -> str:
    """Return global and local shape, and the layout: `(8, 64) -> (4, 64) dp:S(0)`."""
    mesh = planned.problem.mesh
    local = local_shape(shape, layout, mesh, dict.fromkeys(mesh.names, 0))
    return f"{tuple(shape)} -> {local} {layout}"


def _memory(planned: Planned, timeline: Timeline):
    """Iterate over what is held when each run ends, and when that is, where it changes."""
    live, before = planned.live_bytes, None
    for i, end in enumerate(ends_of(live.order, timeline)):
        held = {kind: round(float(bytes_[i])) for kind, bytes_ in live.kinds.items()}
        if held != before:
            yield held, end
        before = held
