"""Stages that take their decisions from different plans give what one device gives: families x meshes x schedules,
plans drawn at random."""

from __future__ import annotations

import random
from functools import lru_cache

import pytest

from autopar.ir.mesh import Mesh
from autopar.passes.pipeline.micro_batch import MicroBatched, micro_batch
from autopar.planner.spmd.planned import Planned
from autopar.schedule import KINDS
from autopar.simulate.pipeline import simulate_pipeline
from tests.helpers import mixtures, staged

MICRO_BATCHES = 4


@lru_cache
def cut_batch(family: str) -> MicroBatched:
    return micro_batch(staged.family(family).captured, MICRO_BATCHES)


@lru_cache
def pool(family: str, mesh: str) -> tuple[Planned, ...]:
    return mixtures.plans_of(cut_batch(family), mesh)


def mixture(family: str, mesh: str, schedule: str, of_stage, cuts):
    captured, micro = staged.family(family).captured, cut_batch(family)
    return mixtures.mixture(captured, micro, pool(family, mesh), mesh, schedule, of_stage, cuts)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(48))
def test_random_plans_of_stages(seed):
    rng = random.Random(seed)
    family = ("gpt2", "llama", "mixtral")[seed % 3]
    mesh = rng.choice(("pp=2,dp=2", "pp=2,tp=2", "pp=4", "pp=2,dp=2,tp=2", "pp=4,dp=2"))
    schedule = rng.choice(("1f1b", "interleaved_1f1b", "zb_h1", "zbv"))
    stages = Mesh.parse(mesh).size("pp") * (KINDS[schedule].chunks or 2)
    case = staged.family(family)
    drawn = []
    for _ in range(100):  # what would be terms of a sum cannot pass: cuts there are drawn anew
        cuts = staged.random_cuts(cut_batch(family).captured, stages, rng.randrange(10**6))
        of_stage = [rng.randrange(len(pool(family, mesh))) for _ in range(stages)]
        if found := mixture(family, mesh, schedule, of_stage, cuts):
            drawn.append(found[0])
            break
    assert drawn, "nothing passes between any two plans"
    note = family, mesh, schedule, of_stage, cuts
    case.check(simulate_pipeline(case.captured, drawn[0], case.values, check=True), note)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family, mesh", [("gpt2", "pp=2,dp=2"), ("llama", "pp=2,tp=2"), ("mixtral", "pp=2,dp=2,tp=2")])
def test_a_mixture_of_one_plan_is_that_plan(family, mesh):
    (cut,) = staged.even_cuts(cut_batch(family).captured, 2)
    for i, one in enumerate(pool(family, mesh)):
        (_, e), (_, found) = one.whole, mixture(family, mesh, "1f1b", (i, i), (cut,))
        assert found.evaluation == e and not found.blocks
