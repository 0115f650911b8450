"""Tests of profiles of processes that share cores."""

from __future__ import annotations

import dataclasses

import pytest

import autopar
from autopar.cost.collectives import CollectiveCost
from autopar.hardware.cores import on_cores
from autopar.hardware.profile import Curve, load
from autopar.ir.mesh import Mesh
from autopar.models import build
from tests.helpers.two_tiers import two_tiers


def test_devices_with_cores_of_their_own_stay_as_they_are():
    for name in ("h100", "a100"):
        assert on_cores(load(name), 0.5) == load(name)
    assert on_cores(load("cpu-gloo"), 1.0) == on_cores(load("cpu-gloo"), 8.0) == load("cpu-gloo")


@pytest.mark.parametrize("cores", [0.5, 0.25])
def test_a_step_takes_as_much_longer_as_processes_share_a_core(cores):
    """All that a process does takes longer: the whole step does, whatever it consists of."""
    seconds = []
    for hardware in (load("cpu-gloo"), on_cores(load("cpu-gloo"), cores)):
        model, inputs = build("gpt2-tiny", batch=8, seq=32)
        plan = autopar.plan(model, "dp=2,tp=2", inputs, hardware=hardware, strategy="megatron", baselines=False)
        seconds.append(plan.step_seconds)
    assert seconds[1] == pytest.approx(seconds[0] / cores, rel=1e-9)
    assert f"cpu-gloo at {cores:g} cores a process" in str(plan)


def test_what_leaves_the_machine_stays_and_what_was_measured_within_takes_longer():
    whole = dataclasses.replace(
        two_tiers(2),
        cores_per_device=1.0,
        curves=tuple(Curve("all_reduce", 2, stride, (1e3, 1e6), (1e-4, 1e-2)) for stride in (1, 2)),
    )
    half = on_cores(whole, 0.5)
    assert half.links[1] == whole.links[1]
    assert [curve.seconds for curve in half.curves] == [(2e-4, 2e-2), (1e-4, 1e-2)]
    mesh, asked = Mesh.parse("dp=2,tp=2"), ("all_reduce", ("tp",), 1e5)
    assert CollectiveCost(half, mesh).seconds(*asked) == pytest.approx(2 * CollectiveCost(whole, mesh).seconds(*asked))
    assert on_cores(half, 1.0).flops_per_second == whole.flops_per_second
