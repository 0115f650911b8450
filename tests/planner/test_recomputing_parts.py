"""The parts of a cut that computes other ops again, or has others beside exchanges, made of those known, equal those
computed from nothing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autopar import compiler
from autopar.hardware.profile import load
from autopar.models import registry
from autopar.planner.objective.beside_exchange import with_beside
from autopar.planner.objective.checkpoint_blocks import Blocks, taking
from autopar.planner.objective.memory_timeline import live_bytes
from autopar.planner.pipeline.stage_costs import Part, Parts
from tests.planner.test_beside_exchange import planned as beside
from tests.planner.test_segments import chain_of, planned

DRAWS = 6  # of cuts and of what is computed again


def numbers(part: Part) -> tuple:
    """All that a part holds, to the last digit."""
    loads = [(x.waited.tolist(), x.hidden.tolist(), x.host) for w in part.work.values() for x in (w.every, w.once)]
    return replace(part, work={}), loads, [(kind, w.compute, w.recompute) for kind, w in part.work.items()]


@pytest.mark.parametrize("options", [
    {}, {"mesh": "pp=2,dp=2,tp=2", "strategy": "megatron_sp"}, {"strategy": "zero1"}, {"strategy": "fsdp"},
    {"micro_batches": 1, "strategy": "zero2"}, {"hardware": load("h100")},
], ids=lambda options: " ".join(map(str, options)))  # fmt: skip
def test_parts_are_those_computed_from_nothing(options):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    size = f"hidden={rng.choice([32, 48])},layers={rng.randint(2, 4)},heads=4,vocab={rng.choice([64, 70])}"
    graph = compiler.trace(*registry.build(f"gpt:{size},seq=16", batch=8, seq=16, device="meta"), precision="bf16")
    found = planned(graph, **options)
    (problem, e), pricer, starts = found.whole, found.pricer, chain_of(found).starts
    steps = Blocks(problem, replace(pricer, problem=problem)).recomputation(e, found.solver.free)
    assert steps
    for _ in range(DRAWS):
        cuts = tuple(name for name in starts if rng.random() < 0.5)
        is_repeated, stretch = rng.random() < 0.5, rng.uniform(1, 2)
        base = Parts(problem, e, pricer, cuts, is_repeated)
        before = list(map(numbers, base.found))
        counts = {block: rng.randint(0, len(steps)) for block in {step.block for step in steps}}
        own = {block: [step for step in steps if step.block == block] for block in counts}
        again = taking(e, [(step, 1) for block, count in counts.items() for step in own[block][:count]])
        live = rng.choice([None, live_bytes(problem, again, pricer)])
        for one in (again, taking(e, [(step, 1) for step in steps]), e):
            expected = Parts(problem, one, pricer, cuts, is_repeated, None, stretch)
            other = base.under(one, live if one is again else None, stretch)
            assert list(map(numbers, other.found)) == list(map(numbers, expected.found))
            assert other.tied == expected.tied and other.recomputed == expected.recomputed
        assert base.under(e).where is base.where, "nothing was kept"
        assert list(map(numbers, base.found)) == before, "parts that others were made of have changed"


def test_parts_with_other_products_beside_exchanges():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    found = beside(3)
    (problem, e), pricer = found.whole, found.pricer
    apart = with_beside(e, ())
    assert len(e.beside) > 2
    for _ in range(DRAWS):
        cuts = tuple(name for name in chain_of(found).starts if rng.random() < 0.5)
        base = Parts(problem, rng.choice([apart, e]), pricer, cuts, True)
        before = list(map(numbers, base.found))
        for one in (apart, e, with_beside(apart, [each for each in e.beside if rng.random() < 0.5])):
            other, expected = base.under(one), Parts(problem, one, pricer, cuts, True)
            assert list(map(numbers, other.found)) == list(map(numbers, expected.found))
            seconds = sum(part.work[kind].every.hidden.sum() for part in other.found for kind in part.work)
            waited = sum(part.work[kind].every.hidden.sum() for part in base.under(apart).found for kind in part.work)
            assert seconds - waited == pytest.approx(sum(each.seconds for each in one.beside))
        assert base.under(e).where is base.where, "nothing was kept"
        assert list(map(numbers, base.found)) == before, "parts that others were made of have changed"
