"""Models with stretches without gradients and under autocast, on several devices, against the model itself."""

from __future__ import annotations

import pytest
import torch

from autopar.simulate.compare import verify_model

from ..runtime import tiny
from . import test_explicit_casts as casts
from . import test_grad_regions as regions
from .test_random_regions import GRAD_REGIONS, REGIONS, program

MESHES = [("dp=2", "ddp"), ("dp=2", "zero3"), ("dp=2,tp=2", "megatron")]
RUNS = [regions.writes_that_are_read, regions.nearest_code, regions.teacher_follows, regions.clamped_weights,
        regions.gradients_inside, casts.without_gradients_inside, casts.off_inside]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh, strategy", MESHES)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_a_step(run, mesh, strategy):
    torch.manual_seed(0)
    model, x = regions.Net(run), torch.randn(4, 4, 4)
    before = {name: p.clone() for name, p in model.named_parameters()}
    report = verify_model(model, (x,), mesh, strategy=strategy)
    assert report.match, report
    assert max(report.sent_bytes) > 0
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh, strategy", MESHES)
def test_autocast_around_a_language_model(mesh, strategy):
    model, inputs = tiny.llama()
    with casts.low():
        report = verify_model(model, inputs, mesh, strategy=strategy)
    assert report.precision == "bf16" and report.match, report


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))])
@pytest.mark.parametrize("kind", ["gradients", "gradients and autocast"])
def test_nests(seed, kind):
    torch.manual_seed(seed)
    model = regions.Net(program(seed, GRAD_REGIONS if kind == "gradients" else REGIONS[:5]))
    x, (mesh, strategy) = torch.randn(2, 3, 4), MESHES[seed % 3]
    try:
        model(x).backward()
    except RuntimeError:
        pytest.skip("eager torch refuses the program")
    report = verify_model(model, (x,), mesh, strategy=strategy)
    assert report.match, report
