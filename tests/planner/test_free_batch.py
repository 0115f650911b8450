"""The batch as a choice: the one with the most tokens a second of those that fit."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.api import entry as api
from autopar.errors import InputError, MemoryInfeasibleError
from autopar.models.registry import build
from autopar.planner.free_batch import samples_and_tokens, with_samples
from autopar.plans.plan import Plan
from tests.helpers import kept

MODEL = "gpt:hidden=256,layers=1,heads=4,vocab=512,seq=64"
OPTIONS = dict(hardware="h100", precision="bf16", baselines=False, fixes=False)


def of_batch(samples: int, **options):
    model, inputs = build(MODEL, batch=samples, seq=64, device="meta")
    return api.search(model, "dp=4", inputs, cache=kept.captures(), **OPTIONS, **options)


def test_a_call_of_other_samples_has_the_same_inputs():
    mask = torch.arange(6).reshape(3, 2)
    inputs = {"input_ids": torch.arange(12).reshape(3, 4), "mask": mask, "scale": torch.ones(5), "flag": True}
    assert samples_and_tokens(inputs) == (3, 12)
    _, more = with_samples(inputs, 7)
    assert more["flag"] is True and more["scale"] is inputs["scale"]
    assert more["mask"].tolist() == [mask[i % 3].tolist() for i in range(7)]
    assert samples_and_tokens(with_samples(inputs, 1)) == (1, 4)
    with pytest.raises(InputError):
        samples_and_tokens({"flag": True})


@pytest.mark.slow
def test_the_batch_is_the_best_of_those_that_were_tried():
    """Memory for a batch of some thousands: more gain nothing, or do not fit."""
    found = of_batch(1024, memory="2.4GiB", tokens_per_second=True)
    plan = found.plan
    assert len(plan.batches) > 1 and plan.peak_bytes <= 2.4 * 2**30
    best = max(plan.batches, key=lambda b: b.tokens_per_second)
    assert best.samples == plan.samples and best.step_seconds == plan.step_seconds
    assert best.tokens == 64 * plan.samples and f"{best.tokens_per_second:,.0f} tokens a second" in str(plan)
    alone = of_batch(plan.samples, memory="2.4GiB")
    assert alone.plan.step_seconds == plan.step_seconds
    assert Plan.from_json(plan.to_json()) == plan and "batches tried" in str(plan)
    assert "batches" not in alone.plan.to_json()


def test_a_smaller_batch_is_taken_where_the_given_one_does_not_fit():
    smallest = of_batch(64, strategy="ddp").plan.peak_bytes
    options = dict(strategy="ddp", micro_batches=1, recompute="none")
    plan = of_batch(128, memory=smallest, tokens_per_second=True, **options).plan
    assert plan.samples == 64 and plan.batches[-1].step_seconds is None and "does not fit" in str(plan)


@pytest.mark.slow
def test_what_fits_with_no_batch_is_refused():
    with pytest.raises(MemoryInfeasibleError):
        model, inputs = build(MODEL, batch=2, seq=64, device="meta")
        autopar.plan(model, "dp=2", inputs, memory="1GiB", tokens_per_second=True, **OPTIONS)
