"""One clock: what the search bounds is what is played, and what is played is what a plan says."""

from __future__ import annotations

import functools
import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar import compiler
from autopar.frontend.export import Captured
from autopar.frontend.fake_parameters import forms_of
from autopar.hardware.profile import load
from autopar.ir.mesh import Mesh
from autopar.models import build
from autopar.planner.objective.evaluate import Evaluation
from autopar.planner.objective.player import Player, merged, played_seconds
from autopar.planner.objective.script import Overlapped, Piece, Script
from autopar.planner.problem.multipliers import Prices, drag, spans_of
from autopar.planner.solver.search import Outcome
from autopar.planner.spmd.planned import Planned

from .planning import Instance, searched, toy
from .random_graphs import every_cost, random_graph, thinned

OVERLAP = 0.8
SMALL = "gpt:hidden=512,layers=12,heads=8,vocab=4096,seq=256"
ALONE = {"baselines": False}
CASES = [
    (SMALL, "dp=8", 64, {}), (SMALL, "dp=2,tp=4", 64, {"strategy": "megatron", **ALONE}), (SMALL, "dp=16", 64, {}),
    (SMALL, "dp=8", 64, {"strategy": "fsdp", "micro_batches": 4, **ALONE}),
    (SMALL, "dp=8", 64, {"strategy": "ddp", **ALONE}), (SMALL, "dp=16,tp=2", 64, {"micro_batches": 2}),
]  # fmt: skip


@functools.cache
def captured(model: str, batch: int) -> Captured:
    built, inputs = build(model, batch=batch, seq=256, device="meta")
    return compiler.trace_to_plan(built, inputs, None, forms_of(built), "bf16")


@functools.cache
def planned(model: str, mesh: str, batch: int, options: tuple) -> Planned:
    return searched(captured(model, batch), mesh, **dict(options))


def scripts() -> st.SearchStrategy[Script]:
    def piece(stream: int, seconds: int) -> Piece:
        return Piece(stream, float(seconds), None)

    main = st.lists(st.builds(piece, st.integers(0, 2), st.integers(1, 5)), min_size=1, max_size=12)
    moves = st.lists(st.builds(piece, st.integers(1, 2), st.integers(1, 9)), min_size=1, max_size=2)
    beside = st.lists(st.tuples(moves, st.integers(0, 12), st.none() | st.integers(0, 12)), max_size=8)

    def script(main: list[Piece], beside: list) -> Script:
        n = len(main)
        made = [Overlapped(tuple(p), min(a, n), None if b is None else min(max(a, b), n - 1)) for p, a, b in beside]
        return Script(main, sorted(made, key=lambda b: b.issued))

    return st.builds(script, main, beside)


@settings(max_examples=200, deadline=None)
@given(scripts(), st.sampled_from([0.3, 0.5, 0.8, 1.0]))
def test_a_play_lies_between_its_busiest_stream_and_the_sum(script, overlap):
    seconds = Player(script, overlap).play()
    hidden = [piece for b in script.overlapped for piece in b.pieces]
    waited = sum(piece.seconds for piece in script.main)
    main = waited + drag(overlap, 2) * sum(piece.seconds for piece in hidden)
    links = [sum(p.seconds for p in [*script.main, *hidden] if p.stream == stream) for stream in (1, 2)]
    assert max(main, *links) * (1 - 1e-9) <= seconds
    assert seconds <= (waited + sum(p.seconds for p in hidden)) * (1 + 1e-9)
    assert Player(merged(script), overlap).play() == pytest.approx(seconds)


def test_what_is_waited_for_pushes_what_is_hidden_aside():
    told = []
    main = [Piece(0, 1.0, "a"), Piece(1, 2.0, "b"), Piece(0, 4.0, "c")]
    player = Player(Script(main, [Overlapped((Piece(1, 3.0, "h"),), 0, None)]), 1.0, lambda *of: told.append(of))
    assert player.play() == pytest.approx(7.0)  # one second beside a, none beside b, two beside c
    stretches = [(start, end) for piece, start, end in told if piece.source == "h"]
    assert (stretches[0][1], stretches[1][0]) == (1.0, 3.0) and stretches[-1][1] == pytest.approx(5.0)


@pytest.mark.parametrize("seed", range(6))
def test_no_price_is_above_what_is_played(seed):
    """All plans of small random graphs, listed: at any weights the cheapest costs at most what any takes as it is
    played."""
    rng = random.Random(seed)
    passes = rng.choice([1, 3])
    mesh = rng.choice(["a=2,b=4", "a=4", "a=16,b=2"])
    instance = Instance(
        random_graph(rng), mesh, toy(link=3e8), folded=False, shared_by=passes, classes={"a": 1, "b": 0}
    )
    masks, streams = thinned(instance, rng, 300), instance.pricer.prices.streams
    weights = [np.random.default_rng(seed).dirichlet(np.ones(streams))[1:] for _ in spans_of(passes)]
    prices = Prices(overlap=OVERLAP, links=tuple(map(tuple, weights)), micro_batches=passes)
    costs = every_cost(instance, masks, prices, None)
    for place in itertools.islice(np.ndindex(costs.shape), 0, None, max(1, costs.size // 40)):
        if math.isfinite(costs[place]):
            choice = {cls: int(np.flatnonzero(masks[cls])[k]) for cls, k in zip(masks, place)}
            e = instance.evaluate(choice, prices)
            assert costs[place] <= e.seconds * (1 + 1e-9)
            assert e.seconds <= played_seconds(instance.problem, e, instance.pricer) * (1 + 1e-9)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model, mesh, batch, options", CASES)
def test_the_plan_says_what_is_played(model, mesh, batch, options):
    found = planned(model, mesh, batch, tuple(options.items()))
    plan, passes = found.plan, found.options.micro_batches
    assert plan.step_seconds == pytest.approx(passes * found.chosen.seconds)
    assert plan.bound <= passes * found.evaluation.seconds * (1 + 1e-9) <= plan.step_seconds * (1 + 1e-9)
    assert plan.step_seconds <= 1.06 * passes * found.evaluation.seconds
    if passes == 1:
        assert found.timeline.seconds + found.evaluation.parameter_seconds == pytest.approx(plan.step_seconds)
    for name, other in found.others.items():
        if isinstance(other, Outcome):
            told = next(a for a in plan.alternatives if a.name == name)
            assert told.step_seconds == pytest.approx(passes * other.seconds)
            assert not other.fits or plan.strategy != "auto" or plan.step_seconds <= told.step_seconds * (1 + 1e-9)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh, batch, options", [("dp=8", 64, {}), ("dp=64", 256, {"strategy": "fsdp", **ALONE})])
def test_folded_blocks_take_what_written_ones_do(mesh, batch, options):
    """Play each block whole, not a part of it in all blocks, where links are as busy as compute too."""
    found = planned(SMALL, mesh, batch, tuple(options.items()))
    assert found.problem.compact is not None
    whole, e = found.whole
    assert played_seconds(whole, e, found.pricer) == pytest.approx(found.chosen.seconds)


def test_axes_that_share_a_card_take_turns():
    classes = load("h100").classes_for(Mesh.parse("a=4,b=4,c=4,d=2"))
    assert classes["c"] == classes["d"] == 0 and classes["a"] == classes["b"] == 1


def test_what_is_reduced_once_hides_behind_one_pass():
    """The reductions of four passes take as long as those of one, and run beside a backward that is no longer."""
    found = planned(SMALL, "dp=16", 64, (("strategy", "ddp"), ("micro_batches", 4), ("baselines", False)))
    e: Evaluation = found.evaluation
    backward = e.loads["backward"]
    assert e.reduces_once and backward.once.hidden.sum() > 0
    last = backward.of(True).seconds(e.overlap)
    assert last >= backward.once.hidden[1:].max() * (1 - 1e-9)
    spread = replace(e, transfers=[replace(t, times=4) for t in e.transfers])
    assert spread.seconds <= e.seconds * (1 + 1e-9)


def test_gradients_of_stages_hide_behind_their_last_backward():
    found = searched(captured(SMALL, 64), "pp=2,dp=8", micro_batches=4, schedule="1f1b", baselines=False)
    parts = found.staged.evaluated.parts
    assert all(0 < p.once_seconds - p.parameter_seconds < p.once_moved for p in parts)


@pytest.mark.slow
def test_recipes_are_made_to_fit_and_combined_ones_stand_beside():
    roomy = planned(SMALL, "dp=4,tp=2", 64, ())
    need = roomy.others["megatron_sp"].evaluation.bytes_
    reserve = roomy.problem.reserve_bytes
    tight = planned(SMALL, "dp=4,tp=2", 64, (("memory", reserve + 0.7 * (need - reserve)),))
    assert {"megatron_sp+zero1", "megatron_sp+fsdp"} <= tight.others.keys()
    fitted = tight.others["megatron_sp"]
    assert fitted.fits and fitted.evaluation.recomputed and not roomy.others["megatron_sp"].evaluation.recomputed
    assert fitted.seconds > roomy.others["megatron_sp"].seconds


def test_sequence_parallelism_cuts_what_stands_between_blocks():
    found = planned(SMALL, "tp=8", 64, (("strategy", "megatron_sp"), ("baselines", False)))
    norms = [v for v in found.problem.vertices if v.kind == "op" and "layer_norm" in str(v.node.target)]
    assert norms
    for v in norms:
        strategy = found.problem.choices(v.index).strategies[found.evaluation.choice[v.index]]
        assert strategy.inputs[0].dim_of("tp") == 1
    assert {c.kind for c in found.plan.collectives if c.axes == ("tp",)} >= {"all_gather", "reduce_scatter"}
