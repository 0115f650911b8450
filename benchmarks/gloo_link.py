"""Measures this machine as a group of gloo processes: the numbers of autopar/hardware/profiles/cpu-gloo.toml.

    OMP_NUM_THREADS=1 python benchmarks/gloo_link.py --world 2

All processes compute at the same time, each on one thread, so what they share (memory, caches) is shared in the numbers
too. Of the rounds at each size the lower quartile counts, as other work on the machine disturbs it little. Collectives:
seconds = latency + bytes sent / speed, fitted by least squares of the relative error; "sent" is what a device sends in
an ideal ring (see autopar/cost/redistribute.py).
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

SIZES_BYTES = [2**k for k in range(12, 26)]  # 4 KiB to 32 MiB, global
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
TIMEOUT_SECONDS = 60
LIMIT_SECONDS = 300


def seconds_of(call: Callable[[], object], rounds: int, calls: int = 1) -> float:
    """Lower quartile over `rounds` of the seconds of one call; all processes start each round together."""
    call()
    measured = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        measured.append((time.perf_counter() - start) / calls)
    return statistics.quantiles(measured, n=4)[0]


def fit(points: list[tuple[float, float]]) -> tuple[float, float, float]:
    """(bytes sent, seconds) pairs -> latency in seconds, bytes per second, median relative error of the fit."""
    sent, seconds = (numpy.array(column) for column in zip(*points))
    design = numpy.stack([1 / seconds, sent / seconds], axis=1)
    (latency, per_byte), *_ = numpy.linalg.lstsq(design, numpy.ones(len(points)), rcond=None)
    error = numpy.median(numpy.abs((latency + per_byte * sent) / seconds - 1))
    return float(latency), float(1 / per_byte), float(error)


def collectives(world: int) -> dict[str, list[tuple[float, float]]]:
    """(bytes sent, seconds) by collective at SIZES_BYTES; reduce_scatter also as all-to-all and local sum."""
    points: dict[str, list[tuple[float, float]]] = {}
    for size_bytes in SIZES_BYTES:
        numel = size_bytes // 4
        whole, other, part = torch.ones(numel), torch.ones(numel), torch.ones(numel // world)
        part_share = (world - 1) / world * size_bytes

        def exchange_and_sum(whole=whole, other=other):
            dist.all_to_all_single(other, whole)
            return other.view(world, -1).sum(0)

        calls = {
            "all_reduce": (2 * part_share, lambda w=whole: dist.all_reduce(w)),
            "all_gather": (part_share, lambda w=whole, p=part: dist.all_gather_into_tensor(w, p)),
            "all_to_all": (part_share, lambda w=whole, o=other: dist.all_to_all_single(o, w)),
            "reduce_scatter": (part_share, lambda w=whole, p=part: dist.reduce_scatter_tensor(p, w)),
            "reduce_scatter as all_to_all": (part_share, exchange_and_sum),
        }
        for name, (sent, call) in calls.items():
            points.setdefault(name, []).append((sent, seconds_of(call, rounds=24)))
    return points


def compute() -> dict[str, float]:
    """One process: matrix products, a copy of 64 MiB (bytes read plus written), and the start of a small op."""
    numbers = {}
    for name, dtype in DTYPES.items():
        for size in (128, 256) if name == "fp16" else (128, 256, 512, 1024):  # fp16 lacks a fast kernel on most CPUs
            a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
            seconds = seconds_of(lambda a=a, b=b: a @ b, rounds=12, calls=max(1, 2**27 // size**3))
            numbers[f"{name} matmul {size} GFLOP/s"] = 2 * size**3 / seconds / 1e9
    source, target = torch.ones(2**24), torch.ones(2**24)
    numbers["copy GB/s"] = 2 * 4 * 2**24 / seconds_of(lambda: target.copy_(source), rounds=12) / 1e9
    small = torch.ones(64)
    numbers["small op us"] = seconds_of(lambda: small + 1, rounds=12, calls=1000) * 1e6
    return numbers


def measure(rank: int, world: int, store: str) -> None:
    """One process. Rank 0 prints."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
    numbers, points = compute(), collectives(world)
    if rank == 0:
        for name, value in numbers.items():
            print(f"{name:24} {value:10.2f}")
        used = ("all_reduce", "all_gather", "all_to_all")
        points["the three together"] = [pair for name in used for pair in points[name]]
        for name, pairs in points.items():
            latency_seconds, bytes_per_second, error = fit(pairs)
            print(
                f"{name:30} latency {latency_seconds * 1e6:7.0f} us   {bytes_per_second / 1e9:6.2f} GB/s sent   "
                f"largest {pairs[-1][0] / pairs[-1][1] / 1e9:6.2f} GB/s   median error {error:.0%}"
            )
        print(f"{'global KiB':>10}" + "".join(f"{name:>30} us" for name in points if name != "the three together"))
        for i, size_bytes in enumerate(SIZES_BYTES):
            row = (pairs[i][1] * 1e6 for name, pairs in points.items() if name != "the three together")
            print(f"{size_bytes // 1024:10}" + "".join(f"{microseconds:33.0f}" for microseconds in row))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2, help="number of processes")
    world = parser.parse_args().world
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.start_processes(
            measure, (world, f"{folder}/store"), nprocs=world, join=False, start_method="spawn"
        )
        deadline = time.monotonic() + LIMIT_SECONDS
        while not context.join(timeout=5):
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                raise SystemExit(f"no result after {LIMIT_SECONDS} s")


if __name__ == "__main__":
    main()
