"""Micro-batches without stages, of losses that need all samples: all forwards, the tail, all backwards, exactly."""

from __future__ import annotations

from functools import cache
from random import Random

import pytest
import torch
from torch import Tensor, nn

from autopar.hardware.profile import load
from autopar.ir.mesh import Mesh
from autopar.planner.spmd.batch import in_micro_batches
from autopar.planner.spmd.plan import search
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.planner.spmd.planned import Planned
from autopar.simulate.pipeline import simulate_pipeline
from tests.helpers import staged, whole_batch

MODELS = ("z_loss", "mixtral", "qwen3_moe", *whole_batch.LOSSES)
MESHES = ("ep=2", "dp=2", "dp=2,tp=2", "dp=2,ep=2", "tp=3")


class Router(nn.Module):
    """Experts (4, 6, 6) behind a router with the losses of Switch Transformers and ST-MoE: balance, and z of logits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts = nn.Linear(6, 4), nn.Parameter(torch.randn(4, 6, 6))

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        logits, valid = self.router(x), mask[..., None]
        shares = logits.softmax(-1)
        taken = nn.functional.one_hot(shares.argmax(-1), 4).to(x.dtype) * valid
        mean = (shares * valid).sum((0, 1)) / valid.sum()
        balance = 4 * (taken.sum((0, 1)) / valid.sum() * mean).sum()
        z = (logits.logsumexp(-1).square() * mask).sum() / mask.sum()
        y = torch.einsum("bse,bsd,edk->bsk", taken * shares, x, self.experts)
        loss = (y.square() * valid).sum() / valid.sum()
        return dict(loss=loss + 0.3 * balance + 0.1 * z, balance=balance, z=z)


def _router(samples: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """A batch of which sample i has i + 1 tokens that count, at most 5."""
    mask = (torch.arange(5) <= torch.arange(samples)[:, None]).double()
    return Router(), dict(x=torch.randn(samples, 5, 6), mask=mask.float())


@cache
def case_of(name: str, samples: int) -> staged.Case:
    if name in whole_batch.LOSSES:
        return staged.Case.of(whole_batch.Pairs(name), whole_batch.pairs(samples))
    model, inputs = _router(samples) if name == "z_loss" else whole_batch.balanced(name, samples)
    return staged.Case.of(model, staged.ragged(inputs))


def planned(case: staged.Case, count: int, mesh: str, **asked) -> Planned:
    options = PlanOptions(load("cpu-gloo"), baselines=False, micro_batches=count, **asked)
    return in_micro_batches(case.captured, options, lambda one, o: search(one, Mesh.parse(mesh), o))


def check(name: str, samples: int, count: int, mesh: str, note: object = "", **asked) -> None:
    case = case_of(name, samples)
    plan = planned(case, count, mesh, **asked).plan
    step = simulate_pipeline(case.captured, plan, case.values)
    case.check(step, f"{note} {name}, {count} of {samples} samples on {mesh} {asked}")
    assert step.in_flight == (count,) and "all forwards before any backward" in str(plan)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_losses_of_all_samples(name, mesh):
    is_stacked = name not in ("z_loss", *whole_batch.LOSSES)
    for samples, count in ((6, 3), (7, 3)):
        check(name, samples, count, mesh, strategy="expert" if is_stacked and "ep" in mesh else None)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_numbers_strategies_and_recomputation(seed):
    random = Random(seed)
    name, samples = random.choice(MODELS), random.choice([4, 5, 6, 8])
    count, mesh = random.randint(2, samples), random.choice(MESHES[:3])
    strategy, recompute = random.choice(["ddp", "fsdp", "zero1", None]), random.choice(["none", "full", "auto"])
    print(f"seed {seed}: {name}, {count} of {samples} on {mesh}, {strategy}, {recompute}")
    check(name, samples, count, mesh, f"seed {seed}", strategy=strategy, recompute=recompute)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["siglip", "mixtral"])
def test_one_micro_batch_has_no_tail(name):
    plan = planned(case_of(name, 6), 1, "dp=2").plan
    assert plan.pipeline.is_one_program and "all forwards" not in str(plan)
