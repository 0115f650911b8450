"""Tests that what a user does wrong is a typed error with a remedy, on every rank, and never a hang."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

import autopar
from autopar.api import kept_program
from autopar.errors import AdaptError, CaptureError, InputError, StrategyError
from autopar.ir.mesh import Mesh
from autopar.plans.pipeline import Pipeline
from autopar.processes import agree
from tests.helpers import gloo

from . import tiny
from .parity import assert_close, assert_same_gradients, device_mesh, full, pair, planned


class Branching(tiny.Regressor):
    def forward(self, x):
        y = super().forward(x)
        return y * 2 if y.sum() > 0 else y


class Hooked(tiny.Regressor):
    def forward(self, x):
        y = super().forward(x)
        y.register_hook(lambda gradient: 2 * gradient)
        return y


class Twice(tiny.Regressor):
    def forward(self, x):
        return super().forward(2 * x)


class Flagged(tiny.Regressor):
    def forward(self, x, scale=1.0, extra=None):
        return super().forward(x) * scale


def _error(run) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


CALLED = [("tp", "a", (2,)), ("dp", "b", (3,))]


def _with_hash(plan_hash: str) -> SimpleNamespace:
    """Return what the check of programs reads of a plan."""
    return SimpleNamespace(hash=plan_hash, mesh=Mesh.parse("dp=2,tp=2"), pipeline=Pipeline())


def _to_max(node):
    node.args = (node.args[0], "max", node.args[2])


def _to_double(node):
    node.args[0].meta["val"] = node.args[0].meta["val"].double()


def _to_twice_the_size(node):
    node.args[0].meta["val"] = node.args[0].meta["val"].repeat(2, 1)


def _later(node):
    next(n for n in node.graph.nodes if "all_reduce" in str(n.target) and n is not node).append(node)


def _nowhere(node):
    node.replace_all_uses_with(node.args[0])
    node.graph.erase_node(node)


TAMPERED = {
    "reduction": _to_max,
    "dtype": _to_double,
    "shape": _to_twice_the_size,
    "order": _later,
    "missing": _nowhere,
}


def _compiled_with(change, mesh, plan):
    """Compile a model on a rank that changes its first all-reduce (which then is never run: all ranks notice)."""
    original = kept_program.lower_plan

    def lower_plan(*args):
        program = original(*args)
        change(next(n for n in program.parts.forward.graph.nodes if "all_reduce" in str(n.target)))
        return program

    kept_program.lower_plan = lower_plan
    try:
        autopar.compile(tiny.Regressor(loss=True), mesh, dict(zip(("x", "target"), tiny.Regressor.batch())), plan=plan)
    finally:
        kept_program.lower_plan = original


def _mistakes(rank, of_model, of_mesh, of_shape, of_all):
    """Messages by mistake. Reaching the end at all means that no rank waits for another."""
    mesh = device_mesh("dp=2,tp=2")
    x, _ = tiny.Regressor.batch()

    def compiled(model=None, example=(x,), **options):
        return _error(lambda: autopar.compile(model or tiny.Regressor(), mesh, example, **options))

    return {
        "memory": compiled(memory="10B"),
        "strategy": compiled(strategy="fsdpp"),
        "axis": compiled(pin={"up.weight": "xp:S(0)"}),
        "pin": compiled(pin={"no.such": "tp:S(0)"}),
        "precision": compiled(precision="fp8"),
        "inputs": compiled(inputs="some"),
        "outputs": compiled(outputs="all"),
        "plan of a model": compiled(plan=of_model),
        "plan of a mesh": compiled(plan=of_mesh),
        "plan of a shape": compiled(plan=of_shape),
        "no plan": compiled(plan="/nowhere/plan.json"),
        "part of the world": _error(lambda: autopar.compile(tiny.Regressor(), mesh["tp"], (x,))),
        "no mesh": _error(lambda: autopar.compile(tiny.Regressor(), "dp=4", (x,))),
        "branch": compiled(Branching()),
        "branch on one rank": compiled(Branching() if rank == 2 else tiny.Regressor()),
        "hook on one rank": compiled(Hooked() if rank == 2 else tiny.Regressor()),
        "other models": compiled(Twice() if rank == 1 else tiny.Regressor()),
        "other shapes": compiled(tiny.Regressor(hidden=16 + 16 * (rank == 1))),
        "meta": compiled(tiny.Regressor().to("meta")),
        "empty": compiled(example=(x[:0],)),
        "no tensor": compiled(example=(3,)),
        "no example": compiled(example=3),
        "broken rank": _error(lambda: agree.everywhere(lambda: {}["x"] if rank == 1 else 0)),
        "broken planner": _error(lambda: agree.from_rank_zero(lambda: {}["x"])),
        "other collectives": _error(lambda: agree.check_programs(_with_hash("hash"), CALLED[: 1 + (rank == 3)])),
        "other plans": _error(lambda: agree.check_programs(_with_hash("hash" + "x" * (rank == 2)), [])),
        **{
            f"{what} of a collective": _error(
                lambda c=change: _compiled_with(c if rank == 3 else lambda node: None, mesh, of_all)
            )
            for what, change in TAMPERED.items()
        },
    }


FIRST = "forward all_reduce(sum) float32 over tp: linear_1"
EXPECTED = {
    "memory": ["MemoryInfeasibleError: ", "fix: "],
    "strategy": ["StrategyError: no strategy 'fsdpp' is known", "fix: use fsdp"],
    "axis": [
        "MeshError: up.weight cannot follow the pin up.weight: xp:S(0): the mesh has no axis 'xp'",
        "fix: use one of dp, tp",
    ],
    "pin": ["StrategyError: ", "no.such", "fix: "],
    "precision": ["StrategyError: no precision 'fp8' is known", "fix: use one of bf16, fp16, fp32"],
    "inputs": ["InputError: inputs is 'some'", 'fix: use "global" or "local"'],
    "outputs": ["InputError: outputs is 'all'", 'fix: use "stage", "everywhere" or "sharded"'],
    "plan of a model": ["PlanIncompatible: the plan was made for another model", "fix: plan again"],
    "plan of a mesh": ["PlanIncompatible: the plan was made for mesh dp=4, not dp=2,tp=2", "fix: plan again"],
    "plan of a shape": ["PlanIncompatible: the plan was made for another model, input shape", "fix: plan again"],
    "no plan": ["PlanFormatError: /nowhere/plan.json cannot be read", "fix: "],
    "part of the world": ["MeshError: the mesh has 2 devices and the process group 4 ranks", "fix: start 2 processes"],
    "no mesh": ["MeshError: compile needs a DeviceMesh, got str", "init_device_mesh"],
    "branch": [
        "CaptureError: Branching could not be traced",
        "test_errors.py:",
        "return y * 2 if y.sum() > 0",
        "fix: ",
    ],
    "branch on one rank": ["CaptureError: Branching could not be traced", "test_errors.py:", "fix: "],
    "hook on one rank": [
        "CaptureError: the forward calls a hook of a tensor",
        "test_errors.py:",
        "y.register_hook",
        "fix: ",
    ],
    "other models": ["DesyncError: rank 1 traced another graph", "fix: build the same model"],
    "other shapes": [
        "DesyncError: up.weight is (32, 6) torch.float32 on rank 1 and (16, 6) torch.float32 on rank 0",
        "fix: ",
    ],
    "meta": ["InputError: up.weight is on the meta device", "fix: "],
    "empty": ["InputError: args[0] is empty", "fix: pass at least one sample"],
    "no tensor": ["InputError: the example call passes no tensor", "fix: "],
    "no example": ["InputError: example_inputs must be a dict", "fix: "],
    "broken rank": ["DesyncError: rank 1 failed with KeyError: 'x'"],
    "broken planner": ["DesyncError: rank 0 failed with KeyError: 'x'"],
    "other collectives": ["DesyncError: collective 1 is nothing on rank 0 and b on rank 3", "fix: "],
    "reduction of a collective": [
        f"DesyncError: collective 0 is {FIRST} on rank 0 and {FIRST.replace('sum', 'max')} on rank 3"
    ],
    "dtype of a collective": [
        f"DesyncError: collective 0 is {FIRST} on rank 0 and {FIRST.replace('32', '64')} on rank 3"
    ],
    "shape of a collective": [f"collective 0 of tp is {FIRST}, (4, 4) on rank 2 and {FIRST}, (8, 4) on rank 3"],
    "order of a collective": [f"DesyncError: collective 0 is {FIRST} on rank 0 and forward all_"],
    "missing of a collective": [f"DesyncError: collective 0 is {FIRST} on rank 0 and forward all_"],
    "other plans": ["DesyncError: rank 2 has plan hashx, rank 0 has hash", "fix: "],
}


@pytest.mark.gloo
def test_mistakes_on_every_rank():
    x, y = tiny.Regressor.batch()
    mesh = "dp=2,tp=2"
    others = (
        (tiny.Regressor(hidden=32), mesh, (x,)),
        (tiny.Regressor(), "dp=4", (x,)),
        (tiny.Regressor(), mesh, (x[:4],)),
    )
    plans = [planned(*other) for other in others]
    plans.append(planned(tiny.Regressor(loss=True), mesh, dict(x=x, target=y), strategy="megatron"))
    for rank, errors in enumerate(gloo.run(4, _mistakes, *plans)):
        assert errors.keys() == EXPECTED.keys()
        for what, error in errors.items():
            own = {"broken rank": 1, "broken planner": 0}.get(what) == rank
            for text in ["KeyError"] if own else EXPECTED[what]:
                assert text in error, f"{what} on rank {rank}: {error}"


CALLS = {
    "dims": (lambda m, x: m(x[0, :3], 2.0), CaptureError, r"Flagged could not be traced(.|\n)*shape: args\[0\] \(3,\)"),
    "dtype": (lambda m, x: m(x.double(), 2.0), CaptureError, "must have the same dtype, but got Double and Float"),
    "nothing": (lambda m, x: m(), InputError, "the example call passes no tensor"),
    "empty": (lambda m, x: m(x[:0], 2.0), InputError, r"args\[0\] is empty"),
    "unknown": (lambda m, x: m(x, other=x), CaptureError, "could not be traced: TypeError(.|\n)*other"),
    "no tensor": (lambda m, x: m(1.0, 2.0), InputError, "the example call passes no tensor"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", CALLS)
def test_calls(alone, mistake):
    x, _ = tiny.Regressor.batch()
    parallel, reference = pair(Flagged(), alone, (x, 2.0))
    call, error, message = CALLS[mistake]
    for _ in range(2):  # before the first call and after it
        with pytest.raises(error, match=message):
            call(parallel, x)
        assert torch.equal(full(parallel(x, 2.0)), reference(x, 2.0))
    assert len(parallel.captures) == 1


def test_other_options(alone):
    x, _ = tiny.Regressor.batch()
    with pytest.raises(AdaptError, match="adapt is"):
        autopar.compile(tiny.Regressor(), alone, (x,), adapt=("something",))
    with pytest.raises(StrategyError, match="cannot read 'lots' as a memory limit(.|\n)*40GiB"):
        autopar.compile(tiny.Regressor(), alone, (x,), memory="lots")


# saved plans
# -----------------------------------------------------------------------------------------------------------


def _with_plan(rank, path, plan):
    model, batch = tiny.gpt2(n_layer=1)
    mesh = device_mesh("tp=2")
    from_file, reference = pair(model, mesh, batch, plan=path)
    again, reference = pair(reference, mesh, batch, plan=plan)
    assert from_file.plan == again.plan == plan and from_file.plan.hash == plan.hash
    losses = [m(**batch).loss for m in (from_file, again, reference)]
    for loss in losses:
        loss.backward()
    assert torch.equal(losses[0], losses[1])
    assert_close(losses[0], losses[2], "loss")
    assert_same_gradients(from_file, reference)


@pytest.mark.slow
@pytest.mark.gloo
def test_a_plan_made_without_weights_fits_the_model(tmp_path, monkeypatch):
    """Planned from meta tensors, saved, loaded by every rank's compile; with the verifier on."""
    with torch.device("meta"):
        model, batch = tiny.gpt2(n_layer=1)
    assert all(p.is_meta for p in model.parameters()) and batch["input_ids"].is_meta
    plan = planned(model, "tp=2", batch, strategy="megatron_sp")
    plan.save(tmp_path / "plan.json")
    gloo.run(2, _checked, _with_plan, str(tmp_path / "plan.json"), plan)


def _checked(rank, function, *args):
    os.environ["AUTOPAR_CHECK"] = "1"
    return function(rank, *args)
