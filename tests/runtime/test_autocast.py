"""torch.autocast around the lines of a user's loop: forward, loss and backward inside or outside of it, compiled before
or in it, with and without a GradScaler, against the same loop in one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.optim import AdamW

import autopar
from tests.helpers import gloo

from . import tiny
from .parity import assert_close, device_mesh

X, Y = tiny.Regressor.batch()
CALL = dict(x=X, target=Y)
SCALED = GradScaler, dict(device="cpu", init_scale=2.0**8)
PLAIN = GradScaler, dict(device="cpu", enabled=False)


def steps(model, dtype: torch.dtype, scaling, how: str, x=X, y=Y) -> list[torch.Tensor]:
    """Losses of a loop; `how`: "inside" has the model's loss and its backward in autocast, "outside" the backward
    outside of it, "own loss" a loss of the loop's own in it, "first plain" a first step without autocast."""
    scaler = scaling[0](**scaling[1])
    optimizer, losses = None, []
    for step in range(4):
        with torch.autocast("cpu", dtype=dtype, enabled=how != "first plain" or step > 0):
            if how == "own loss":
                loss = F.mse_loss(model(x), y)
            else:
                loss = model(x=x, target=y).loss
            optimizer = optimizer or AdamW(model.parameters(), lr=1e-2)  # after a first call that compiles
            if how == "inside":
                scaler.scale(loss).backward()
        if how != "inside":
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach())
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        losses.append(model(x) if how == "own loss" else model(x=x, target=y).loss)
    return losses


def _loops(rank: int, mesh: str, dtype: torch.dtype, scaling, hows: tuple[str, ...], options: dict) -> None:
    mesh_ = device_mesh(mesh)
    for number, how in enumerate(hows):
        source = tiny.Regressor(loss=how != "own loss")
        reference, example = copy.deepcopy(source), (X,) if how == "own loss" else CALL
        if number % 3 == 0:  # at the first call, in autocast
            parallel = autopar.compile(source, mesh_, **options)
        elif number % 3 == 1:  # before the loop, without
            parallel = autopar.compile(source, mesh_, example, **options)
        else:
            with torch.autocast("cpu", dtype=dtype):
                parallel = autopar.compile(source, mesh_, example, **options)
        mine, whole = steps(parallel, dtype, scaling, how), steps(reference, dtype, scaling, how)
        for at, (a, b) in enumerate(zip(mine, whole, strict=True)):
            assert_close(a, b, f"{how} {at}", 2e-2 if dtype is torch.bfloat16 else 4e-3)
        assert {p.dtype for p in parallel.parameters()} == {torch.float32}
        assert len(parallel.captures) <= 3 and any("autocast" in call for call in parallel.captures), parallel.captures


LOOPS = ("inside", "outside", "own loss", "first plain")


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize(
    "mesh, dtype, scaling, hows, options",
    [
        ("dp=2", torch.bfloat16, PLAIN, LOOPS, {}),
        ("dp=2", torch.float16, SCALED, LOOPS, dict(strategy="fsdp")),
        ("tp=2", torch.float16, SCALED, ("outside", "outside", "outside"), dict(strategy="megatron")),
        ("dp=2", torch.float16, SCALED, ("outside",), dict(precision="fp16")),
        ("pp=2", torch.float16, SCALED, ("outside", "inside"), dict(micro_batches=2)),
    ],
)
def test_loops(mesh, dtype, scaling, hows, options):
    gloo.run(2, _loops, mesh, dtype, scaling, hows, options)


def _own_parts(rank: int, dtype: torch.dtype, scaling) -> None:
    source = tiny.Regressor()
    reference = copy.deepcopy(source)
    part = slice(4 * rank, 4 * rank + 4)
    with torch.autocast("cpu", dtype=dtype):
        parallel = autopar.compile(source, device_mesh("dp=2"), (X[part],), inputs="local")
    mine = steps(parallel, dtype, scaling, "own loss", X[part], Y[part])
    whole = steps(reference, dtype, scaling, "own loss")
    for at, (a, b) in enumerate(zip(mine[:-1], whole)):
        dist.all_reduce(a)
        assert_close(a / 2, b, str(at), 2e-2 if dtype is torch.bfloat16 else 4e-3)
    assert_close(mine[-1].clone(), whole[-1][part], "evaluation", 2e-2)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("dtype, scaling", [
    (torch.bfloat16, PLAIN), (torch.float16, SCALED),
])  # fmt: skip
def test_parts_of_the_batch(dtype, scaling):
    gloo.run(2, _own_parts, dtype, scaling)
