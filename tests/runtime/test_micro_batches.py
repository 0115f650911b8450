"""A step of several micro-batches without stages: the call takes the whole batch, its gradients are the batch's."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar._torch import c10d
from autopar.codegen.rank_program import PipelineProgram
from autopar.compiler import lower_plan
from autopar.errors import StageError
from autopar.models.output import Output
from autopar.simulate.compare import verify_model
from autopar.simulate.step import plan_and_capture
from tests.helpers import gloo

from . import tiny
from .parity import assert_close, assert_same_gradients, device_mesh, pair, planned, train
from .test_accumulation import Reductions

X, Y = tiny.Regressor.batch()
CALL = dict(x=torch.cat([X, X + 1]), target=torch.cat([Y, 2 * Y]))
OTHER = dict(x=X[:5] - 1, target=Y[:5])
STRATEGIES = {"ddp": True, "zero1": True, "zero2": False, "fsdp": None}  # whether gradients are reduced once a step


def _steps(rank, mesh, plans):
    mesh, found = device_mesh(mesh), {}
    for name, plan in plans.items():
        parallel, reference = pair(tiny.Regressor(loss=True), mesh, CALL, plan=plan)
        for call in (CALL, OTHER):  # another size is another capture, with as many micro-batches
            for loop in (nullcontext, parallel.no_sync):  # and one reduction for two calls in the user's own loop
                with loop(), Reductions() as reductions:
                    out, wanted = parallel(**call), reference(**call)
                    out.loss.backward()
                wanted.loss.backward()
                found[name, len(call["x"]), loop is nullcontext] = reductions.found["gradients"]
                assert_close(out.loss, wanted.loss), assert_close(out.logits, wanted.logits)
            parallel(**call).loss.backward(), reference(**call).loss.backward()
            assert_same_gradients(parallel, reference)
            parallel.zero_grad(), reference.zero_grad()
        with torch.no_grad():
            assert_close(parallel(**CALL).loss, reference(**CALL).loss)
        assert train(parallel, CALL, 3) == pytest.approx(train(reference, CALL, 3), rel=1e-4)
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("mesh, many, names", [
    ("dp=2", 3, ("ddp",)), pytest.param("dp=2", 3, ("zero1", "zero2", "fsdp"), marks=pytest.mark.slow),
    pytest.param("dp=2,tp=2", 4, (*STRATEGIES,), marks=pytest.mark.slow),
])  # fmt: skip
def test_gradients_are_those_of_the_batch(mesh, many, names):
    model = tiny.Regressor(loss=True)
    plans = {name: planned(model, mesh, CALL, micro_batches=many, strategy=name) for name in names}
    assert all(STRATEGIES[name] in (None, plan.reduces_once) for name, plan in plans.items())
    for found in gloo.run(device_count(mesh), _steps, mesh, plans):
        for name, plan in plans.items():
            waits, alone = (found[name, len(CALL["x"]), is_alone] for is_alone in (False, True))
            assert waits == 0 < alone and (alone >= many) == (not plan.reduces_once), (name, alone)


def device_count(mesh: str) -> int:
    return autopar.Mesh.parse(mesh).devices


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("model, mesh, many, strategy", [
    ("gpt2-tiny:layers=1", "dp=2,tp=2", 4, None), ("gpt2-tiny", "dp=2", 3, "zero2"), ("llama-tiny", "dp=4", 2, "fsdp"),
    ("moe-tiny", "dp=2", 2, None), ("vit-tiny", "dp=2", 2, "ddp"),
])  # fmt: skip
def test_what_is_priced_is_sent(model, mesh, many, strategy):
    """Values, collectives and bytes of a simulated step: those of the eager model and of the plan."""
    built, inputs = autopar.models.build(model, batch=8, seq=8, device="cpu", seed=0)
    options = {} if strategy is None else {"strategy": strategy}
    report = verify_model(built, inputs, mesh, hardware="cpu-gloo", micro_batches=many, **options)
    assert report.match, str(report)
    assert report.plan.micro_batches == many and report.plan.samples == 8


def test_gathers_and_reductions_once_a_step():
    """Sharding with kept parameters gathers and reduces as often with four micro-batches as with one."""
    model, found = tiny.Regressor(loss=True), {}
    for many in (1, 4):
        plan, captured = plan_and_capture(
            model, "dp=2", CALL, hardware="cpu-gloo", baselines=False, strategy="zero1", micro_batches=many
        )
        program = lower_plan(captured, plan, 0)
        assert isinstance(program, PipelineProgram) == (many > 1)
        kinds = Counter(what.split()[2 if "stage" in what else 1] for _, what, _ in program.collectives())
        found[many] = kinds, {c.kind: c.count for c in plan.collectives if c.wire_bytes > 64}
    assert found[1][1] == found[4][1]


class Gathers(TorchDispatchMode):
    """Counts the gathers that run inside."""

    def __init__(self):
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        gathers = (torch.ops.autopar.gather_by_broadcasts, torch.ops.autopar.gather_bucket_by_broadcasts)
        if function in (c10d.all_gather_into_tensor.default, *(op.default for op in gathers)):
            self.found += 1
        return function(*args, **(kwargs or {}))


def _gathers(rank, plans):
    mesh, found = device_mesh("dp=2"), {}
    for key, plan in plans.items():
        parallel, reference = pair(tiny.Regressor(loss=True), mesh, CALL, plan=plan)
        for _ in range(2):  # the second step gathers what the optimizer has changed
            parallel.zero_grad(), reference.zero_grad()
            with Gathers() as gathers:
                parallel(**CALL).loss.backward()
            reference(**CALL).loss.backward()
            assert_same_gradients(parallel, reference)
            found.setdefault(key, []).append(gathers.found)
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("kept", ["zero1", pytest.param("zero2", marks=pytest.mark.slow)])
def test_kept_parameters_are_gathered_once_a_step_at_run_time(kept):
    """ZeRO-1 and 2 with four micro-batches gather no more often than with one, FSDP for each of them."""
    model = tiny.Regressor(loss=True)
    plans = {
        (name, many): planned(model, "dp=2", CALL, micro_batches=many, strategy=name)
        for name, many in ((kept, 1), (kept, 4), ("fsdp", 4))
    }  # fmt: skip
    for found in gloo.run(2, _gathers, plans):
        assert all(0 < four <= one for four, one in zip(found[kept, 4], found[kept, 1])), found
        assert min(found["fsdp", 4]) >= 4, found


class Mixed(nn.Module):
    """Reads all samples at once."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 4), nn.BatchNorm1d(4)

    def forward(self, x, target):
        y = self.norm(self.layer(x))
        return Output((y - target).square().mean(), y)


def test_what_micro_batches_refuse(alone):
    with pytest.raises(autopar.AutoparError, match="a gradient of its own for every sample") as error:
        autopar.compile(tiny.Regressor(), alone, (X,), micro_batches=2)
    assert "loss_fn" in str(error.value)
    model = autopar.compile(tiny.Regressor(loss=True), alone, CALL, micro_batches=2)
    out = model(**CALL)
    with pytest.raises(StageError, match="with stages or micro-batches the loss alone has one"):
        (out.loss + out.logits.square().sum()).backward()
    with pytest.raises(autopar.AutoparError, match="cannot be cut into 99 micro-batches"):
        autopar.compile(tiny.Regressor(loss=True), alone, CALL, micro_batches=99)
    with pytest.raises(autopar.AutoparError, match="a sum over all samples of the batch that is not known before"):
        autopar.compile(Mixed(), alone, CALL, micro_batches=2)
    fewest = autopar.compile(tiny.Regressor(loss=True), alone, CALL, micro_batches="auto")
    assert fewest.plan.micro_batches == 1
