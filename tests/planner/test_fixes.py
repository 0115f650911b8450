"""Tests of what is offered instead of a plan that does not fit: each fix does what it says when it is asked for."""

from __future__ import annotations

import re

import pytest

import autopar
from autopar.api import entry as api
from autopar.cli.main import main
from autopar.errors import CaptureError, MemoryInfeasibleError
from autopar.ir.mesh import Mesh
from autopar.models import registry
from autopar.planner import remedies
from autopar.planner.spmd.plan import search as plan_search
from autopar.planner.spmd.plan_options import PlanOptions

from .planning import captured, toy

MODEL = "mlp:hidden=64,layers=4"
MACHINE = toy(flops=1e12, memory=1e12, link=1e11, bucket=1 << 16)
BATCH = 2048


def planned(mesh="dp=2", batch=BATCH, **options) -> autopar.Plan:
    model, inputs = registry.build(MODEL, batch=batch, seq=1)
    return api.plan(model, mesh, inputs, hardware=MACHINE, baselines=False, **options)


def refused(**options) -> MemoryInfeasibleError:
    with pytest.raises(MemoryInfeasibleError) as caught:
        planned(**options)
    return caught.value


@pytest.fixture(scope="module")
def ddp() -> autopar.Plan:
    return planned(strategy="ddp", recompute="none")


@pytest.fixture(scope="module")
def error(ddp) -> MemoryInfeasibleError:
    """Return the error of data parallelism in three quarters of what it needs."""
    return refused(strategy="ddp", recompute="none", memory=0.75 * ddp.peak_bytes)


def test_the_error_says_what_is_missing_of_what(error, ddp):
    assert error.missing_bytes == pytest.approx(0.25 * ddp.peak_bytes, abs=2)
    assert error.breakdown == pytest.approx(ddp.at_peak)
    assert f"breakdown: parameters {error.breakdown['parameters'] / 1024:.1f} KiB, " in str(error)


def test_the_cheapest_come_first_and_are_in_the_text(error):
    fitting = [fix for fix in error.fixes if fix.fits]
    costs = [fix.step_seconds * fix.devices for fix in fitting]
    assert any("micro_batches" in fix.argument for fix in fitting)
    assert len(fitting) >= 3 and costs == sorted(costs) and error.fixes[: len(fitting)] == tuple(fitting)
    assert error.fix.startswith(str(fitting[0])) and f"fix: {fitting[0].argument} (" in str(error)
    missing = [fix.missing_bytes for fix in error.fixes[len(fitting) :]]
    assert missing == sorted(missing) and 0 not in missing


def test_what_is_said_to_fit_does_at_that_price(error, ddp):
    """Every fix but adapters, planned as it says; searches for fixes stop at a larger gap."""
    limit = 0.75 * ddp.peak_bytes
    asked = {"strategy": "ddp", "recompute": "none", "memory": limit}
    checked = 0
    for fix in error.fixes:
        changed = dict(re.findall(r"(\w+)=\"?([^\" ]+)", fix.argument.partition(" of ")[0]))
        if not fix.fits or "adapt" in changed:
            continue
        passes = int(changed.pop("micro_batches", 1))
        plan = planned(micro_batches=passes, **asked | changed)
        assert plan.step_seconds == pytest.approx(fix.step_seconds, rel=remedies.SEARCH.gap)
        assert plan.peak_bytes <= limit and fix.peak_bytes <= limit and plan.mesh.devices == fix.devices
        checked += 1
    assert checked >= 3


@pytest.mark.slow
def test_adapters_are_offered_where_optimizer_state_does_not_fit():
    """With little in the batch, and one device, only fewer trained parameters help beside more devices."""
    whole = planned(mesh="dp=1", batch=1, recompute="none")
    found = refused(mesh="dp=1", batch=1, memory=0.6 * whole.peak_bytes).fixes
    assert [fix.option for fix in found if fix.fits] == ["--lora r=16", "--mesh dp=2"]
    lora = autopar.LoRA(r=16, target_modules="all-linear")
    plan = planned(mesh="dp=1", batch=1, memory=0.6 * whole.peak_bytes, adapt=[lora])
    assert plan.step_seconds == pytest.approx(found[0].step_seconds, rel=remedies.SEARCH.gap)


def test_next_stages_of_zero():
    def stages(strategy):
        request = remedies.Refused(None, Mesh.parse("dp=2,tp=2"), PlanOptions(MACHINE, strategy=strategy), True, None)
        return [change.options.strategy for change in remedies._higher_stages(request)]

    assert stages("zero1") == ["zero2", "fsdp"] and stages("zero3") == stages(None) == []
    assert stages("hsdp") == ["fsdp"] and stages("tp") == [f"megatron+{stage}" for stage in ("zero1", "zero2", "fsdp")]
    assert stages("megatron_sp+zero2") == ["megatron_sp+fsdp"]


@pytest.mark.slow
def test_a_change_that_cannot_be_planned_is_left_out():
    def fails(more):
        raise CaptureError("no such model")

    graph, mesh = captured(MODEL, BATCH, 1), Mesh.parse("dp=2")
    options = PlanOptions(MACHINE, memory_bytes=1e6, strategy="ddp", baselines=False)
    with pytest.raises(MemoryInfeasibleError) as caught:
        plan_search(graph, mesh, options)
    found = remedies.with_fixes(caught.value, remedies.Refused(graph, mesh, options, False, fails))
    assert found.message == caught.value.message and found.fixes
    assert not [fix for fix in found.fixes if "LoRA" in fix.argument]


def test_fixes_may_be_left_out():
    assert refused(memory=1e4, fixes=False).fixes == ()


def test_command_line(capsys):
    words = [
        "plan",
        "--model",
        MODEL,
        "--mesh",
        "dp=2",
        "--batch",
        "8",
        "--seq",
        "1",
        "--strategy",
        "ddp",
        "--memory",
        "1.6MiB",
    ]
    assert main([*words, "--hardware", "cpu-gloo"]) == 2
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith("autopar: no plan with strategy ddp fits 1.60 MiB a device: the smallest found needs")
    assert [line.split("  ")[0] for line in rest if line][0] == "memory of a device"
    assert any(re.match(r"--lora r=16 +2 +[\d.]+ +[\d.]+ +fits", line) for line in rest), rest
    assert any(re.match(r"--strategy fsdp +2 +- +[\d.]+ +[\d.]+ .iB missing", line) for line in rest), rest
