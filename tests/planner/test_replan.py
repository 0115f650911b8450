"""A call of other sizes begins its stages where the first one does, so that no rows of experts travel between them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from autopar.api import entry as api
from autopar.frontend.export import Captured
from autopar.planner.pipeline.replan import plan_same_stages, with_owners
from autopar.plans.plan import Plan
from autopar.runtime.pipeline_check import border_of, check_pipeline
from autopar.simulate.compare import verify_plan
from autopar.simulate.pipeline import Lowered

from ..helpers.shared_experts import SharedExperts, gpus, inputs

EXACT = 1e-10


def leaves(captured: Captured) -> dict[str, str]:
    """Return the placeholders of parameters by their names."""
    roles = ((n.name, n.meta["role"]) for n in captured.graph.nodes if n.op == "placeholder")
    return {role.name: name for name, role in roles if role.kind == "parameter"}


def same_stages(captured: Captured, first, plan: Plan) -> Plan:
    """Plan another call of the model of a first one, whose parameters stay where they are."""
    here, there = leaves(captured), leaves(first.captured)
    fixed = {
        node: plan.sharding.leaves[there[name]] for name, node in here.items() if there[name] in plan.sharding.leaves
    }
    return plan_same_stages(captured, plan, replace(first.options, fixed=fixed, baselines=False), "model")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(12))
def test_other_sizes(seed):
    """A stage that begins between a router and its experts begins there again, whatever the new plan does."""
    print(f"seed {seed}")
    random = Random(seed)
    v, micro_batches, samples = random.choice([1, 2, 2]), random.choice([2, 4, 8]), 8 * random.choice([2, 4])
    model = SharedExperts(random.choice([4, 5, 8]), random.choice([4, 7]), 2, random.random() < 0.5, seed=seed)
    asked = dict(
        strategy="expert", schedule="interleaved_1f1b" if v > 1 else "1f1b", stages_per_rank=v, baselines=False,
        precision="fp32", hardware=gpus(), execution="eager",
    )  # fmt: skip
    mesh, later = "pp=2,ep=2", inputs(samples - random.choice([1, 2, 3, 5]), random.choice([8, 11]))
    first = api.search(model, mesh, inputs(samples), micro_batches=micro_batches, **asked)
    plan = with_owners(first.captured, first.plan)
    captured = api.search(model, mesh, later, micro_batches=1, **asked).captured
    again = same_stages(captured, first, plan)
    assert again.pipeline.cuts == plan.pipeline.cuts
    stages = Lowered.of(captured, again).stages
    check_pipeline(again.pipeline.orders, {stage: border_of(of_rank[0]) for stage, of_rank in enumerate(stages)})
    verified = verify_plan(captured, again, model, later)
    assert max(verified.errors.values()) <= EXACT, (verified.errors, verified.diverging)
