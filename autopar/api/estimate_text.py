"""The text of an estimate: what a configuration takes, how fast that is, and whether it fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..plans.pipeline_text import pipeline_lines
from ..plans.text import in_order, parts_of
from ..plans.wording import wording
from ..utils.format import byte_column, ms, number, percent, size, table

if TYPE_CHECKING:
    from .estimate import Estimate


def estimate_text(e: Estimate) -> str:
    """Return the text of an estimate: the result, then memory by kind."""
    p = e.plan
    lines = [
        f"{p.model} on mesh {p.mesh} ({p.mesh.devices} devices, {p.hardware}), {p.precision_text}, "
        f"{p.optimizer_text}, strategy {p.strategy}, run {p.execution_text}, recomputation {e.recompute}",
        wording(p).batching(p),
        f"step {ms(p.step_seconds)} = {parts_of(p)}",
        _rates(e),
        f"peak {size(p.peak_bytes)} a device, {percent(p.peak_bytes, p.memory_limit_bytes)} of "
        f"{size(p.memory_limit_bytes)}" + ("" if e.fits else f": does not fit, {size(e.missing_bytes)} too much"),
        "",
    ]
    kinds = {**in_order(p.at_peak), "in all": p.peak_bytes}
    unit, cells = byte_column(list(kinds.values()))
    rows = [[kind, cell, percent(v, p.memory_limit_bytes)] for (kind, v), cell in zip(kinds.items(), cells)]
    stages = [*table_of_stages, ""] if (table_of_stages := pipeline_lines(p)) else []
    return "\n".join([*lines, *stages, *table(["memory of a device", unit, "of the limit"], rows)]) + "\n"


def _rates(e: Estimate) -> str:
    """Say how many FLOPs a second of the model are reached, and of what is computed if that is more; then what the
    devices have, and what they have in bf16 if that is more."""
    kinds = {"model": e.model_flops} | ({"hardware": e.hardware_flops} if e.hardware_flops > e.model_flops else {})
    p = e.plan
    cells = [f"{number(e.tflops_per_device(flops, p.step_seconds))} of the {what}" for what, flops in kinds.items()]
    peak, bf16 = e.peaks[e.dtype], e.peaks.get("bf16", 0.0)
    faster = f"; bf16 has {number(bf16 / 1e12)}: --precision bf16" if e.dtype == "fp32" and bf16 > 2 * peak else ""
    return (
        f"TFLOP/s a device: {', '.join(cells)}, {percent(e.utilization, 1.0)} of the {number(peak / 1e12)} of "
        f"{e.dtype}{faster}\n"
        f"a step of the model is {e.model_flops:.4g} FLOPs"
    )
