"""Estimate what a configuration that somebody else chose costs: seconds, FLOPs per second and memory, fitting or not.

Model FLOPs are those of autopar/planner/spmd/model_flops.py. Hardware FLOPs add the products that are computed again:
with all blocks, for a GPT as there, these are those of the paper's F,
96 B s L h^2 (1 + s / (6 h) + V / (16 L h)), less 8 B s L h^2: what a block's last product gives, its backward does not
read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from torch import nn

from ..planner.objective.evaluate import Evaluation
from ..planner.problem.problem import Problem
from ..planner.spmd.model_flops import model_flops
from ..planner.spmd.planned import Planned
from ..plans.plan import Plan
from . import entry as api
from . import words
from .estimate_text import estimate_text


@dataclass(frozen=True)
class Estimate:
    """A configuration's cost. FLOPs are of a step over all devices; `missing_bytes` a device, 0 if it fits. Rates are
    those of `step_seconds`. `dtype`: what most FLOPs are computed in; `peaks`: by type, the hardware's FLOPs
    per second."""

    plan: Plan
    recompute: str
    model_flops: float
    hardware_flops: float
    dtype: str
    peaks: Mapping[str, float]

    @property
    def utilization(self) -> float:
        """Return the share of the devices' peak that the model's FLOPs make up (MFU)."""
        return self.plan.utilization

    @property
    def fits(self) -> bool:
        """Return whether the configuration fits the memory of a device."""
        return self.missing_bytes == 0.0

    @property
    def missing_bytes(self) -> float:
        """Return the bytes by which the peak is above the limit of a device."""
        return max(0.0, self.plan.peak_bytes - self.plan.memory_limit_bytes)

    def tflops_per_device(self, flops: float, seconds: float) -> float:
        """Return TFLOP/s of a device where all devices together compute `flops` in `seconds`; 0 if that is no time."""
        return flops / (self.plan.mesh.devices * seconds * 1e12) if seconds else 0.0

    def to_json(self) -> dict:
        """Return plain data: the numbers, without the plan's decisions."""
        p = self.plan
        names = (
            "model",
            "hardware",
            "precision",
            "execution",
            "optimizer",
            "strategy",
            "micro_batches",
            "samples",
            "reduces_once",
        )
        seconds = ("step_seconds", "compute_seconds", "communication_seconds", "recompute_seconds",
                   "update_seconds", "exposed_seconds")  # fmt: skip
        return {
            **{name: getattr(p, name) for name in names}, "mesh": str(p.mesh), "devices": p.mesh.devices,
            "recompute": self.recompute, "pipeline": asdict(p.pipeline),
            **{name: getattr(p, name) for name in seconds},
            "model_flops": self.model_flops, "hardware_flops": self.hardware_flops,
            "tflops_per_device": self.tflops_per_device(self.model_flops, p.step_seconds),
            "hardware_tflops_per_device": self.tflops_per_device(self.hardware_flops, p.step_seconds),
            "dtype": self.dtype, "peak_tflops_per_device": self.peaks[self.dtype] / 1e12,
            "utilization": self.utilization, "peak_bytes": p.peak_bytes, "memory": dict(p.at_peak),
            "memory_limit_bytes": p.memory_limit_bytes, "fits": self.fits, "missing_bytes": self.missing_bytes,
            "parameter_elements": p.parameter_elements,
            "collectives": [asdict(c) | {"axes": list(c.axes)} for c in p.collectives],
        }  # fmt: skip

    def __str__(self) -> str:
        return estimate_text(self)


def estimate(
    model: nn.Module,
    mesh,
    example_inputs,
    *,
    strategy: words.Strategy | None = None,
    recompute: words.Recompute = "auto",
    micro_batches: int | None = None,
    schedule: words.Schedule = "auto",
    stages_per_rank: int | None = None,
    sequence_chunks: int | None = None,
    report: Callable[[str], None] = lambda text: None,
    **planning,
) -> Estimate:
    """Estimate the cost of a strategy with a level of recomputation and so many micro-batches; on a mesh with an axis
    pp, by a schedule with so many stages a rank. `mesh` and `planning` as in `autopar.plan`; what is left open is
    chosen as a plan would be. Raises subclasses of AutoparError, but none for memory."""
    found = api.search(
        model,
        mesh,
        example_inputs,
        strategy=strategy,
        recompute=recompute,
        micro_batches=micro_batches,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        sequence_chunks=sequence_chunks,
        refuses=False,
        report=report,
        **{"baselines": False} | planning,
    )
    return of_search(found)


def of_search(planned: Planned) -> Estimate:
    """Return the estimate of a finished search. Its FLOPs are those of the whole batch, also where micro-batches differ
    by a sample and the search counted the larger ones."""
    shares, options = sum(planned.plan.pipeline.shares), planned.options
    found, recomputed = planned.plan.flops, _recomputed_flops(*planned.whole)
    peaks = options.hardware.flops_per_second
    return Estimate(planned.plan, options.recompute, found.model, found.model + shares * recomputed, found.dtype, peaks)


def _recomputed_flops(problem: Problem, e: Evaluation) -> float:
    """Count the FLOPs of the ops that the backward runs again, by the model's mathematics."""
    return sum(
        model_flops(problem.vertices[v].node) * count
        for levels in e.recomputed.values()
        for step, count in levels.values()
        for v in _own(step, levels)
    )


def _own(step, levels: dict) -> frozenset[int]:
    """Return the vertices that a step runs again and the step before it does not."""
    before = [other.recomputed for other, _ in levels.values() if len(other.recomputed) < len(step.recomputed)]
    return step.recomputed.difference(*before)
