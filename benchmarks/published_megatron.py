"""The ten rows of Megatron's weak scaling, 1.7 B to 1 T parameters on 32 to 3072 A100, with and without interleaved
stages.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC'21,
arXiv 2104.04473: table 1 (April 2021) and that of its first version (January 2021): no interleaving, 291 B in the place
of 310 B. Layers per virtual stage and micro-batches as in github.com/NVIDIA/Megatron-LM, examples/sc21/run_table_1.sh.
Rates are by the paper's F = 96 B s L h^2 (1 + s / (6 h) + V / (16 L h)). All blocks are recomputed;
benchmarks/megatron_gpt.py has the ops of those runs.

Predicted twice, both without overlap of gradients, which those runs had not:

    autopar   what `autopar estimate` says. Sends run beside compute, as torch's engine has them; gradients are reduced
              in 32 bits, bucket by bucket
    as run    the same stages with what Megatron did. A rank that sends does nothing else: a whole activation in
              January, 1 / t of it and an all-gather in the next node in April (section 4.1). Gradients are reduced in
              16 bits, in one piece

One factor of seconds for each serves both tables: the mean of published over predicted of three rows of April, the
smallest, the largest, and 39.1 B, the first with a pipeline, chosen before there was a result. It holds what is in
neither: F counts the last product of a block as computed again, 8 %, which autopar leaves out, and the optimizer's
step. (That gradients are narrow and in one piece was put into `as run` after a first look at `autopar`.) January's rows
without a pipeline are up to 10 % slower than April's in the same configuration, which no model of a configuration can
know.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace

import megatron_gpt

import autopar
from autopar.cost.collectives import CollectiveCost
from autopar.hardware.profile import load
from autopar.plans.pipeline import Pipeline
from autopar.utils.format import table

SEQ, VOCAB, BYTES = 2048, 51200, 2  # of a number of an activation
FITTED = ("1.7B", "39.1B", "1008B")
WAYS = ("autopar", "as_run")


@dataclass(frozen=True)
class Run:
    """`samples` of a micro-batch on a replica, `stages` a rank, and TFLOP/s of a device as published."""

    name: str
    heads: int
    hidden: int
    layers: int
    tp: int
    pp: int
    dp: int
    batch: int
    samples: int
    stages: int
    tflops: float

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def micro_batches(self) -> int:
        return self.batch // (self.samples * self.dp)

    @property
    def mesh(self) -> str:
        sizes = (("pp", self.pp), ("dp", self.dp), ("tp", self.tp))
        return ",".join(f"{axis}={size}" for axis, size in sizes if size > 1 or axis == "dp")

    @property
    def model(self) -> str:
        return f"gpt:hidden={self.hidden},layers={self.layers},heads={self.heads},vocab={VOCAB},seq={SEQ}"

    @property
    def seconds(self) -> float:
        """Of a step, as published."""
        return self.tflops_in(1.0) / self.tflops

    def tflops_in(self, seconds: float) -> float:
        """TFLOP/s of a device by the paper's F."""
        common = 96 * self.batch * SEQ * self.layers * self.hidden**2
        flops = common * (1 + SEQ / (6 * self.hidden) + VOCAB / (16 * self.layers * self.hidden))
        return flops / (self.devices * seconds * 1e12)


APRIL = [
    Run("1.7B", 24, 2304, 24, 1, 1, 32, 512, 16, 1, 137), Run("3.6B", 32, 3072, 30, 2, 1, 32, 512, 16, 1, 138),
    Run("7.5B", 32, 4096, 36, 4, 1, 32, 512, 16, 1, 142), Run("18.4B", 48, 6144, 40, 8, 1, 32, 1024, 8, 1, 135),
    Run("39.1B", 64, 8192, 48, 8, 2, 32, 1536, 4, 1, 138), Run("76.1B", 80, 10240, 60, 8, 4, 32, 1792, 2, 3, 140),
    Run("145.6B", 96, 12288, 80, 8, 8, 24, 2304, 2, 2, 148), Run("310.1B", 128, 16384, 96, 8, 16, 15, 2160, 1, 2, 155),
    Run("529.6B", 128, 20480, 105, 8, 35, 9, 2520, 1, 3, 163), Run("1008B", 160, 25600, 128, 8, 64, 6, 3072, 1, 1, 163),
]  # fmt: skip
FIRST_TFLOPS = (137, 131, 128, 127, 128, 133, 136, 142, 152, 154)
JANUARY = [replace(run, stages=1, tflops=tflops) for run, tflops in zip(APRIL, FIRST_TFLOPS)]
JANUARY[7] = Run("291B", 128, 16384, 90, 8, 18, 15, 2430, 1, 1, 142)


@dataclass(frozen=True)
class Predicted:
    """Seconds of a step by `autopar` and `as_run`, the share of it that the mean rank waits, and whether the memory
    suffices."""

    autopar: float
    as_run: float
    bubble: float
    fits: bool


def predicted(run: Run, scattered: bool) -> Predicted:
    """`scattered`: whether messages are cut over the tensor-parallel ranks on their way."""
    model, inputs = megatron_gpt.build(run.model, run.batch, SEQ)
    schedule = (
        {"schedule": "interleaved_1f1b" if run.stages > 1 else "1f1b", "stages_per_rank": run.stages}
        if run.pp > 1
        else {}
    )
    e = autopar.estimate(
        model, run.mesh, inputs, strategy="megatron" if run.tp > 1 else "ddp", recompute="full",
        micro_batches=run.micro_batches, hardware="a100", precision="bf16", **schedule,
    )  # fmt: skip
    collectives = CollectiveCost(load(e.plan.hardware), e.plan.mesh)
    if run.pp > 1:
        bubble = e.plan.pipeline.played().bubble
        return Predicted(
            e.plan.step_seconds, _pipeline_as_run(run, e.plan.pipeline, collectives, scattered), bubble, e.fits
        )
    serial = e.plan.compute_seconds + e.plan.communication_seconds + e.plan.recompute_seconds + e.plan.update_seconds
    own = sum(c.seconds for c in e.plan.collectives if c.axes == ("dp",) and c.phase == "backward")
    return Predicted(serial, serial - own + _reduction(collectives, e.plan.parameter_elements / run.tp), 0.0, e.fits)


def _pipeline_as_run(run: Run, pipeline: Pipeline, collectives: CollectiveCost, scattered: bool) -> float:
    """Ranks send forward from all stages but the last and back from all but the first; gradients are reduced at the
    end."""
    bytes_ = float(run.samples * SEQ * run.hidden * BYTES)
    send = collectives.seconds("send", ("pp",), bytes_)
    if scattered:
        send = collectives.seconds("send", ("pp",), bytes_ / run.tp) + collectives.seconds(
            "all_gather", ("tp",), bytes_ / run.tp
        )
    last = len(pipeline.costs) - 1
    costs = tuple(
        replace(cost, forward_seconds=cost.forward_seconds + send * (s < last),
                input_seconds=cost.input_seconds + send * (s > 0), transfer_seconds=0.0)
        for s, cost in enumerate(pipeline.costs)
    )  # fmt: skip
    held = [sum(pipeline.costs[s].parameters for s in pipeline.stages_of(rank)) for rank in range(run.pp)]
    embedding = collectives.seconds(
        "send", ("pp",), BYTES * VOCAB * run.hidden / run.tp
    )  # of the first and the last stage
    return replace(pipeline, costs=costs).played().seconds + _reduction(collectives, max(held) / run.tp) + 2 * embedding


def _reduction(collectives: CollectiveCost, parameters: float) -> float:
    """Seconds to reduce the gradients of a device's parameters."""
    return collectives.seconds("all_reduce", ("dp",), BYTES * parameters)


def lines() -> list[str]:
    """Both tables, and what changed between them."""
    found = {"April": [], "January": []}
    for month, runs in (("April", APRIL), ("January", JANUARY)):
        for run in runs:
            print(f"Megatron, {month} 2021, {run.name}", file=sys.stderr)
            found[month].append(predicted(run, scattered=month == "April"))
    fitted = [(run, p) for run, p in zip(APRIL, found["April"]) if run.name in FITTED]
    factors = {way: sum(run.tflops_in(getattr(p, way)) / run.tflops for run, p in fitted) / len(fitted) for way in WAYS}
    rates = {
        (month, way): [run.tflops_in(getattr(p, way) * factors[way]) for run, p in zip(runs, found[month])]
        for month, runs in (("April", APRIL), ("January", JANUARY)) for way in WAYS
    }  # fmt: skip
    told = ", ".join(f"{factor:.3f} ({_words(way)})" for way, factor in factors.items())
    text = [f"Megatron: all seconds are those of the model times a factor from {', '.join(FITTED)} of April, {told}"]
    for month, runs in (("April", APRIL), ("January", JANUARY)):
        text += ["", f"{month} 2021", *_table(runs, found[month], factors, {way: rates[month, way] for way in WAYS})]
    return [*text, "", *_changes(rates), ""]


def _table(
    runs: list[Run], found: list[Predicted], factors: dict[str, float], rates: dict[str, list[float]]
) -> list[str]:
    cells = []
    for i, (run, p) in enumerate(zip(runs, found)):
        predictions = [
            (f"{getattr(p, way) * factors[way]:.2f}", f"{rates[way][i]:.0f}", f"{rates[way][i] / run.tflops - 1:+.1%}")
            for way in WAYS
        ]
        cells.append([
            run.name + (" *" if run.name in FITTED else ""), run.mesh, f"{run.samples} x {run.micro_batches}",
            str(run.stages), f"{p.bubble:.1%}", f"{run.seconds:.2f}", f"{run.tflops:.0f}", *predictions[0],
            *predictions[1], "" if p.fits else "no room",
        ])  # fmt: skip
    header = ["run", "mesh", "samples x micro-batches", "stages a rank", "bubble", "published s", "TFLOP/s",
              "autopar s", "TFLOP/s", "off", "as run s", "TFLOP/s", "off", ""]  # fmt: skip
    published = [run.tflops for run in runs]
    others = [i for i, run in enumerate(runs) if run.name not in FITTED]
    told = []
    for way in WAYS:
        errors = [abs(rates[way][i] / published[i] - 1) for i in others]
        told.append(
            f"{_words(way)}: mean error of the {len(others)} rows without * {sum(errors) / len(errors):.1%}, at most "
            f"{max(errors):.1%}; Kendall's tau of all rows {kendall(published, rates[way]):.2f}"
        )
    return [*table(header, cells, left=2), *told]


def _changes(rates: dict[tuple[str, str], list[float]]) -> list[str]:
    rows = []
    for i, (before, after) in enumerate(zip(JANUARY, APRIL)):
        pairs = [(before.tflops, after.tflops), *((rates["January", way][i], rates["April", way][i]) for way in WAYS)]
        name = after.name if before.name == after.name else f"{before.name}, {after.name}"
        rows.append([name, str(after.stages), *(f"{a:.0f} -> {b:.0f} {b / a - 1:+.1%}" for a, b in pairs)])
    return table(["January to April, TFLOP/s", "stages a rank", "published", *map(_words, WAYS)], rows)


def _words(way: str) -> str:
    return way.replace("_", " ")


def kendall(a: list[float], b: list[float]) -> float:
    """Rank correlation with ties, tau-b."""
    pairs = [(i, j) for i in range(len(a)) for j in range(i)]
    signs = [(_sign(a[i] - a[j]), _sign(b[i] - b[j])) for i, j in pairs]
    apart = math.sqrt(sum(x != 0 for x, _ in signs) * sum(y != 0 for _, y in signs))
    return sum(x * y for x, y in signs) / apart


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)
