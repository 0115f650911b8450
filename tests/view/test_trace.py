"""The trace names its work as the emitted graph and torch.profiler do, and Perfetto's format is kept."""

from __future__ import annotations

import json

import pytest

from autopar.api import entry as api
from autopar.compiler import lower
from autopar.models import build
from autopar.view.trace import MOVES, profiler_name, trace_of


@pytest.fixture(scope="module", params=["megatron", "fsdp"])
def planned(request):
    model, inputs = build("gpt2-tiny:layers=1", batch=4, seq=16)
    return api.search(model, "dp=2,tp=2", inputs, hardware="cpu-gloo", strategy=request.param, baselines=False)


def test_ops_are_named_as_they_are_emitted(planned):
    emitted = {
        n.name: n.target for n in lower(planned.captured, planned.plan, 0).local.graph.nodes if n.op == "call_function"
    }
    compared = 0
    for event in planned.timeline.events:
        if event.step is None and event.name in emitted and not planned.problem.vertices[event.vertex].casts:
            assert profiler_name(planned, event) == emitted[event.name]._schema.name, event.name
            compared += 1
    assert compared > 60
    moved = {profiler_name(planned, e) for e in planned.timeline.events if e.step is not None}
    names = {str(t._schema.name).rstrip("_") for t in emitted.values() if hasattr(t, "_schema")}
    assert {m for m in moved if m.startswith("_c10d")} <= names


def test_the_trace_is_chromes_format(planned):
    trace = json.loads(json.dumps(trace_of(planned)))
    events = trace["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "C"}
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows == {0: "compute", 1: "links of dp", 2: "links of tp"}
    work = [e for e in events if e["ph"] == "X"]
    assert all(e["ts"] >= 0 and e["dur"] >= 0 and e["tid"] in rows and e["args"]["node"] for e in work)
    seconds = planned.plan.step_seconds - planned.plan.update_seconds  # the optimizer's is the user's own call
    assert max(e["ts"] + e["dur"] for e in work) == pytest.approx(seconds * 1e6, rel=1e-3)
    moves = [e for e in work if "move" in e["args"]]
    assert moves and {e["name"] for e in moves} <= set(MOVES.values())
    linear = next(e for e in work if e["name"] == "aten::linear")
    assert linear["args"]["inputs"][0].startswith("(4, 16, 64) -> (")
    faster = trace_of(planned, planned.played(1.0))
    assert trace_of(planned) == trace_of(planned) != faster
