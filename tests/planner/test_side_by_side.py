"""Micro-batches that take turns: played, in memory, in a plan's text and file."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

import pytest

from autopar import Plan
from autopar.api import entry as api
from autopar.planner.explain import explain_plan
from autopar.planner.objective.memory_timeline import SAVED, live_bytes
from autopar.planner.objective.player import Player, merged, played_seconds
from autopar.planner.objective.script import Overlapped, Piece, Script, StreamOf, scripts_of
from autopar.planner.objective.side_by_side import one_by_one, pair_script

from ..helpers.shared_experts import SharedExperts, gpus, inputs


@cache
def planned(layers: int = 3, micro_batches: int = 4, samples: int = 32, **options):
    options = {"hardware": gpus(), "strategy": "expert", "baselines": False, "precision": "fp32", **options}
    return api.search(SharedExperts(layers), "ep=2", inputs(samples), micro_batches=micro_batches, **options)


def test_the_step_is_the_played_one():
    """One forward, the pairs, one backward, and the optimizer; nothing is counted that is not on a stream."""
    found = planned()
    (problem, e), pricer = found.whole, found.pricer
    first, last = scripts_of(problem, e, StreamOf(pricer))
    both = pair_script(*scripts_of(problem, e, StreamOf(pricer), False), e.turns)
    first, last, pair = (Player(merged(script), e.overlap).play() for script in (first, last, both))
    assert found.plan.step_seconds == pytest.approx(first + 3 * pair + last + 4 * e.parameter_seconds)
    apart = one_by_one(e)
    assert apart.apart_seconds == pytest.approx(e.apart_seconds) and not apart.turns
    gained = found.plan.pipeline.pairs.gained_seconds
    assert 4 * (played_seconds(problem, apart, pricer) - played_seconds(problem, e, pricer)) == pytest.approx(gained)


def test_a_compact_graph_plays_as_the_whole_one():
    found = planned(12)
    small = played_seconds(found.problem, found.evaluation, found.pricer)
    assert found.problem.compact is not None
    assert played_seconds(*found.whole, found.pricer) == pytest.approx(small)


@pytest.mark.parametrize("seed", range(20))
def test_a_pair_has_all_that_both_scripts_have(seed):
    """In their order: what is issued and wanted keeps its place between the pieces of its own script."""
    print(f"seed {seed}")
    random, e = Random(seed), planned(1).whole[1]
    beside = next(one for one in e.beside if one.vertex in e.turns)

    def script() -> Script:
        main = [Piece(0, random.random(), object()) for _ in range(random.randint(1, 12))]
        places = sorted(random.randint(0, len(main)) for _ in range(random.randint(0, 4)))
        return Script(main, [Overlapped((Piece(1, random.random(), beside),), at, at) for at in places])

    scripts = script(), script()
    both = pair_script(*scripts, e.turns)
    assert sorted(map(id, both.main)) == sorted(map(id, (*scripts[0].main, *scripts[1].main)))
    for one in scripts:
        own = [piece for piece in both.main if any(piece is mine for mine in one.main)]
        assert all(a is b for a, b in zip(own, one.main, strict=True))
        for travel in one.overlapped:
            (placed,) = [x for x in both.overlapped if x.pieces is travel.pieces]
            before = [p for p in both.main[: placed.issued] if any(p is mine for mine in one.main)]
            waited = [p for p in both.main[: placed.wanted] if any(p is mine for mine in one.main)]
            assert (len(before), len(waited)) == (travel.issued, travel.wanted)
    alone = sum(Player(one, 1.0).play() for one in scripts)
    assert Player(both, 1.0).play() <= alone + 1e-12


def test_two_micro_batches_are_in_memory():
    """More than one, less than two: as one fills its layers the other lets go of its own."""
    found = planned(3, recompute="none")
    (problem, e), pricer = found.whole, found.pricer
    alone, both = live_bytes(problem, one_by_one(e), pricer), live_bytes(problem, e, pricer)
    saved = alone.most[SAVED]
    assert found.plan.peak_bytes == pytest.approx(both.peak_bytes)
    assert (both.total >= alone.total[: len(both.total)] - 1e-6).all()
    assert (
        alone.peak_bytes
        < both.peak_bytes
        < alone.peak_bytes
        + saved
        + sum(alone.most[kind] for kind in alone.most if kind not in (SAVED, "parameters", "gradients", "optimizer"))
    )


def test_memory_is_left_for_the_second():
    """A plan that holds less is paired, if that is faster than the fastest alone; else none is."""
    roomy = planned(3)
    apart = live_bytes(roomy.whole[0], one_by_one(roomy.whole[1]), roomy.pricer).peak_bytes
    limit = int((apart + roomy.plan.peak_bytes) / 2)
    tight = planned(3, memory=limit)
    assert tight.plan.peak_bytes <= limit and tight.plan.step_seconds >= roomy.plan.step_seconds * (1 - 1e-9)


@pytest.mark.parametrize("options", [
    {"micro_batches": 1}, {"hardware": replace(gpus(), nccl=None)}, {"strategy": "ddp"},
])  # fmt: skip
def test_nothing_to_pair(options):
    assert planned(**options).plan.pipeline.pairs is None


def test_text_and_file(tmp_path):
    found = planned()
    plan = found.plan
    (line,) = [line for line in str(plan).splitlines() if line.startswith("rows of experts")]
    assert "a forward runs beside the backward before it" in line
    assert "that waits for its rows takes less" in str(plan) and explain_plan(found, "layers.0") is not None
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert "pairs" not in planned(micro_batches=1).plan.to_json()["pipeline"]
    orders = plan.pipeline.orders
    assert [" ".join(map(str, one)) for one in orders.together(0)] == ["0F0", "0F1 0B0", "0F2 0B1", "0F3 0B2", "0B3"]
