"""Measure one process's device, all processes at the same time, so that what they share is shared in the numbers.

Times are lower quartiles over rounds, as other work on the machine disturbs them little; of a collective the slowest
process of each round counts. Collectives are measured by the bytes that a device holds before them, in groups of every
size that divides the world, neighbours and far apart, all groups at once; the larger ones not, where they would take
longer than LONGEST_SECONDS over a slow network.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from ..hardware.profile import KINDS
from ..ops import autopar
from ..processes.machines import Machine, cores_per_rank, equal_machines, numbered

Call = Callable[[], object]
TIMEOUT_SECONDS = 60
LONGEST_SECONDS = 0.5  # of a call, after which larger ones are left out
FEWEST_POINTS = 3  # of a curve
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
PRODUCTS = {  # rows, depth, columns; by whether the device is a GPU
    False: [
        (512, 512, 512),
        (32, 512, 512),
        (128, 512, 512),
        (512, 16, 512),
        (512, 64, 512),
        (512, 512, 32),
        (1024, 256, 128),
    ],
    True: [
        (8192, 8192, 8192),
        (4096, 4096, 4096),
        (8192, 512, 8192),
        (8192, 128, 8192),
        (512, 8192, 8192),
        (8192, 8192, 512),
    ],
}
COLD_BYTES = 2**26  # of operands that take turns, so that no cache holds them: in a step others were used in between
EXCHANGED = "reduce_scatter as all_to_all"


@dataclass(frozen=True)
class Effort:
    """The extent of a measurement: bytes that a device holds before a collective, rounds, dtypes."""

    held_bytes: tuple[int, ...]
    rounds: int
    dtypes: tuple[str, ...]


QUICK = Effort((2**12, 2**15, 2**18, 2**21), 16, ("fp32",))
FULL = Effort(tuple(2**k for k in range(10, 27, 2)), 24, tuple(DTYPES))


class Device:
    """The device of one process."""

    def __init__(self, rank: int, backend: str):
        self.is_gpu = backend == "nccl"
        self.device = torch.device("cuda", rank) if self.is_gpu else torch.device("cpu")
        if self.is_gpu:
            torch.cuda.set_device(self.device)

    def wait(self) -> None:
        """Wait until a GPU has done all work that it was given."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def ones(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor of ones on the device."""
        return torch.ones(shape, dtype=dtype, device=self.device)

    def seconds(self, call: Call, rounds: int, calls: int = 1, slowest: bool = False) -> float:
        """Measure the seconds of one call; all processes start each round together. `slowest`: in each round those of
        the slowest process."""
        call()
        measured = []
        for _ in range(rounds):
            self.wait()
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            self.wait()
            measured.append((time.perf_counter() - start) / calls)
        if slowest and dist.is_initialized():
            times = torch.tensor(measured, device=self.device, dtype=torch.float64)
            dist.all_reduce(times, dist.ReduceOp.MAX)
            measured = times.tolist()
        return float(np.quantile(measured, 0.25))


def products(device: Device, effort: Effort) -> list[dict]:
    """Measure matrix products, each the mean of a linear layer's three, forward and backward: rows, depth, columns,
    dtype and seconds."""
    found = []
    for name in effort.dtypes:
        for rows, depth, columns in PRODUCTS[device.is_gpu]:
            if name == "fp16" and not device.is_gpu:  # most CPUs have no fast kernel
                rows, depth, columns = rows // 4, depth // 4, columns // 4
            calls = max(1, 2**24 // (rows * depth * columns)) if not device.is_gpu else 4
            seconds = device.seconds(
                _linear_layers(device, rows, depth, columns, DTYPES[name]), effort.rounds, 3 * calls
            )
            found.append({"rows": rows, "depth": depth, "columns": columns, "dtype": name, "seconds": seconds})
    return found


def _linear_layers(device: Device, rows: int, depth: int, columns: int, dtype: torch.dtype) -> Call:
    """Return a call that computes the next of the three products of many layers in turn."""
    layer_bytes = (rows * depth + depth * columns + rows * columns) * dtype.itemsize
    products = []
    for _ in range(max(1, COLD_BYTES // layer_bytes)):
        x, weight, grad = (device.ones(*s, dtype=dtype) for s in ((rows, depth), (columns, depth), (rows, columns)))
        products += [(x, weight.t()), (grad, weight), (grad.t(), x)]
    turns = itertools.cycle(products)
    return lambda: torch.mm(*next(turns))


def functions_per_second(device: Device, effort: Effort) -> float:
    """Measure how many values of gelu, by its tanh formula, are computed a second."""
    values = device.ones(2**24 if device.is_gpu else 2**19)
    return values.numel() / device.seconds(lambda: torch.nn.functional.gelu(values, approximate="tanh"), effort.rounds)


def attention(device: Device, effort: Effort) -> dict:
    """Measure forward and backward of all heads at once, without a mask: dtype, FLOPs per second of each direction."""
    dtype = "bf16" if device.is_gpu else "fp32"
    batch, heads, seq, width = (4, 16, 4096, 128) if device.is_gpu else (2, 8, 128, 64)
    q, k, v, grad = (device.ones(batch, heads, seq, width, dtype=DTYPES[dtype]) for _ in range(4))
    out, lse = autopar.attention(q, k, v, None, False, None)
    forward = device.seconds(lambda: autopar.attention(q, k, v, None, False, None), effort.rounds)
    backward = device.seconds(lambda: autopar.attention_bw(grad, q, k, v, out, lse, None, False, None), effort.rounds)
    product = 2.0 * batch * heads * seq * seq * width
    return {
        "dtype": dtype,
        "head_dim": width,
        "sequence": seq,
        "forward": 2 * product / forward,
        "backward": 5 * product / backward,
    }


def copy_bytes_per_second(device: Device, effort: Effort) -> float:
    """Measure the bytes read plus written a second, in a copy that no cache holds."""
    source = device.ones(2**28 if device.is_gpu else 2**23)
    target = torch.empty_like(source)
    return 2 * source.nbytes / device.seconds(lambda: target.copy_(source), effort.rounds)


def launch_seconds(device: Device, effort: Effort) -> float:
    """Measure the seconds of an op on 64 numbers."""
    small = device.ones(64)
    return device.seconds(lambda: small + 1, effort.rounds, calls=200)


def group_shapes(world: int) -> Iterator[tuple[int, int]]:
    """Iterate over (devices, stride) of the groups to measure: each divisor of the world as neighbours, and as far
    apart as they can be."""
    for devices in (n for n in range(2, world + 1) if world % n == 0):
        yield from ((devices, stride) for stride in sorted({1, world // devices}))


def group_of(devices: int, stride: int, rank: int, world: int) -> tuple[dist.ProcessGroup, list[int]]:
    """Return this rank's group, and its ranks, among all of this shape, which every process must create."""
    own = None
    for start in (r for r in range(world) if r // stride % devices == 0):
        ranks = [start + i * stride for i in range(devices)]
        group = dist.new_group(ranks)
        own = (group, ranks) if rank in ranks else own
    return own


def calls_of(
    device: Device, held_bytes: int, group: dist.ProcessGroup, ranks: list[int], rank: int
) -> Iterator[tuple[str, Call]]:
    """Iterate over the collectives, each with a call on so many bytes a device."""
    n, numel = len(ranks), math.ceil(held_bytes / 4 / len(ranks)) * len(ranks)
    held, other, part = device.ones(numel), device.ones(numel), device.ones(numel // n)
    gathered = device.ones(numel * n)
    at = ranks.index(rank)
    after, before = ranks[(at + 1) % n], ranks[at - 1]

    def exchange_and_sum():
        dist.all_to_all_single(other, held, group=group)
        return other.view(n, -1).sum(0)

    def send():
        pair = [dist.P2POp(dist.isend, held, after, group), dist.P2POp(dist.irecv, other, before, group)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    def gather():
        if device.is_gpu:
            dist.all_gather_into_tensor(gathered, held, group=group)
        else:
            autopar.gather_by_broadcasts(held, n, group.group_name)

    yield "all_gather", gather
    yield "reduce_scatter", lambda: dist.reduce_scatter_tensor(part, held, group=group)
    yield EXCHANGED, exchange_and_sum
    yield "all_to_all", lambda: dist.all_to_all_single(other, held, group=group)
    yield "all_reduce", lambda: dist.all_reduce(held, group=group)
    yield "broadcast", lambda: dist.broadcast(held, ranks[0], group=group)
    yield "send", send


def collectives(device: Device, effort: Effort, rank: int, world: int) -> list[dict]:
    """Measure curves: kind, devices, stride, bytes and seconds."""
    found = []
    for devices, stride in group_shapes(world):
        group, ranks = group_of(devices, stride, rank, world)
        curves = {kind: [] for kind in (*KINDS, EXCHANGED)}
        for count, held_bytes in enumerate(effort.held_bytes, 1):
            rounds = max(5, min(effort.rounds, 2**26 // held_bytes))
            for kind, call in calls_of(device, held_bytes, group, ranks, rank):
                curves[kind].append(device.seconds(call, rounds, slowest=True))
            longest = max(seconds[-1] for seconds in curves.values())  # the same on all ranks
            if count >= FEWEST_POINTS and longest > LONGEST_SECONDS:
                break
        shape = {"devices": devices, "stride": stride, "bytes": list(effort.held_bytes[:count])}
        found += [{"kind": kind, **shape, "seconds": seconds} for kind, seconds in curves.items()]
    return found


def overlap_slowdown(device: Device, effort: Effort) -> float:
    """Divide the seconds of an all-reduce and products at once by those of the longer of the two alone. The result is
    between 1 and 2, where one waits for the other; more is other work's."""
    size = 4096 if device.is_gpu else 384
    a, buffer = device.ones(size, size), device.ones(2**26 if device.is_gpu else 2**19)
    collective = device.seconds(lambda: dist.all_reduce(buffer), effort.rounds, slowest=True)
    times = max(1, round(collective / device.seconds(lambda: a @ a, effort.rounds)))

    def compute():
        for _ in range(times):
            a @ a  # noqa: B018

    def both():
        work = dist.all_reduce(buffer, async_op=True)
        compute()
        work.wait()

    computing = device.seconds(compute, effort.rounds, slowest=True)
    return min(2.0, max(1.0, device.seconds(both, effort.rounds, slowest=True) / max(computing, collective)))


def memory_bytes(device: Device, ranks: int) -> int:
    """Return the memory of one device, or a process's share of that of the machine, which has so many."""
    if device.is_gpu:
        return torch.cuda.get_device_properties(device.device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def machines_of_ranks(world: int) -> list[Machine]:
    """Return the machine of each rank."""
    everyone: list = [None] * world
    dist.all_gather_object(everyone, Machine.of_this_process())
    return everyone


def everything(device: Device, effort: Effort, rank: int, world: int) -> dict:
    """Measure all of the above, in a process group of the whole world. Raise HardwareError for machines that are not
    alike."""
    machines = machines_of_ranks(world)
    ranks = equal_machines(numbered(machines))
    return {
        "cores_per_device": 0.0 if device.is_gpu else cores_per_rank(machines),
        "products": products(device, effort),
        "attention": attention(device, effort),
        "functions_per_second": functions_per_second(device, effort),
        "copy_bytes_per_second": copy_bytes_per_second(device, effort),
        "launch_seconds": launch_seconds(device, effort),
        "memory_bytes": memory_bytes(device, ranks),
        "machine_ranks": ranks,
        "curves": collectives(device, effort, rank, world),
        "overlap_slowdown": overlap_slowdown(device, effort) if world > 1 else 1.0,
    }


def main(rank: int, world: int, backend: str, quick: bool, folder: str) -> None:
    """Measure in one of the processes that were started for it. Rank 0 leaves measured.json in the folder."""
    found = measured(rank, rank, world, backend, quick, init_method=f"file://{folder}/store")
    if rank == 0:
        Path(folder, "measured.json").write_text(json.dumps(found))


def measured(rank: int, local_rank: int, world: int, backend: str, quick: bool, init_method: str) -> dict:
    """Join the other processes, measure with them, and return what was measured."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # newer names of collectives, which torch 2.11 lacks
    torch.set_num_threads(1)
    device = Device(local_rank, backend)
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world, timeout=timeout)
    try:
        found = everything(device, QUICK if quick else FULL, rank, world)
        dist.barrier()
        return found
    finally:
        dist.destroy_process_group()
