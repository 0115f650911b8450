"""Steps with a tail on simulated ranks: losses of all samples are one device's, in any number of micro-batches."""

from __future__ import annotations

from functools import cache
from random import Random

import pytest

from autopar.errors import MicroBatchError
from autopar.passes.pipeline.micro_batch import micro_batch
from autopar.schedule import register_schedule
from autopar.schedule.catalogue import KINDS
from autopar.simulate.pipeline import simulate_pipeline
from tests.helpers import staged, whole_batch


def _then(*kinds: str):
    """Return orders in which a rank runs its stages' forwards, then each of the kinds of backward of its stages, in
    reverse, from the last micro-batch to the first."""

    def orders(stages, m):
        return [
            [f"{s}F{i}" for s in own for i in range(m)]
            + [f"{s}{kind}{i}" for kind in kinds for s in reversed(own) for i in reversed(range(m))]
            for own in stages
        ]

    return orders


@pytest.fixture(scope="module", autouse=True)
def schedules():
    """All forwards first, otherwise than GPipe: the last micro-batch's backward first, in parts, two stages a rank."""
    register_schedule("last_first", _then("B"))
    register_schedule("in_parts", _then("I", "W"))
    register_schedule("looped_forwards", _then("B"), stages_per_rank=2)
    register_schedule("v_forwards", _then("I", "W"), stages_per_rank=2, v_shaped=True)
    yield
    for name in FORWARDS_FIRST[1:]:
        KINDS.pop(name)


FORWARDS_FIRST = ("gpipe", "last_first", "in_parts", "looped_forwards", "v_forwards")
MODELS = ("mixtral", "qwen3_moe", *whole_batch.LOSSES)
MESHES = ("pp=2", "pp=2,dp=2", "pp=2,ep=2", "pp=4", "pp=2,tp=2")


@cache
def case_of(name: str, samples: int) -> staged.Case:
    if name in whole_batch.LOSSES:
        return staged.Case.of(whole_batch.Pairs(name), whole_batch.pairs(samples))
    model, inputs = whole_batch.balanced(name, samples)
    return staged.Case.of(model, staged.ragged(inputs))


def check(name: str, samples: int, count: int, mesh: str, schedule: str, note: object = "", **planning) -> None:
    case = case_of(name, samples)
    micro = micro_batch(case.captured, count)
    plan = staged.plan_of(micro, mesh, schedule, **planning)
    step = simulate_pipeline(case.captured, plan, case.values)
    case.check(step, f"{note} {name}, {count} of {samples} samples, {schedule} on {mesh} {planning}")
    assert step.in_flight[-1] == count


@pytest.mark.sampled(1)
@pytest.mark.parametrize("samples, count", [(7, 3), (8, 4)])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_gpipe_on_every_mesh(name, mesh, samples, count):
    strategy = "auto" if "ep" not in mesh or name in whole_batch.LOSSES else "expert"
    check(name, samples, count, mesh, "gpipe", strategy=strategy)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(20))
def test_schedules_and_numbers(seed):
    """Any schedule that ends its forwards first, any number of micro-batches, wherever stages begin."""
    random = Random(seed)
    name, schedule = random.choice(MODELS), FORWARDS_FIRST[seed % len(FORWARDS_FIRST)]
    samples, mesh = random.choice([5, 6, 8]), random.choice(("pp=2", "pp=2,dp=2", "pp=4"))
    count = random.randint(2, samples)
    print(f"seed {seed}: {name}, {count} of {samples}, {schedule} on {mesh}")
    stages = (4 if "pp=4" in mesh else 2) * (2 if schedule in FORWARDS_FIRST[3:] else 1)
    cuts = staged.random_cuts(micro_batch(case_of(name, samples).captured, count).captured, stages, seed)
    check(name, samples, count, mesh, schedule, f"seed {seed}", cuts=cuts)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1"])
def test_strategies_and_recomputation(strategy):
    check("mixtral", 8, 2, "pp=2,dp=2", "gpipe", strategy=strategy, recompute="full")


def test_one_forward_a_micro_batch():
    """Nothing runs a second time: a rank's collectives are those of as many forwards and backwards."""
    case = case_of("mixtral", 8)
    micro = micro_batch(case.captured, 4)
    plan = staged.plan_of(micro, "pp=2,dp=2", "gpipe", strategy="ddp")
    sends = simulate_pipeline(case.captured, plan, case.values).sends
    assert sends[0, "forward"] % 4 == 0 and sends[1, "backward"] % 4 == 0


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zbv", "interleaved_1f1b"])
def test_a_schedule_that_cannot_is_refused_when_it_is_lowered(schedule):
    case = case_of("clip", 6)
    micro = micro_batch(case.captured, 3)
    with pytest.raises(MicroBatchError) as caught:
        simulate_pipeline(case.captured, staged.plan_of(micro, "pp=2", schedule), case.values)
    assert "gpipe" in caught.value.fix and schedule in caught.value.message
