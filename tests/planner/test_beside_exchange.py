"""A plan counts rows of experts as hidden beside what runs while they travel, and no more."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from autopar import Plan, compiler
from autopar.ir.mesh import Mesh
from autopar.planner.explain import explain_plan
from autopar.planner.objective.beside import Beside
from autopar.planner.objective.beside_exchange import beside_exchanges, like_those_at, with_beside
from autopar.planner.objective.memory_timeline import live_bytes
from autopar.planner.objective.player import played_seconds
from autopar.planner.objective.script import StreamOf, scripts_of
from autopar.planner.objective.step_order import step_order
from autopar.planner.spmd.plan import search
from autopar.planner.spmd.plan_options import PlanOptions

from ..helpers.shared_experts import SharedExperts, gpus, inputs


@cache
def planned(layers: int = 3, mesh: str = "ep=2", **options):
    captured = compiler.trace(SharedExperts(layers), inputs(24))
    options = {"hardware": gpus(), "strategy": "expert", "baselines": False, **options}
    return search(captured, Mesh.parse(mesh), PlanOptions(**options))


def test_the_played_step_has_the_exchanges():
    """Rows that travel beside nothing take as long as in a plan that waits for them; the step is shorter by what is
    told, and no stream needs more than it."""
    found = planned()
    (problem, e), plan = found.whole, found.plan
    apart = with_beside(e, ())
    assert e.beside and not apart.beside
    assert sum(apart.compute.values()) - sum(e.compute.values()) == pytest.approx(e.travelling_seconds)
    assert apart.apart_seconds == pytest.approx(e.apart_seconds)
    waited, beside = (played_seconds(problem, one, found.pricer) for one in (apart, e))
    assert plan.step_seconds == pytest.approx(beside) and e.seconds <= beside * (1 + 1e-9)
    assert plan.routing.gained_seconds == pytest.approx(waited - beside) and beside < waited
    assert 0 < plan.routing.gained_seconds <= plan.routing.beside_seconds == pytest.approx(e.travelling_seconds)
    assert plan.bound <= waited and found.chosen.searched.seconds == pytest.approx(waited)


def test_a_compact_graph_plays_as_the_whole_one():
    found = planned(6)
    small = played_seconds(found.problem, found.evaluation, found.pricer)
    assert found.plan.step_seconds == pytest.approx(small)
    assert played_seconds(*found.whole, found.pricer) == pytest.approx(small)


def test_rows_hide_behind_nothing_but_what_runs_meanwhile():
    """Each is issued before the first of its ops and wanted behind the last."""
    found = planned(1)
    problem, e = found.whole
    count = 0
    for script in scripts_of(problem, e, StreamOf(found.pricer)):
        for one in script.overlapped:
            if isinstance(source := one.pieces[0].source, Beside):
                count += 1
                between = {piece.source.vertex for piece in script.main[one.issued : one.wanted]}
                assert between <= {*source.ops} and {*source.products} <= between
    assert count == len(e.beside) > 0


def test_order_of_ops():
    """Ops beside an exchange run just before its rows are waited for, after those that they read, before those that
    read them."""
    problem, e = planned().whole
    runs = step_order(problem, e).runs
    at = {(run.vertex, run.recomputed): i for i, run in enumerate(runs)}
    assert sorted(at) == sorted((run.vertex, run.recomputed) for run in step_order(problem, with_beside(e, ())).runs)
    for one in e.beside:
        place = at[one.vertex, False]
        assert [run.vertex for run in runs[place - len(one.ops) : place]] == [*one.ops]
    for run in runs:
        for p, _ in problem.vertices[run.vertex].inputs:
            assert at.get((p, False), -1) < at[run.vertex, run.recomputed]


def test_memory_is_that_of_the_order():
    """Some exchanges are waited for if everything does not fit; the plan holds what it says."""
    roomy = planned(3, recompute="none")
    problem, e = roomy.whole
    apart = live_bytes(problem, with_beside(e, ()), roomy.pricer).peak_bytes
    assert roomy.plan.peak_bytes == pytest.approx(live_bytes(problem, e, roomy.pricer).peak_bytes)
    limit = max(apart, roomy.plan.peak_bytes) if roomy.plan.peak_bytes <= apart else (apart + roomy.plan.peak_bytes) / 2
    tight = planned(3, recompute="none", memory_bytes=limit)
    assert tight.plan.peak_bytes <= limit
    assert roomy.plan.step_seconds <= tight.plan.step_seconds


def test_like_those_at():
    problem, e = planned().whole
    one = e.beside[0]
    like = like_those_at(problem, e.beside, one.ops[0])
    assert one in like and {problem.vertices[x.vertex].cls for x in like} == {problem.vertices[one.vertex].cls}
    assert like_those_at(problem, e.beside, 0) == [*e.beside]


def test_latency_is_left_alone():
    """Nothing is put beside an exchange that takes as long without its bytes."""
    found = planned()
    slow = replace(found.options.hardware, links=(replace(found.options.hardware.links[0], latency_seconds=1.0),))
    assert not beside_exchanges(found.problem, with_beside(found.evaluation, ()), found.pricer, slow)


def test_text_and_file(tmp_path):
    plan = planned().plan
    (line,) = [line for line in str(plan).splitlines() if line.startswith("rows of experts")]
    assert "of their way have products beside them, which saves" in line
    assert "no plan of expert that waits for its rows takes less" in str(plan)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.sharding.exchanges == plan.sharding.exchanges
    data = plan.to_json()
    for name in ("beside_seconds", "gained_seconds"):
        data["routing"].pop(name)
    data["sharding"].pop("exchanges")
    data.pop("hash")
    from autopar.plans.file import content_hash

    older = Plan.from_json(data | {"hash": content_hash(data)})
    assert not older.sharding.exchanges and older.routing.beside_seconds == 0.0


def test_a_trace_has_the_rows_on_their_way():
    found = planned(1)
    problem, e = found.whole
    events = {(x.vertex, x.kind): x for x in found.timeline.events}
    for one in e.beside:
        travel = events[one.vertex, "all_to_all"]
        first = min(x.start_seconds for x in found.timeline.events if x.vertex in one.ops and x.kind != "all_to_all")
        assert travel.streams == ("ep",) and travel.start_seconds == pytest.approx(first)
        assert travel.duration_seconds == pytest.approx(one.seconds)
    assert explain_plan(found, "layers.0") is not None
