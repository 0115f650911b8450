"""Batches that the number of micro-batches does not divide: sizes differ by at most one sample, and nothing else
differs."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar.api import entry as api
from autopar.hardware.profile import load
from autopar.passes.pipeline.micro_batch import micro_batch
from autopar.planner.problem.recipes import RECIPES, Restriction
from autopar.planner.spmd.plan import solvers_of
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.plans.pipeline import sizes_of
from autopar.schedule import KINDS, play
from autopar.schedule.catalogue import make
from autopar.simulate.oracle import global_values
from autopar.simulate.pipeline import simulate_pipeline
from tests.helpers import gloo, staged
from tests.runtime import tiny
from tests.runtime.parity import assert_close, device_mesh, pair

functional = nn.functional


@given(st.integers(1, 200), st.integers(1, 60))
def test_sizes(samples, micro_batches):
    sizes = sizes_of(samples, min(samples, micro_batches))
    assert sum(sizes) == samples and sizes[0] - sizes[-1] in (0, 1) and sorted(sizes, reverse=True) == [*sizes]


LOSSES = {
    "mean": lambda y, target: (y - 1).square().mean(),
    "mean over valid tokens": lambda y, target: functional.cross_entropy(y.flatten(0, 1), target.flatten()),
    "sum": lambda y, target: functional.cross_entropy(y.flatten(0, 1), target.flatten(), reduction="sum"),
    "mean and a norm": lambda y, target: y.square().mean() + 0.1 * y.sum(-1).exp().mean() + 0.5,
}


class Model(nn.Module):
    """Two linear layers with dropout between them, a loss, and the logits beside it."""

    def __init__(self, loss: str, dropout: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.loss, self.dropout = nn.Linear(6, 8), nn.Linear(8, 4), LOSSES[loss], dropout

    def forward(self, x, target):
        y = self.second(functional.dropout(self.first(x).relu(), self.dropout))
        return dict(loss=self.loss(y, target), logits=y)


def _batch(samples: int) -> dict:
    torch.manual_seed(1)
    target = torch.randint(0, 4, (samples, 3))
    target[torch.rand(samples, 3) < 0.4] = -100
    return dict(x=torch.randn(samples, 3, 6), target=target)


@lru_cache
def _case(samples: int, loss: str, dropout: float) -> staged.Case:
    return staged.Case.of(Model(loss, dropout), _batch(samples))


@settings(max_examples=8, deadline=None)
@given(st.sampled_from([5, 7, 10]), st.data(), st.sampled_from(sorted(LOSSES)), st.sampled_from([0.0, 0.5]))
def test_any_batch_in_any_number_of_micro_batches(samples, data, loss, dropout):
    """Losses, gradients, random numbers and outputs are those of the whole batch."""
    count = data.draw(st.integers(1, samples))
    case = _case(samples, loss, dropout)
    micro = micro_batch(case.captured, count)
    assert (micro.smaller is None) == (samples % count == 0) and len(micro.sizes) == count
    ops = staged.forward_ops(micro.captured)
    cuts = (data.draw(st.sampled_from(ops[1:])),)
    stages = staged.cut(micro.captured.graph_module, cuts)
    case.check(staged.play_stages(micro, stages, case.values, cuts), f"{samples} in {count}, cut at {cuts}")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", sorted(KINDS))
def test_every_schedule(schedule):
    case = staged.family("gpt2", batch=7)
    micro = micro_batch(case.captured, 4)
    mesh = "pp=2,dp=2" if schedule in ("1f1b", "zbv") else "pp=2"
    step = simulate_pipeline(case.captured, staged.plan_of(micro, mesh, schedule), case.values, check=False)
    case.check(step, schedule)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name, samples, count, mesh, strategy", [
    ("gpt2", 10, 4, "pp=2,dp=2", "ddp"), ("llama", 7, 2, "pp=2,dp=2", "fsdp"),
    ("vit", 7, 2, "pp=2,dp=2", "zero1"), ("bert", 5, 3, "pp=2,tp=2", "megatron_sp"), ("t5", 5, 2, "pp=2,dp=2", "auto"),
    ("llama", 10, 4, "pp=2,dp=2,tp=2", "auto"),
])  # fmt: skip
def test_strategies(name, samples, count, mesh, strategy):
    case = staged.family(name, batch=samples)
    micro = micro_batch(case.captured, count)
    step = simulate_pipeline(case.captured, staged.plan_of(micro, mesh, "zb_h1", strategy=strategy), case.values)
    case.check(step, f"{name} {samples} in {count}")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", [None, *(name for name, recipe in RECIPES.items() if name != "hsdp")])
def test_what_is_planned_fits_both_sizes(strategy):
    """Every strategy of an op that is left is offered by the op's rule for the smaller graph too."""
    case = staged.family("gpt2", batch=7)
    micro = micro_batch(case.captured, 2)  # 4 and 3 samples
    options = PlanOptions(load("cpu-gloo"), strategy=strategy, overlay=micro.smaller.graph)
    mesh = autopar.Mesh.parse("dp=2,tp=2")
    (solver, *_) = solvers_of(micro.captured, mesh, options)
    masks, fits = solver.allowed(Restriction.of(strategy, mesh)), solver.problem.fits
    assert any(not fit.all() for fit in fits.values()), "the test could not tell"
    assert all(masks[cls].any() and not (masks[cls] & ~fit).any() for cls, fit in fits.items())


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["gpipe", "1f1b", "zb_h1"]), st.integers(2, 4), st.integers(2, 9), st.data())
def test_smaller_micro_batches_take_less(schedule, ranks, count, data):
    samples = data.draw(st.integers(count, 5 * count))
    sizes = sizes_of(samples, count)
    orders = make(schedule, ranks, count, 1)
    even, uneven = play(orders), play(orders, shares=[size / sizes[0] for size in sizes])
    assert uneven.seconds <= even.seconds and (uneven.seconds == even.seconds) == (sizes[0] == sizes[-1])
    assert sum(uneven.busy) == pytest.approx(sum(even.busy) * samples / (count * sizes[0]))


@pytest.mark.slow
def test_the_plan_counts_them(tmp_path):
    model, batch = tiny.gpt2(batch=10)
    planned = api.search(model, "pp=2", batch, hardware="cpu-gloo", baselines=False, micro_batches=4, schedule="1f1b")
    plan = planned.plan
    assert "4 micro-batches of 3 and 2 samples" in str(plan) and plan.pipeline.samples == 10
    assert plan.pipeline.played().seconds <= plan.step_seconds and plan.bound <= plan.step_seconds
    _, larger = tiny.gpt2(batch=12)
    again = api.search(
        model, "pp=2", larger, hardware="cpu-gloo", baselines=False, micro_batches=4, schedule="1f1b"
    ).plan
    assert plan.step_seconds < again.step_seconds and again.pipeline.samples == 0
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded.pipeline == plan.pipeline
    step = simulate_pipeline(planned.captured, loaded, global_values(planned.captured, model, batch))
    assert abs(step.outputs["0"] - model(**batch).loss) < 1e-5


@pytest.mark.slow
def test_a_deep_model_is_planned_by_few_blocks():
    model, batch = tiny.own("gpt:hidden=16,layers=9,heads=2,vocab=32", batch=7, seq=8)
    planned = api.search(model, "pp=2,dp=2", batch, hardware="cpu-gloo", baselines=False, micro_batches=2)
    assert planned.captured.compact is not None and planned.micro.smaller is not None
    step = simulate_pipeline(planned.captured, planned.plan, global_values(planned.captured, model, batch))
    assert abs(step.outputs["0"] - model(**batch).loss) < 1e-5


def _train(rank: int) -> float:
    """Training on 7 samples in 4, a shorter last batch, outputs, and an evaluation."""
    model, batch = tiny.gpt2(batch=7, n_layer=1)
    batch["labels"] = batch["input_ids"].clone()
    for i in range(7):
        batch["labels"][i, : 2 * i] = -100
    parallel, reference = pair(
        model, device_mesh("pp=2,dp=2"), batch, micro_batches=4, schedule="1f1b", outputs="everywhere"
    )
    for samples in (7, 5, 7, 2):
        part = {name: value[:samples] for name, value in batch.items()}
        output, expected = parallel(**part), reference(**part)
        assert_close(output.loss, expected.loss, f"loss of {samples}", 1e-4)
        assert_close(output.logits, expected.logits, f"logits of {samples}", 1e-4)
        output.loss.backward()
        expected.loss.backward()
    for name, parameter in parallel.named_parameters():
        assert_close(parameter.grad, reference.get_parameter(name).grad, name, 1e-4)
    with torch.no_grad():
        assert_close(parallel(**batch).loss, reference(**batch).loss, "evaluation", 1e-4)
    return output.loss.item()


@pytest.mark.slow  # tests/runtime/test_micro_batches.py runs uneven ones on two processes
@pytest.mark.gloo
def test_on_four_processes():
    assert len({*gloo.run(4, _train, seconds=300)}) == 1
