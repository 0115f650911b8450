"""Fits what the profiles of H100 and H200 say of attention's kernels to published speeds, and prints how far each is
off.

    OMP_NUM_THREADS=1 python benchmarks/attention_kernels.py

The speeds are those of the figures of FlashAttention-3 (Shah et al., arXiv 2407.08608, figures 5 and 6): fp16 on an
H100 SXM5, 16,384 tokens in all, a hidden size of 2048. Its FLOPs are counted as in autopar/cost/attention.py. Of
FlashAttention-3 the profiles take the backward's share alone: its forward is fitted to measured operators
(benchmarks/operator_tables.py).
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from operator_tables import descend

from autopar.cost.attention import Shape, blocked_seconds
from autopar.hardware import profile
from autopar.hardware.profile import Attention
from autopar.utils.format import table as text_table

FILE = Path(__file__).parent / "attention_kernels.csv"
TOKENS, HIDDEN, PEAK = 2**14, 2048, "fp16"
DIMS = (64.0, 128.0)


def seconds(constants: Attention, row: dict) -> float:
    """Return the seconds that the cost model says of one row."""
    hardware = profile.load("h100")
    shape, forward = shape_of(row), row["direction"] == "forward"
    peak = hardware.peak_flops_per_second(PEAK)
    return float(blocked_seconds(constants, hardware.kernels.multiprocessors, peak, shape, forward))


def shape_of(row: dict) -> Shape:
    """Return the attention of a row."""
    s, d = int(row["sequence"]), int(row["head_dim"])
    return Shape(TOKENS // s, HIDDEN // d, s, s, d, d, causal=row["causal"] == "1")


def published_seconds(row: dict) -> float:
    """Return the seconds of a row as published."""
    return float(shape_of(row).flops(row["direction"] == "forward")) / (float(row["tflops"]) * 1e12)


def fitted(rows: list[dict]) -> Attention:
    """Return the constants that predict the rows best."""

    def constants(numbers) -> Attention:
        start, block, backward, *shares = map(float, numbers)
        return Attention(DIMS, tuple(shares), backward, start, block)

    def loss(numbers) -> float:
        found = constants(numbers)
        return float(np.mean([abs(np.log(seconds(found, row) / published_seconds(row))) for row in rows]))

    return constants(descend(loss, [5e-6, 1e-6, 0.85, 0.35, 0.4]))


def main() -> None:
    with FILE.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        own = [row for row in rows if row["kernel"] == kernel]
        found = fitted(own)
        print(f"{kernel}: {found}")
        errors = [(row["direction"], "causal" if row["causal"] == "1" else "whole", row["head_dim"], row["sequence"],
                   f"{seconds(found, row) / published_seconds(row) - 1:+.0%}") for row in own]  # fmt: skip
        mean = np.mean([abs(seconds(found, row) / published_seconds(row) - 1) for row in own])
        print(*text_table(["direction", "mask", "head_dim", "sequence", "off"], errors, left=2), sep="\n")
        print(f"mean error {mean:.1%}\n")


if __name__ == "__main__":
    main()
