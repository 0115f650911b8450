"""Training steps that others measured and published, against what the cost model predicts for the same configuration.

    OMP_NUM_THREADS=1 python benchmarks/published.py [--only NAME] > benchmarks/results/published.txt

Nothing here was measured by autopar, no constant of a profile is fitted to these, and nothing is scaled. A row is
predicted with what its source says of it: whether pointwise ops were compiled or fused (torchtitan, Megatron) or ran
one by one (foundry), the attention of its time, its optimizer.

Megatron   Narayanan et al., SC'21, ten rows from 1.7 B to 1 T parameters, pipelines included:
           benchmarks/published_megatron.py.
torchtitan github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3, with
           torch.compile, bf16.
           Those H100 have 2.4 TB/s, as predicted with, and run at 500 W, where the profile has 700 W. Its selective
           checkpointing also recomputes every second matrix product, ours none.
foundry    github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md: FSDP of MPT models on nodes of 8, rows
           of tokens a second. MPT has ALiBi and no biases; the nearest builder is gpt. Attention was the first
           FlashAttention, in Triton (scripts/train/benchmarking/submit_benchmarks.py). Gradients are reduced in every
           pass, or once where whole ones fit, whichever the planner takes.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import published_megatron

import autopar
from autopar import models
from autopar.cli.common import quiet
from autopar.hardware.profile import Hardware
from autopar.utils.format import table

GIB = 2**30
# Composer's AdamW is not fused: its eight kernels read and write 80 bytes an element, a fused one 28
autopar.register_optimizer("unfused_adamw", tensors=2, sweeps=80 / 28)


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
    execution: str = "eager"

    @property
    def batch(self) -> int:
        return self.samples * self.passes * autopar.Mesh.parse(self.mesh).size("dp")


def torchtitan() -> list[Row]:
    """(devices, tokens a second and device)."""
    rows = [(8, 6667), (128, 6514)]
    return [
        Row(
            f"Llama 3.1 8B on {n}",
            "llama3-8b",
            f"dp={n}",
            8192,
            2,
            1,
            "fsdp",
            "selective",
            "h100",
            2 * 8192 / speed,
            "compiled",
        )
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


def hardware_of(row: Row) -> Hardware:
    """The profile with what the run's own devices and software differ in."""
    hardware = published_megatron.of_then(row.hardware, row.model.startswith("gpt"))
    return replace(hardware, memory_bytes_per_second=2.4e12) if row.model == "llama3-8b" else hardware


def predicted(row: Row) -> autopar.Estimate:
    model, inputs = models.build(row.model, batch=row.batch, seq=row.seq)
    return autopar.estimate(
        model, row.mesh, inputs, strategy=row.strategy, recompute=row.recompute, micro_batches=row.passes,
        hardware=hardware_of(row),
        optimizer="unfused_adamw" if row.model.startswith("gpt") else "adamw", precision="bf16",
        execution=row.execution,
    )  # fmt: skip


def table_of(source: str, rows: list[Row]) -> tuple[list[str], list[tuple[float, float]]]:
    """The predictions of a source against what it published, and (published, predicted) seconds."""
    estimates = []
    for row in rows:
        print(f"{source} {row.name}", file=sys.stderr)
        estimates.append(predicted(row))
    pairs = [(row.seconds, e.plan.step_seconds) for row, e in zip(rows, estimates)]
    cells = []
    for row, e in zip(rows, estimates):
        p = e.plan
        parts = (p.compute_seconds + p.recompute_seconds, p.communication_seconds, p.exposed_seconds, p.update_seconds)
        cells.append([
            row.name, row.mesh, f"{row.samples} x {row.passes}", row.recompute,
            f"{e.tflops_per_device(e.model_flops, row.seconds):.0f}", f"{row.seconds:.3f}",
            *(f"{seconds:.3f}" for seconds in parts), f"{p.step_seconds:.3f}", _off(p.step_seconds, row.seconds),
            f"{p.peak_bytes / GIB:.1f}" + ("" if e.fits else " (no room)"),
        ])  # fmt: skip
    header = ["run", "mesh", "samples x passes", "recomputed", "model TFLOP/s", "published s", "compute",
              "communication", "exposed", "update", "predicted s", "off", "GiB"]  # fmt: skip
    return [source, *table(header, cells, left=2), summary("all rows", pairs), ""], pairs


def summary(what: str, pairs: list[tuple[float, float]]) -> str:
    """Say in a line how far predictions are off, and how they rank."""
    published, found = zip(*pairs)
    errors = [abs(b / a - 1) for a, b in pairs]
    return (
        f"{what}: median error {median(errors):.1%}, at most {max(errors):.1%}, bias "
        f"{math.exp(sum(math.log(b / a) for a, b in pairs) / len(pairs)) - 1:+.1%}; Kendall's tau of seconds "
        f"{published_megatron.kendall(list(published), list(found)):.2f}"
    )


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
    pairs: dict[str, list[tuple[float, float]]] = {}
    if only in (None, MEGATRON):
        lines, found = published_megatron.lines()
        pairs = dict(found)
        print("\n".join(lines), flush=True)
    others = []
    for source, rows in SOURCES.items():
        if only in (None, source):
            lines, found = table_of(source, rows())
            others += found
            print("\n".join(lines), flush=True)
    if only is None:
        for way, found in pairs.items():
            print(
                summary(
                    f"all {len(found) + len(others)} rows, of Megatron April's {way.replace('_', ' ')}", found + others
                )
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
