"""Training steps that others measured and published, against what the cost model predicts for the same configuration.

    OMP_NUM_THREADS=1 python benchmarks/published.py [--only NAME] > benchmarks/results/published.txt

Nothing here was measured by autopar. Each source is a table of its own: seconds of a step as published, as the serial
sum of compute and communication, and as simulated with overlap, then both after one factor for the whole source, the
geometric mean of published over predicted (Megatron: of three rows): what is left is how well the model ranks
configurations. No constant of a profile is fitted to these.

Megatron   Narayanan et al., SC'21, ten rows from 1.7 B to 1 T parameters, pipelines included:
           benchmarks/published_megatron.py.
torchtitan github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3, with
           torch.compile, bf16.
           Those H100 have 2.4 TB/s and run at 500 W, the profile has 3.35 TB/s at 700 W. Its selective checkpointing
           also recomputes every second matrix product, ours none.
foundry    github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md: FSDP of MPT models on nodes of 8, rows
           of tokens a second. MPT has ALiBi and no biases; the nearest builder is gpt. Gradients are reduced in every
           pass, or once where whole ones fit, whichever the planner takes.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from functools import partial

import published_megatron

import autopar
from autopar import models
from autopar.cli.common import quiet
from autopar.utils.format import table

GIB = 2**30


@dataclass(frozen=True)
class Row:
    """A published run: `samples` a replica in each of `passes`, and the seconds of a step."""

    name: str
    model: str
    mesh: str
    seq: int
    samples: int
    passes: int
    strategy: str
    recompute: str
    hardware: str
    seconds: float

    @property
    def batch(self) -> int:
        return self.samples * self.passes * autopar.Mesh.parse(self.mesh).size("dp")


def torchtitan() -> list[Row]:
    """(devices, tokens a second and device)."""
    rows = [(8, 6667), (128, 6514)]
    return [
        Row(f"Llama 3.1 8B on {n}", "llama3-8b", f"dp={n}", 8192, 2, 1, "fsdp", "selective", "h100", 2 * 8192 / speed)
        for n, speed in rows
    ]


def foundry(hardware: str) -> list[Row]:
    """(hardware, model, devices, samples, passes, checkpointing, tokens a second and device), sequences of 2048."""
    sizes = {
        "1b": (2048, 24, 16),
        "7b": (4096, 32, 32),
        "13b": (5120, 40, 40),
        "30b": (7168, 48, 56),
        "70b": (8192, 80, 64),
    }
    rows = [
        ("a100", "1b", 8, 14, 4, False, 20513), ("a100", "7b", 8, 6, 2, False, 4641),
        ("a100", "13b", 8, 2, 3, False, 2262), ("a100", "30b", 8, 3, 21, True, 916),
        ("a100", "70b", 64, 8, 4, True, 410), ("h100", "1b", 8, 14, 1, False, 45455),
        ("h100", "7b", 8, 6, 1, False, 10643), ("h100", "13b", 8, 2, 1, False, 4792),
        ("h100", "13b", 64, 2, 1, False, 4800), ("h100", "30b", 16, 10, 3, True, 2263),
        ("h100", "70b", 64, 8, 4, True, 1039),
    ]  # fmt: skip
    found = []
    for own, name, devices, samples, passes, checkpoints, speed in rows:
        if own != hardware:
            continue
        hidden, layers, heads = sizes[name]
        model = f"gpt:hidden={hidden},layers={layers},heads={heads},vocab=50368,seq=2048"
        seconds = samples * passes * 2048 / speed
        run, recompute = f"{name} on {devices} {hardware}", "full" if checkpoints else "none"
        found.append(Row(run, model, f"dp={devices}", 2048, samples, passes, "fsdp", recompute, hardware, seconds))
    return found


MEGATRON = "Megatron"
SOURCES = {
    "torchtitan": torchtitan, "foundry-a100": partial(foundry, "a100"), "foundry-h100": partial(foundry, "h100"),
}  # fmt: skip


def predicted(row: Row) -> autopar.Estimate:
    model, inputs = models.build(row.model, batch=row.batch, seq=row.seq)
    return autopar.estimate(
        model, row.mesh, inputs, strategy=row.strategy, recompute=row.recompute, micro_batches=row.passes,
        hardware=row.hardware, precision="bf16",
    )  # fmt: skip


def table_of(source: str, rows: list[Row]) -> list[str]:
    """The predictions of a source against what it published."""
    estimates = []
    for row in rows:
        print(f"{source} {row.name}", file=sys.stderr)
        estimates.append(predicted(row))
    published = [row.seconds for row in rows]
    plans = [e.plan for e in estimates]
    serial = [p.compute_seconds + p.communication_seconds + p.recompute_seconds + p.update_seconds for p in plans]
    overlapped = [e.plan.step_seconds for e in estimates]
    factors = [_mean_ratio(published, values) for values in (serial, overlapped)]
    cells = []
    for i, (row, e) in enumerate(zip(rows, estimates)):
        cells.append([
            row.name, row.mesh, f"{row.samples} x {row.passes}", row.recompute,
            f"{e.tflops_per_device(e.model_flops, row.seconds):.0f}", f"{published[i]:.3f}",
            f"{serial[i]:.3f}", _off(serial[i], published[i]), _off(serial[i] * factors[0], published[i]),
            f"{overlapped[i]:.3f}", _off(overlapped[i], published[i]), _off(overlapped[i] * factors[1], published[i]),
            f"{e.plan.peak_bytes / GIB:.1f}" + ("" if e.fits else " (no room)"),
        ])  # fmt: skip
    header = ["run", "mesh", "samples x passes", "recomputed", "model TFLOP/s", "published s", "serial s", "off",
              "scaled", "overlapped s", "off", "scaled", "GiB"]  # fmt: skip
    means = [_mean_off(v, published) for v in (serial, overlapped)]
    scaled = [_mean_off([x * f for x in v], published) for v, f in zip((serial, overlapped), factors)]
    return [
        source, *table(header, cells, left=2),
        f"mean error: serial {means[0]:.0%}, after a factor of {factors[0]:.2f} {scaled[0]:.0%}; overlapped "
        f"{means[1]:.0%}, after a factor of {factors[1]:.2f} {scaled[1]:.0%}",
        "",
    ]  # fmt: skip


def _mean_ratio(published: list[float], values: list[float]) -> float:
    return math.exp(sum(math.log(p / v) for p, v in zip(published, values)) / len(values))


def _mean_off(values: list[float], published: list[float]) -> float:
    return sum(abs(v / p - 1) for v, p in zip(values, published)) / len(values)


def _off(value: float, published: float) -> str:
    return f"{value / published - 1:+.0%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=(MEGATRON, *SOURCES))
    only = parser.parse_args().only
    quiet()
    print(
        "Published steps against predictions of the cost model, which was fitted to none of them "
        "(benchmarks/published.py)\n"
    )
    if only in (None, MEGATRON):
        print("\n".join(published_megatron.lines()), flush=True)
    for source, rows in SOURCES.items():
        if only in (None, source):
            print("\n".join(table_of(source, rows())), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
