"""Pipelines that are planned: even, in memory, honest about what they wait for, and exact when they are simulated."""

import copy
import functools
import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar import Plan, compiler
from autopar.cli.main import main
from autopar.errors import (
    AutoparError,
    MemoryInfeasibleError,
    MeshError,
    MicroBatchError,
    PipelineError,
    StageError,
    StrategyError,
)
from autopar.ir.graph import fingerprint
from autopar.ir.mesh import Mesh
from autopar.models import build
from autopar.planner.objective.memory_timeline import RESERVE
from autopar.planner.pipeline.micro_batch_plans import DEAREST, MEMORY_PRICES, ROUGH, MicroBatchPlans
from autopar.planner.pipeline.plan import kinds_of, plan_pipeline
from autopar.planner.pipeline.search import MOST_LIMITS
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.schedule.play import play
from autopar.simulate import oracle
from autopar.simulate.pipeline import simulate_pipeline
from tests.planner.planning import captured, toy

GPT = "gpt:hidden=64,layers=8,heads=4,vocab=64,seq=16"
SMALL = "gpt:hidden=32,layers=4,heads=4,vocab=64,seq=16"
COMPUTES = dict(flops=1e8, memory=1e10, link=1e10)  # a machine on which transfers hardly matter
SAME_STEP = 1e-2  # a cut that is best by formulas may be played slower by this than the next one
_PLANNED: dict = {}


def planned(model, mesh: str = "pp=2,dp=2", hardware=None, options=None, **asked):
    """A plan with stages; what several tests ask of a registry model is planned once."""
    if not isinstance(model, str):
        return plan_anew(model, mesh, hardware, options, asked)
    key = repr((model, mesh, hardware, options, sorted(asked.items())))  # a machine has no hash
    if key not in _PLANNED:
        _PLANNED[key] = plan_anew(captured(model), mesh, hardware, options, asked)
    return _PLANNED[key]


def plan_anew(graph, mesh: str, hardware, options: dict | None, asked: dict):
    options = PlanOptions(hardware or toy(**COMPUTES), **{"baselines": False} | (options or {}))
    return plan_pipeline(graph, Mesh.parse(mesh), options, "model", **asked)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())))

    def forward(self, x):
        return self.layers(x).square().mean()


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, dropout_rate=0.0,
                      decoder_start_token_id=0, use_cache=False)  # fmt: skip
    return T5ForConditionalGeneration(config), {n: torch.randint(1, 64, (8, 12)) for n in ("input_ids", "labels")}


@functools.cache
def model_of(name: str):
    torch.manual_seed(0)
    if name == "t5":
        return t5()
    return build(name, batch=8, seq=16, device="cpu")


@functools.cache
def trace_of(name: str):
    return compiler.trace(*model_of(name))


# where stages begin ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4])
def test_equal_blocks_are_cut_evenly(ranks):
    plan = planned(GPT, f"pp={ranks}", schedule="1f1b", micro_batches=8).plan
    assert plan.pipeline.balance <= 1.10
    assert sum(c.parameters for c in plan.pipeline.costs) >= plan.parameter_elements


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["t5", "unet-tiny"])
def test_encoder_decoders_and_skips_are_cut_evenly(name):
    hardware = toy(flops=1e8, memory=1e10, link=1e12)
    plan = planned(trace_of(name), "pp=2", hardware, schedule="1f1b", micro_batches=8).plan
    assert plan.pipeline.balance <= 1.10
    if name == "t5":  # not at the border of encoder and decoder: a decoder's block takes longer
        assert "decoder" in plan.pipeline.costs[0].name or "encoder" in plan.pipeline.costs[1].name


def eight_micro_batches():
    return planned(SMALL, "pp=2", schedule="1f1b", micro_batches=8)


def test_stages_have_names_in_order():
    names = [c.name for c in eight_micro_batches().plan.pipeline.costs]
    assert names[0].startswith("wte to h.") and names[-1].endswith("to lm_head")


# schedules and micro-batches
# --------------------------------------------------------------------------------------------


def test_the_fastest_schedule_is_taken_and_the_others_are_told():
    found = planned(SMALL, "pp=2", micro_batches=8)
    plan = found.plan
    searched = [name for name, _ in kinds_of("auto", None)]
    assert plan.pipeline.schedule in searched
    assert plan.step_seconds == min(t.step_seconds for t in found.staged.candidates)
    assert len(plan.alternatives) == len(searched) - 1
    assert all(a.step_seconds >= plan.step_seconds and "8 micro-batches" in a.name for a in plan.alternatives)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["naive", "v_min", "dualpipev", "Interleaved1F1B"])
def test_a_schedule_that_is_asked_for_is_kept(schedule):
    plan = planned(SMALL, "pp=2", schedule=schedule, micro_batches=4).plan
    assert plan.pipeline.schedule == schedule.lower().replace("interleaved1f1b", "interleaved_1f1b")
    assert len(plan.pipeline.costs) == 2 * plan.pipeline.stages_per_rank


def test_the_step_is_that_of_the_played_schedule():
    found = eight_micro_batches()
    costs, orders = found.plan.pipeline.costs, found.plan.pipeline.orders
    alone = play(orders, *([getattr(c, f"{kind}_seconds") for c in costs] for kind in ("forward", "input", "weight")),
                 [c.transfer_seconds for c in costs[:-1]]).seconds  # fmt: skip
    assert alone <= found.plan.step_seconds <= alone + max(found.staged.evaluated.once_seconds) * (1 + 1e-9)
    assert found.plan.pipeline.played().seconds == alone
    assert (
        0 < found.plan.bound <= found.plan.step_seconds
        and found.plan.gap == 1 - found.plan.bound / found.plan.step_seconds
    )


@pytest.mark.slow
def test_more_micro_batches_wait_less():
    plans = {m: planned(GPT, "pp=4", schedule="1f1b", micro_batches=m).plan for m in (2, 4, 8)}
    bubbles = [plans[m].pipeline.played().bubble for m in (2, 4, 8)]
    assert bubbles == sorted(bubbles, reverse=True) and bubbles[0] > 0.4
    assert "2 micro-batches for 4 ranks" in plans[2].warnings[0]
    assert not plans[4].warnings and not plans[8].warnings


def test_the_number_of_micro_batches_fills_the_data_axes():
    found = planned(SMALL, "pp=2,dp=4", schedule="1f1b")
    assert {t.pipeline.micro_batches for t in found.staged.candidates} == {2}  # 8 samples on 4 replicas


@pytest.mark.sampled(1)
@pytest.mark.parametrize("micro_batches", [None, 1])
def test_a_batch_norm_runs_as_one_micro_batch(micro_batches):
    graph = compiler.trace(Normed(), {"x": torch.randn(8, 16)})
    plan = planned(graph, "pp=2", micro_batches=micro_batches).plan
    assert plan.pipeline.micro_batches == 1
    (warning,) = plan.warnings
    assert "1 micro-batch for 2 ranks: each waits" in warning
    if micro_batches is None:
        assert "square_deviation" in warning
    with pytest.raises(MicroBatchError, match="square_deviation"):
        planned(graph, "pp=2", micro_batches=2)


@pytest.mark.slow
def test_no_expert_is_better():
    plan = planned(SMALL, "pp=2,dp=2,tp=2", options={"baselines": True}, schedule="1f1b", micro_batches=2).plan
    told = {a.name: a for a in plan.alternatives}
    assert {"ddp", "zero1", "fsdp", "megatron_sp", "megatron_sp+zero1"} <= set(told)
    assert all(plan.step_seconds <= a.step_seconds * (1 + 1e-9) for a in told.values() if a.fits)
    alone = planned(SMALL, "pp=2,dp=2,tp=2", options={"strategy": "fsdp"}, schedule="1f1b", micro_batches=2).plan
    assert told["fsdp"].step_seconds == pytest.approx(alone.step_seconds, rel=0.02)  # the one is an estimate
    assert not alone.alternatives


# memory
# -----------------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_names_the_stage_and_what_is_missing():
    with pytest.raises(MemoryInfeasibleError, match=r"rank \d with stage") as refused:
        planned(SMALL, "pp=2", options={"memory_bytes": 2e5, "recompute": "none"}, schedule="1f1b", micro_batches=4)
    error = refused.value
    assert error.missing_bytes > 0 and sum(error.breakdown.values()) == pytest.approx(2e5 + error.missing_bytes, abs=1)
    assert "h." in str(error) and "activations" in error.breakdown


@pytest.mark.slow
def test_less_memory_is_met_by_other_cuts_or_by_computing_again():
    free = planned(GPT, "pp=2", schedule="gpipe", micro_batches=8).plan
    limit = 0.75 * free.peak_bytes
    tight = planned(GPT, "pp=2", options={"memory_bytes": limit}, schedule="gpipe", micro_batches=8).plan
    assert tight.peak_bytes <= limit and tight.step_seconds >= free.step_seconds
    assert tight.recomputed or tight.recomputed_selectively or tight.pipeline.cuts != free.pipeline.cuts


def test_plans_at_prices_are_those_of_evaluating_each():
    """A choice that was found at another price is not evaluated: the same plans come out."""
    plans = planned(GPT, "pp=2", schedule="gpipe", micro_batches=8).staged.best.search.plans
    one, other = copy.copy(plans), copy.copy(plans)
    for each in (one, other):
        each.__dict__.pop("_run", None)
    unit, expected, skipped = plans.fastest.solver.unit_price, [plans.fastest], 0
    for price in (
        price for price in MEMORY_PRICES if price <= DEAREST * plans.options.hardware.memory_bytes / plans.limit
    ):
        new = other.at(replace(other.free_of_memory, byte_seconds=unit * price), ROUGH)
        if new.evaluation.choice in [known.evaluation.choice for known in expected]:
            skipped += 1
        else:
            expected.append(new)
    found = list(one.at_prices())
    assert skipped and len(found) == len(expected)
    for mine, theirs in zip(found, expected):
        assert mine.evaluation.choice == theirs.evaluation.choice
        assert (mine.evaluation.seconds, mine.evaluation.bytes_) == (
            theirs.evaluation.seconds,
            theirs.evaluation.bytes_,
        )


@pytest.mark.slow
def test_early_stages_compute_more_again_than_late_ones():
    asked = dict(schedule="1f1b", micro_batches=8)
    free = planned(trace_of(GPT), "pp=4", **asked)
    by_rank = [sum(memory.values()) for memory in free.staged.evaluated.memory]
    tight = planned(trace_of(GPT), "pp=4", options={"memory_bytes": 0.93 * by_rank[0]}, **asked)
    assert tight.plan.peak_bytes <= 0.93 * by_rank[0] and tight.plan.step_seconds >= free.plan.step_seconds
    again = [sum(work.recompute for work in part.work.values()) for part in tight.staged.evaluated.parts]
    assert again[0] > 0 and again[0] > again[-1], again
    check_step(GPT, tight.plan)


@pytest.mark.slow
def test_memory_decides_between_schedules():
    plans = {s: planned(GPT, "pp=2", schedule=s, micro_batches=8).plan for s in ("1f1b", "gpipe")}
    assert plans["1f1b"].peak_bytes < plans["gpipe"].peak_bytes
    first, last = (c.peak_bytes for c in plans["1f1b"].pipeline.costs)
    assert plans["1f1b"].peak_bytes == max(first, last)
    assert sum(plans["1f1b"].at_peak.values()) == pytest.approx(plans["1f1b"].peak_bytes)


def test_recomputation_that_is_asked_for_is_done():
    none, full = (
        planned(SMALL, "pp=2", options={"recompute": r}, schedule="1f1b", micro_batches=4).plan
        for r in ("none", "full")
    )
    assert len(full.recomputed) == 4 and not none.recomputed
    assert all(f.activation_bytes < n.activation_bytes for f, n in zip(full.pipeline.costs, none.pipeline.costs))
    assert full.step_seconds > none.step_seconds


# what cannot be
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error, asked", [
    (StrategyError, {"schedule": "2f2b"}), (StrategyError, {"schedule": "1f1b", "stages_per_rank": 2}),
    (MicroBatchError, {"micro_batches": 99}), (PipelineError, {"micro_batches": 0}),
    (PipelineError, {"micro_batches": "8"}), (StageError, {"mesh": "pp=64"}),
    (StageError, {"mesh": "pp=8", "schedule": "interleaved_1f1b", "stages_per_rank": 8}), (MeshError, {"mesh": "dp=4"}),
    (MeshError, {"mesh": "pp=1,dp=4"}), (StrategyError, {"options": {"pin": {"*": "pp:S(0)"}}}),
    (StrategyError, {"options": {"strategy": "ddpp"}}),
])  # fmt: skip
def test_wrong_arguments_are_refused_with_a_remedy(error, asked):
    with pytest.raises(AutoparError) as refused:
        planned(SMALL, **asked)
    assert type(refused.value) is error and refused.value.fix


# files, text, simulation
# ------------------------------------------------------------------------------------------------


def test_a_plan_file_keeps_the_pipeline(tmp_path):
    plan = planned(SMALL, "pp=2,dp=2", micro_batches=4).plan
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan and again.hash == plan.hash and str(again) == str(replace(plan))


def test_a_plan_is_that_of_the_whole_batch():
    plan = planned(SMALL, "pp=2,dp=2", micro_batches=4).plan
    assert plan.fingerprint == fingerprint(captured(SMALL).graph)
    assert (plan.samples, plan.micro_batches, plan.reduces_once) == (8, 4, True)
    assert str(plan.mesh) == "pp=2,dp=2" and str(plan.sharding.mesh) == "dp=2"


def test_text(golden):
    golden(str(planned(SMALL, "pp=2,dp=2", schedule="1f1b", micro_batches=4).plan))


@pytest.mark.slow
def test_command_line(capsys, tmp_path):
    words = ["--model", "gpt2-tiny", "--mesh", "pp=2,dp=2", "--batch", "8", "--seq", "16", "--hardware", "cpu-gloo"]
    emitted = tmp_path / "rank.py"
    assert main(["plan", *words, "--schedule", "1f1b", "--micro-batches", "4", "--emit", str(emitted)]) == 0
    assert "1f1b: 2 ranks along pp, 4 micro-batches of 2 samples" in capsys.readouterr().out
    assert "# stage 0" in emitted.read_text()
    assert main(["estimate", *words, "--micro-batch", "1", "--recompute", "full"]) == 0
    assert "4 micro-batches of 2 samples" in capsys.readouterr().out
    assert main(["plan", *words, "--micro-batches", "9"]) == 2
    assert main(["plan", *words[:2], "--mesh", "dp=2", *words[4:], "--schedule", "1f1b"]) == 2


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name, mesh", [("gpt2-tiny", "tp=2,pp=2"), ("llama-tiny", "pp=2,dp=2"), ("t5", "tp=2,pp=2")])
def test_a_simulated_step_is_that_of_one_device(name, mesh):
    plan = planned(trace_of(name), mesh, micro_batches=4, schedule="zbv" if mesh.startswith("pp") else "1f1b").plan
    check_step(name, plan)


@pytest.mark.slow
def test_a_simulated_step_that_computes_again():
    plan = planned(trace_of("gpt2-tiny"), "pp=4", options={"recompute": "full"}, micro_batches=4, schedule="zb_h1").plan
    assert plan.recomputed
    check_step("gpt2-tiny", plan)


def check_step(name: str, plan: Plan) -> None:
    """A simulated step gives loss and gradients of one device."""
    graph = trace_of(name)
    values = oracle.global_values(graph, *model_of(name))
    expected = oracle.one_device_step(graph, values)
    got = simulate_pipeline(graph, plan, values)
    assert abs(float(got.outputs["0"] - expected.outputs[0])) <= 1e-5 * max(1.0, abs(float(expected.outputs[0])))
    assert set(got.gradients) == set(expected.gradients)
    largest = max(gradient.norm() for gradient in expected.gradients.values())
    for parameter, gradient in expected.gradients.items():
        assert (got.gradients[parameter] - gradient).norm() <= 1e-5 * gradient.norm().clamp_min(1e-4 * largest), (
            parameter
        )


@pytest.mark.slow
def test_more_memory_is_no_worse():
    """Under each of these limits a plan is found, and none is slower than one with less memory."""
    model, inputs = build("gpt:hidden=1024,layers=8,heads=16,vocab=4096,seq=128", batch=16, seq=128, device="meta")
    options = dict(hardware="h100", precision="fp32", schedule="1f1b", micro_batches=4, baselines=False)
    limits = (2.2, 2.3, 2.4, 2.5, 2.6)
    seconds = [autopar.plan(model, "pp=2,dp=4", inputs, memory=f"{gib}GiB", **options).step_seconds for gib in limits]
    assert all(less >= (1 - SAME_STEP) * more for less, more in itertools.pairwise(seconds)), seconds


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_less_memory_is_no_faster(seed):
    rng = random.Random(seed)
    layers, batch, mesh = rng.randint(4, 8), rng.choice((8, 16)), rng.choice(("pp=2", "pp=2,dp=2", "pp=4,dp=2"))
    name = f"gpt:hidden={rng.choice((512, 1024))},layers={layers},heads=8,vocab={rng.choice((512, 4096))},seq=64"
    options = dict(hardware="h100", precision="fp32", schedule=rng.choice(("1f1b", "zb_h1")), baselines=False)
    model, inputs = build(name, batch=batch, seq=64, device="meta")
    asked = (name, batch, mesh, options)
    plan, before = autopar.plan(model, mesh, inputs, micro_batches=4, **options), 0.0
    for _ in range(3):
        assert plan.step_seconds >= (1 - SAME_STEP) * before, (seed, asked)
        before = max(before, plan.step_seconds)
        reserve = plan.memory.get(RESERVE, 0.0)
        limit = reserve + 0.9 * (plan.peak_bytes - reserve)
        try:
            plan = autopar.plan(model, mesh, inputs, micro_batches=4, memory=limit, **options)
        except MemoryInfeasibleError:
            break


@pytest.mark.slow
def test_a_refusal_takes_few_searches_within_a_limit(monkeypatch):
    """The search tries limits on a micro-batch's plan, each less than the one before, with one number of micro-batches,
    where plans at prices of memory do not fit."""
    limits, within = [], MicroBatchPlans.within

    def counted(self, limit):
        limits.append((self.micro_batches, limit))
        return within(self, limit)

    monkeypatch.setattr(MicroBatchPlans, "within", counted)
    with pytest.raises(MemoryInfeasibleError):
        planned(SMALL, "pp=2,dp=2", options={"memory_bytes": 1e5})
    assert len(limits) <= MOST_LIMITS and len({count for count, _ in limits}) <= 1
    assert all(less < more for (_, more), (_, less) in itertools.pairwise(limits))
