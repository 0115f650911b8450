"""Parameters on the host in a compiled module: an ordinary optimizer steps them, and every call computes as one device
does."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.hardware import profile
from autopar.hardware.profile import Host
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.processes.dtensors import as_dtensor
from tests.helpers import gloo

from . import tiny
from .parity import assert_same_gradients, assert_same_values, device_mesh, pair, train

X, Y = tiny.Regressor.batch()
CALL = dict(x=X, target=Y)
MACHINE = replace(profile.load("cpu-gloo"), host=Host(1e9, 4e9, 10**9))


def _training(rank):
    """Steps, other calls over the same parameters and gradients that wait, all as without a mesh."""
    parallel, reference = pair(
        tiny.Regressor(loss=True), device_mesh("dp=2"), CALL, hardware=MACHINE, offload="optimizer"
    )
    assert parallel.plan.offloaded.parameters == len(list(parallel.parameters())) == len(parallel.plan.sharding.on_host)
    assert train(parallel, CALL, 3) == pytest.approx(train(reference, CALL, 3), rel=1e-5)
    assert_same_values(parallel, reference)
    for m in (parallel, reference):
        m.eval()
    with torch.no_grad():
        assert parallel(x=X[:6], target=Y[:6]).loss.item() == pytest.approx(
            reference(x=X[:6], target=Y[:6]).loss.item(), rel=1e-5
        )
    evaluated = list(parallel.captures.values())[-1]
    assert evaluated.sharding.on_host == parallel.plan.sharding.on_host and evaluated.offloaded.optimizer_seconds == 0
    for i in range(3):
        with parallel.no_sync() if i < 2 else nullcontext():
            parallel(x=X + i, target=Y).loss.backward()
        reference(x=X + i, target=Y).loss.backward()
    assert_same_gradients(parallel, reference)


@pytest.mark.slow
@pytest.mark.gloo
def test_an_ordinary_optimizer_on_two_processes():
    gloo.run(2, _training)


def _stepped(rank):
    """AdamW on a shard that lies on the host of a mesh of GPUs, which need not be there for it."""
    mesh, layout = Mesh.parse("dp=2"), Layout.parse("dp:S(0)", 2)
    gpus = DeviceMesh("cuda", [0, 1], mesh_dim_names=("dp",))
    results = []
    for options in ({}, {"foreach": True}, {"fused": True}):
        whole = torch.nn.Parameter(torch.arange(12.0).view(4, 3))
        part = torch.nn.Parameter(
            as_dtensor(whole.detach()[2 * rank : 2 * rank + 2].clone(), (4, 3), layout, mesh, gpus)
        )
        whole.grad, part.grad = torch.ones(4, 3), as_dtensor(torch.ones(2, 3), (4, 3), layout, mesh, gpus)
        torch.optim.AdamW([whole], lr=0.1).step()
        optimizer = torch.optim.AdamW([part], lr=0.1, **options)
        optimizer.step()
        assert part.device.type == "cpu" and {s.device.type for s in optimizer.state[part].values()} == {"cpu"}
        results.append((part.to_local() - whole[2 * rank : 2 * rank + 2]).abs().max().item())
    return max(results)


@pytest.mark.gloo
@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes would share a GPU; the test below is the real one")
def test_an_optimizer_steps_a_host_shard_of_a_mesh_of_gpus():
    assert max(gloo.run(2, _stepped)) < 1e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_masters_gradients_and_state_are_on_the_host(tmp_path):
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
        source = tiny.Regressor(loss=True).cuda()
        batch = {name: value.cuda() for name, value in CALL.items()}
        model, reference = pair(source, mesh, batch, hardware="h100", offload="optimizer")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        assert train(model, batch, 3, optimizer=optimizer) == pytest.approx(train(reference, batch, 3), rel=1e-4)
        model(**batch).loss.backward()
        for parameter in model.parameters():
            held = [parameter, parameter.grad, *optimizer.state[parameter].values()]
            local = [t.to_local() if isinstance(t, DTensor) else t for t in held]
            assert {t.device.type for t in local} == {"cpu"} and local[0].is_pinned()
    finally:
        torch.distributed.destroy_process_group()


def test_a_plan_from_elsewhere_says_what_is_on_the_host(tmp_path, alone):
    plan = autopar.plan(tiny.Regressor(loss=True), alone, CALL, hardware=MACHINE, offload="optimizer", baselines=False)
    plan.save(tmp_path / "plan.json")
    parallel, reference = pair(tiny.Regressor(loss=True), alone, CALL, plan=tmp_path / "plan.json")
    assert train(parallel, CALL, 2) == pytest.approx(train(reference, CALL, 2), rel=1e-5)
    assert parallel.plan.sharding.on_host == plan.sharding.on_host
