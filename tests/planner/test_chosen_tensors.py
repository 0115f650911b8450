"""Plans that are looked at in turn hold what each holds alone, though those of one choice share what it says."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from autopar.planner.objective.checkpoint_blocks import Blocks
from autopar.planner.objective.evaluate import evaluate
from autopar.planner.objective.memory_timeline import live_bytes
from autopar.planner.objective.player import stretch_of

from .test_timeline import TWO_BLOCKS, planned

CHOICES = 4


@pytest.mark.parametrize("strategy", ["zero1", "fsdp", "megatron_sp"])
def test_plans_in_turn_hold_what_each_holds_alone(strategy):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    found = planned(TWO_BLOCKS, "dp=2,tp=2", strategy)
    (problem, e), pricer = found.whole, found.pricer
    assert pricer.problem is problem
    plans = [e, Blocks(problem, pricer).at_level(e, "full")]
    while len(plans) < CHOICES:
        cls = rng.choice([c for c, options in problem.classes.items() if len(options.strategies) > 1])
        k = rng.randrange(len(problem.classes[cls].strategies))
        choice = e.choice | dict.fromkeys(problem.classes[cls].members, k)
        other = evaluate(problem, choice, pricer)
        if math.isfinite(other.seconds) and choice != e.choice:
            plans.append(other)
    for one in [*plans, *rng.sample(plans, len(plans))]:
        fresh = replace(problem)
        expected, live = live_bytes(fresh, one, replace(pricer, problem=fresh)), live_bytes(problem, one, pricer)
        assert live.order == expected.order and live.kinds.keys() == expected.kinds.keys()
        assert all(np.array_equal(bytes_, expected.kinds[kind]) for kind, bytes_ in live.kinds.items())
        assert stretch_of(problem, one, pricer) == stretch_of(fresh, one, replace(pricer, problem=fresh))
