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
    as run    the same stages with what Megatron did. The last product of a block is computed again. A rank that sends
              does nothing else: a whole activation in January, 1 / t of it and an all-gather in the next node in April
              (section 4.1). Gradients are reduced in 16 bits, in one piece

Nothing is scaled. F counts the last product of a block as computed again, 8 %, which autopar leaves out, and `as run`
has. (That gradients are narrow and in one piece was put into `as run` after a first look at `autopar`.) January's rows
without a pipeline are up to 10 % slower than April's in the same configuration, which no model of a configuration can
know.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from statistics import median

import megatron_gpt

import autopar
from autopar.cost.attention import FLASH
from autopar.cost.collectives import CollectiveCost
from autopar.cost.product_seconds import ProductSeconds
from autopar.hardware.profile import Hardware, load
from autopar.plans.pipeline import Pipeline
from autopar.utils.format import table

SEQ, VOCAB, BYTES = 2048, 51200, 2  # of a number of an activation
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
        """Return the seconds of a step, as published."""
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


def of_then(name: str, is_first: bool = False) -> Hardware:
    """Return a profile with the attention that there was when a run was made: FlashAttention-2 and no cuDNN's, or the
    first FlashAttention, half as fast (Dao, arXiv 2307.08691, abstract)."""
    hardware = load(name)
    flash = hardware.attention[FLASH]
    shares = tuple(share / 2 for share in flash.shares) if is_first else flash.shares
    return replace(hardware, attention={FLASH: replace(flash, shares=shares)})


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
        micro_batches=run.micro_batches, hardware=of_then("a100"), precision="bf16", execution="compiled", **schedule,
    )  # fmt: skip
    collectives = CollectiveCost(load(e.plan.hardware), e.plan.mesh)
    hardware = load("a100")
    again = ProductSeconds(hardware)(_last_product(run), hardware.peak_flops_per_second("bf16"), BYTES) * run.layers
    if run.pp > 1:
        bubble = e.plan.pipeline.played().bubble
        return Predicted(
            e.plan.step_seconds, _pipeline_as_run(run, e.plan.pipeline, collectives, scattered, again), bubble, e.fits
        )
    serial = e.plan.compute_seconds + e.plan.communication_seconds + e.plan.recompute_seconds + e.plan.update_seconds
    own = sum(c.seconds for c in e.plan.collectives if c.axes == ("dp",) and c.phase == "backward")
    again *= run.micro_batches
    return Predicted(
        serial, serial + again - own + _reduction(collectives, e.plan.parameter_elements / run.tp), 0.0, e.fits
    )


def _last_product(run: Run) -> tuple[int, int, int, int]:
    """The last product of a block on one device, which Megatron computes again and autopar leaves out."""
    return 1, run.samples * SEQ, run.hidden, 4 * run.hidden // run.tp


def _pipeline_as_run(run: Run, pipeline: Pipeline, collectives: CollectiveCost, scattered: bool, again: float) -> float:
    """Ranks send forward from all stages but the last and back from all but the first; gradients are reduced at the
    end. `again`: seconds of the last product of every block, for one micro-batch."""
    bytes_ = float(run.samples * SEQ * run.hidden * BYTES)
    send = collectives.seconds("send", ("pp",), bytes_)
    if scattered:
        send = collectives.seconds("send", ("pp",), bytes_ / run.tp) + collectives.seconds(
            "all_gather", ("tp",), bytes_ / run.tp
        )
    last = len(pipeline.costs) - 1
    costs = tuple(
        replace(cost, forward_seconds=cost.forward_seconds + send * (s < last),
                input_seconds=cost.input_seconds + send * (s > 0) + again / len(pipeline.costs), transfer_seconds=0.0)
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


def lines() -> tuple[list[str], dict[str, list[tuple[float, float]]]]:
    """Both tables, and what changed between them; by way (published, predicted) seconds of April's rows."""
    found = {"April": [], "January": []}
    for month, runs in (("April", APRIL), ("January", JANUARY)):
        for run in runs:
            print(f"Megatron, {month} 2021, {run.name}", file=sys.stderr)
            found[month].append(predicted(run, scattered=month == "April"))
    rates = {
        (month, way): [run.tflops_in(getattr(p, way)) for run, p in zip(runs, found[month])]
        for month, runs in (("April", APRIL), ("January", JANUARY)) for way in WAYS
    }  # fmt: skip
    text = ["Megatron"]
    for month, runs in (("April", APRIL), ("January", JANUARY)):
        text += ["", f"{month} 2021", *_table(runs, found[month], {way: rates[month, way] for way in WAYS})]
    pairs = {way: [(run.seconds, getattr(p, way)) for run, p in zip(APRIL, found["April"])] for way in WAYS}
    return [*text, "", *_changes(rates), ""], pairs


def _table(runs: list[Run], found: list[Predicted], rates: dict[str, list[float]]) -> list[str]:
    cells = []
    for i, (run, p) in enumerate(zip(runs, found)):
        predictions = [
            (f"{getattr(p, way):.2f}", f"{rates[way][i]:.0f}", f"{rates[way][i] / run.tflops - 1:+.1%}") for way in WAYS
        ]
        cells.append([
            run.name, run.mesh, f"{run.samples} x {run.micro_batches}",
            str(run.stages), f"{p.bubble:.1%}", f"{run.seconds:.2f}", f"{run.tflops:.0f}", *predictions[0],
            *predictions[1], "" if p.fits else "no room",
        ])  # fmt: skip
    header = ["run", "mesh", "samples x micro-batches", "stages a rank", "bubble", "published s", "TFLOP/s",
              "autopar s", "TFLOP/s", "off", "as run s", "TFLOP/s", "off", ""]  # fmt: skip
    published = [run.tflops for run in runs]
    told = []
    for way in WAYS:
        errors = [abs(a / b - 1) for a, b in zip(rates[way], published)]
        told.append(
            f"{_words(way)}: median error {median(errors):.1%}, at most {max(errors):.1%}; Kendall's tau of TFLOP/s "
            f"{kendall(published, rates[way]):.2f}"
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
