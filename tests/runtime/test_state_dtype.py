"""compile(..., state_dtype="bf16"): optimizers whose state is kept in bfloat16, against one device that rounds it after
every step."""

from __future__ import annotations

import copy
import os
import warnings

import pytest
import torch
from torch import optim

import autopar
from autopar import Plan
from autopar.errors import OptimizerError, StrategyError
from autopar.runtime import narrow_state
from tests.helpers import gloo

from . import tiny
from .parity import assert_close, device_mesh, full, pair, planned

CALL = dict(zip(("x", "target"), (t.double() for t in tiny.Regressor.batch())))
BF16 = torch.bfloat16
OPTIMIZERS = {
    "adamw": lambda p: optim.AdamW(p, lr=1e-2, betas=(0.9, 0.95)),
    "adamw, loop": lambda p: optim.AdamW(p, lr=1e-2, betas=(0.9, 0.95), foreach=False, amsgrad=True),
    "adamw, fused": lambda p: optim.AdamW(p, lr=1e-2, betas=(0.9, 0.95), fused=True),
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "nadam": lambda p: optim.NAdam(p, lr=1e-2, betas=(0.9, 0.95)),
    "rprop": optim.Rprop,
}


def double(hidden: int = 31):
    """In double precision another order of sums hardly ever rounds to another number."""
    return tiny.Regressor(hidden=hidden, loss=True).double()


def round_state(optimizer) -> None:
    """Round state like a parameter to the nearest numbers of bfloat16, as one device does after each step."""
    for p, state in optimizer.state.items():
        for key, value in state.items():
            if torch.is_tensor(value) and value.shape == p.shape:
                state[key] = value.bfloat16().to(p.dtype)


def take(model, optimizer, steps: int, is_one_device: bool = False, scheduler=None) -> None:
    for _ in range(steps):
        model.zero_grad()
        model(**CALL).loss.backward()
        optimizer.step()
        if is_one_device:
            round_state(optimizer)
        if scheduler:
            scheduler.step()


def _steps(rank: int, mesh: str, plan: Plan, hidden: int) -> None:
    for name, make in OPTIMIZERS.items():
        parallel, reference = pair(double(hidden), device_mesh(mesh), CALL, plan=plan)
        unrounded = copy.deepcopy(reference)
        mine, wanted, other = (make(m.parameters()) for m in (parallel, reference, unrounded))
        schedules = [optim.lr_scheduler.StepLR(o, 2) for o in (mine, wanted, other)]
        take(parallel, mine, 4, scheduler=schedules[0])
        take(reference, wanted, 4, True, schedules[1])
        take(unrounded, other, 4, scheduler=schedules[2])
        if name == "adamw" and plan.strategy == "ddp":
            held = [full(value) for state in mine.state.values() for value in state.values() if value.dim()]
            assert sum(value.nbytes for value in held) == plan.memory["optimizer"]
        for p, q, r in zip(parallel.parameters(), reference.parameters(), unrounded.parameters()):
            assert_close(p, q, name, 1e-12)
            for key, value in wanted.state[q].items():
                if torch.is_tensor(value) and value.shape == q.shape:
                    assert mine.state[p][key].dtype == BF16 and mine.state[p][key].placements == p.placements
                    assert torch.equal(full(mine.state[p][key]).double(), value), (name, key)
            if name != "rprop":  # whose steps depend on signs
                assert (q - r).abs().max() > 1e-6, name  # so the test above can fail


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize(
    "mesh, options, hidden",
    [
        ("dp=2", dict(strategy="ddp"), 31),
        ("dp=2", dict(strategy="fsdp"), 31),
        ("dp=2,tp=2", dict(pin={"up.weight": "tp:S(0) dp:S(0)", "up.bias": "tp:S(0)", "down.weight": "R"}), 32),
    ],
    ids=["ddp", "fsdp uneven", "mixed"],
)
def test_steps_are_those_of_one_device_that_rounds(mesh, options, hidden):
    plan = planned(double(hidden), mesh, CALL, state_dtype="bf16", **options)
    gloo.run(plan.mesh.devices, _steps, mesh, plan, hidden)


def _checkpoint(rank: int, folder: str) -> None:
    """A checkpoint keeps the type; a module without `state_dtype` goes on from it in the type of its parameters."""
    make = OPTIMIZERS["adamw"]
    narrow, reference = pair(double(), device_mesh("dp=2"), CALL, strategy="fsdp", state_dtype=BF16)
    wide, whole = pair(double(), device_mesh("dp=2"), CALL, strategy="ddp")
    mine = make(narrow.parameters())
    take(narrow, mine, 2)
    autopar.save_checkpoint(folder, narrow, mine, step=2)
    take(narrow, mine, 2)
    wanted = [full(p).detach().clone() for p in narrow.parameters()]
    again, other = make(narrow.parameters()), make(wide.parameters())
    autopar.load_checkpoint(folder, narrow, again)
    assert {s["exp_avg_sq"].dtype for s in again.state.values()} == {BF16}
    take(narrow, again, 2)
    assert all(torch.equal(full(p), q) for p, q in zip(narrow.parameters(), wanted))

    autopar.load_checkpoint(folder, wide, other)
    take(wide, other, 2)
    one = make(reference.parameters())
    take(reference, one, 2, True)
    take(reference, one, 2)
    assert {s["exp_avg_sq"].dtype for s in other.state.values()} == {torch.float64}
    for p, q in zip(wide.parameters(), reference.parameters()):
        assert_close(p, q, "", 1e-12)


@pytest.mark.gloo
def test_checkpoints(tmp_path):
    gloo.run(2, _checkpoint, str(tmp_path))


def _stages(rank: int, plan: Plan) -> None:
    parallel, reference = pair(double(), device_mesh("pp=2"), CALL, plan=plan)
    make = OPTIMIZERS["adamw"]
    take(parallel, make(parallel.parameters()), 3)
    take(reference, make(reference.parameters()), 3, True)
    wanted = dict(reference.named_parameters())
    for name, p in parallel.named_parameters():
        assert_close(p, wanted[name], name, 1e-12)


@pytest.mark.slow
@pytest.mark.gloo
def test_stages(tmp_path):
    plan = planned(double(), "pp=2", CALL, state_dtype="bf16", micro_batches=2)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.state_dtype == "bf16"
    gloo.run(2, _stages, loaded)


def test_few_parameters_are_wide_at_once(alone, monkeypatch):
    """Runs of parameters have MOST_ELEMENTS together at the most, and the result does not know of them."""
    monkeypatch.setattr(narrow_state, "MOST_ELEMENTS", 40)
    parallel, reference = pair(double(), alone, CALL, state_dtype="bf16")
    sizes = [[p.numel() for p in run] for run in narrow_state._cut(list(parallel.parameters()))]
    assert sum(sizes, []) == [p.numel() for p in parallel.parameters()]
    assert len(sizes) > 1 and all(len(run) == 1 or sum(run) <= 40 for run in sizes)
    make = OPTIMIZERS["adamw"]
    take(parallel, make(parallel.parameters()), 3)
    take(reference, make(reference.parameters()), 3, True)
    for p, q in zip(parallel.parameters(), reference.parameters()):
        assert_close(p, q, "", 1e-12)


def test_what_is_refused_and_warned_of(alone):
    narrow, _ = pair(double(), alone, CALL, state_dtype="bf16")
    wide, _ = pair(double(), alone, CALL)
    narrow(**CALL).loss.backward()
    before = [full(p).clone() for p in narrow.parameters()]
    for make in (optim.Adafactor, lambda p: optim.SGD(p, lr=0.1, differentiable=True)):
        with pytest.raises(OptimizerError, match="is not kept in torch.bfloat16(.|\n)*leave out state_dtype"):
            make(narrow.parameters()).step()
    with pytest.raises(OptimizerError, match="state_dtype None and bf16"):
        optim.SGD([*narrow.parameters(), *wide.parameters()]).step()
    assert all(torch.equal(full(p), q) for p, q in zip(narrow.parameters(), before))
    with pytest.warns(UserWarning, match="betas of 0.999 decays by less") as found:
        optimizer = optim.AdamW(narrow.parameters())
        take(narrow, optimizer, 2)
    assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take(narrow, OPTIMIZERS["adamw"](narrow.parameters()), 1)
        take(wide, optim.AdamW(wide.parameters()), 1)
    for wrong in ("fp16", "fp32", torch.float32):
        with pytest.raises(StrategyError, match="cannot be kept in(.|\n)*use bf16"):
            planned(double(), "dp=2", CALL, state_dtype=wrong)


@pytest.mark.parametrize("beta, falls", [(0.999, False), (1 - 2.0**-9 * 0.99, False), (0.99, True)])
def test_what_decays_too_slowly_never_falls(beta, falls):
    """The limit of the warning: 2**-9 of a value is half of the distance to its neighbour, or less."""
    values = torch.arange(0x3F80, 0x4000, dtype=torch.int16).view(BF16)  # all of [1, 2)
    below = (beta * values.double()).bfloat16()
    assert bool((below < values).all()) if falls else torch.equal(below, values)
    assert (1 - beta >= narrow_state.SMALLEST_DECAY) == falls


def _kept(rank: int, folder: str) -> list[tuple[str | None, str]]:
    os.environ["AUTOPAR_CACHE"] = folder
    made = [pair(double(), device_mesh("dp=2"), CALL, state_dtype=d)[0].plan for d in (None, BF16, "bf16")]
    return [(plan.state_dtype, plan.hash) for plan in made]


@pytest.mark.slow
@pytest.mark.gloo
def test_the_cache_tells_types_apart(tmp_path):
    found, other = gloo.run(2, _kept, str(tmp_path))
    assert found == other and [d for d, _ in found] == [None, "bf16", "bf16"]
    assert found[0][1] != found[1][1] == found[2][1]
