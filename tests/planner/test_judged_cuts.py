"""A cut that several searches lead to is evaluated once, and as if it had been met for the first time."""

from __future__ import annotations

import itertools
import math

import pytest

from .test_pipeline import planned

GPT = "gpt:layers=4,hidden=64,heads=4,vocab=128"


@pytest.mark.parametrize("share", [2.0, 0.9])
def test_a_cut_is_judged_alike_whenever_it_is_met(share):
    roomy = planned(GPT, "pp=2,dp=2", micro_batches=4, schedule="1f1b")
    limit = share * roomy.plan.peak_bytes
    found = planned(GPT, "pp=2,dp=2", options={"memory_bytes": limit}, micro_batches=4, schedule="1f1b")
    best, search = found.stages.best, found.stages.best.search
    inner, _, again = search.prepared(best.base)
    cost = best.evaluated.pipeline
    pipeline = search.pipeline(cost.schedule, cost.stages_per_rank, cost.cuts)
    fastest = search.as_it_is(inner, pipeline)[0].step_seconds
    alone = search._made_to_fit(inner, pipeline, again, math.inf).evaluated
    assert alone.peak_bytes <= limit
    assert (alone.step_seconds > fastest) == (share < 1)
    for order in itertools.permutations([math.inf, 0.5 * fastest, 2 * alone.step_seconds]):
        search._within.clear()
        for slowest in order:
            met = search._within_memory(inner, pipeline, again, slowest).evaluated
            if slowest > alone.step_seconds:
                assert (met.step_seconds, met.memory) == (alone.step_seconds, alone.memory)
            else:
                assert met.step_seconds >= slowest
    assert search._within_memory(inner, pipeline, again, math.inf) is search._within_memory(inner, pipeline, again, 0.0)
