"""The parts of benchmarks/gpu.py in which several ranks share the one device."""

from __future__ import annotations

import copy
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from gpu_machine import FAMILIES, Machine, apart, family, gradients_after, on, train

import autopar


def ranks(machine: Machine) -> None:
    """Four processes of gloo that share the device: layouts, collectives and stages with the device's kernels."""
    for mesh, strategy in (("dp=2,tp=2", "megatron_sp"), ("dp=4", "fsdp"), ("pp=2,dp=2", None)):
        with tempfile.TemporaryDirectory() as folder:
            arguments = machine, f"file://{folder}/store", mesh, strategy, folder
            multiprocessing.spawn(_rank, args=arguments, nprocs=4)
            print(f"{mesh:10} {strategy or 'auto':12}: gradients off {Path(folder, 'off').read_text()}")


def _rank(
    rank: int, machine: Machine, store: str, mesh: str, strategy: str | None, folder: str, world=4, backend="gloo"
) -> None:
    machine.start(rank, world, store, backend)
    source, inputs = family("llama-tiny")
    inputs = on(machine.device, inputs)
    eager = copy.deepcopy(source).to(machine.device)
    wanted = gradients_after(eager, inputs)
    mine = autopar.compile(source.to(machine.device), machine.mesh(mesh), inputs, strategy=strategy, hardware="h100")
    found = gradients_after(mine, inputs)
    if rank == 0:
        Path(folder, "off").write_text(f"{apart(found, {name: wanted[name] for name in found}):.1e}")
    dist.barrier()
    dist.destroy_process_group()


def verified(machine: Machine) -> None:
    """All ranks of a step on the one device, with its kernels, against the unsharded model there."""
    for name in FAMILIES[:3] if not machine.is_gpu else FAMILIES:
        for mesh, strategy in (("dp=2,tp=2", "auto"), ("dp=4", "fsdp"), ("cp=2", "ring")):
            source, inputs = family(name)
            for precision in ("fp32", "bf16"):
                options = dict(strategy=strategy, precision=precision, hardware="h100", device=machine.device)
                try:
                    report = autopar.verify(source, mesh, inputs, **options)
                    worst = max(report.errors, key=report.errors.__getitem__)
                    said = f"{'match' if report.match else 'WRONG'}, worst {report.errors[worst]:.1e} ({worst})"
                except autopar.errors.AutoparError as error:
                    said = f"{type(error).__name__}: {error.message}"
                print(f"{name:12} {mesh:10} {strategy:5} {precision}: {said}", flush=True)


def nccl(machine: Machine) -> None:
    """Two ranks of NCCL on one device, where it lets them: gradients of a step, then what the one says of the other
    that dies. NCCL lets them from 2.30 on."""
    if not machine.is_gpu:
        return print("needs a GPU")
    environment = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "AUTOPAR_TIMEOUT_S": "5"}
    os.environ |= environment
    for mesh, strategy in (("dp=2", "fsdp"), ("tp=2", "megatron_sp"), ("pp=2", None)):
        with tempfile.TemporaryDirectory() as folder:
            arguments = machine, f"file://{folder}/store", mesh, strategy, folder, 2, "cpu:gloo,cuda:nccl"
            try:
                multiprocessing.spawn(_rank, args=arguments, nprocs=2)
                print(f"{mesh:10} {strategy or 'auto':12}: gradients off {Path(folder, 'off').read_text()}", flush=True)
            except Exception as error:  # NCCL refuses two ranks of a device before 2.30
                last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
                return print(f"{mesh:10} {strategy or 'auto':12}: {last}")
    with tempfile.TemporaryDirectory() as folder, suppress(Exception):
        multiprocessing.spawn(_dies, args=(machine, f"file://{folder}/store"), nprocs=2)


def _dies(rank: int, machine: Machine, store: str) -> None:
    machine.start(rank, 2, store, "cpu:gloo,cuda:nccl")
    source, inputs = family("llama-tiny")
    inputs = on(machine.device, inputs)
    model = autopar.compile(source.to(machine.device), machine.mesh("dp=2"), inputs, strategy="fsdp", hardware="h100")
    for step in range(4):
        if rank == 1 and step == 2:
            os._exit(0)
        train(model, inputs)
        print(f"rank {rank}, step {step}", flush=True)
    machine.wait()
