"""Stages of a pipeline against one device: traced models in fp64, cuts at any ops, stages played one after the other.

`Case.of` takes a model through its widened capture (autopar/simulate/oracle.py), so that sums in another order differ
by 1e-15 and a mistake by much more, also in the models of transformers, which take their losses in fp32.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
from torch import Tensor, nn

from autopar import compiler, models
from autopar.codegen.rank_program import RankProgram, StageProgram
from autopar.codegen.split_batch import TailRun, joined_output, parts_of
from autopar.frontend.export import Captured
from autopar.hardware.profile import load
from autopar.ir.graph import is_op
from autopar.ir.mesh import Mesh
from autopar.passes.distribute.keep_keys import keep_keys
from autopar.passes.distribute.partition import partition
from autopar.passes.pipeline.micro_batch import MicroBatched
from autopar.passes.pipeline.stages import Stage, cut
from autopar.planner.spmd.plan import search
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.plans.pipeline import Pipeline, inside
from autopar.plans.plan import Plan
from autopar.runtime.stage_executor import Run, StageExecutor
from autopar.runtime.walk import Links, walk
from autopar.schedule import KINDS, Action
from autopar.simulate.oracle import (
    OneDevice,
    global_values,
    norm,
    one_device_step,
    relative_error,
    upcast_capture,
    upcast_value,
)

from ..families import FAMILIES

EXACT = 1e-10


@dataclass(frozen=True)
class Case:
    """A traced call, global values of its placeholders, and what one device computes of them."""

    captured: Captured
    values: Mapping[str, Tensor]
    wanted: OneDevice
    samples: int

    @classmethod
    def of(cls, model: nn.Module, inputs, wide: bool = True, narrow: torch.dtype = torch.float32, **tracing) -> Case:
        """`wide`: in the next wider type wherever it has the type `narrow`."""
        captured = compiler.trace(model, inputs, **tracing)
        values = global_values(captured, model, inputs)
        if wide:
            captured = upcast_capture(captured, narrow)
            values = {name: upcast_value(value, narrow) for name, value in values.items()}
        samples = next(shape[0] for shape in captured.signature.shapes if shape)
        return cls(captured, values, one_device_step(captured, values), samples)

    def errors(self, step, share: float = 1e-4) -> dict[str, float]:
        """Relative errors of all outputs, every gradient and every new value of a buffer; those of a gradient with a
        tiny norm relative to `share` of the largest."""
        floor = share * max(map(norm, self.wanted.gradients.values()), default=0.0)
        found = {f"output {i}": (step.outputs[str(i)], value, 0.0) for i, value in enumerate(self.wanted.outputs)}
        found |= {name: (step.gradients[name], value, floor) for name, value in self.wanted.gradients.items()}
        found |= {name: (step.buffers[name], value, 0.0) for name, value in self.wanted.buffers.items()}
        assert set(step.gradients) == set(self.wanted.gradients) and set(step.buffers) == set(self.wanted.buffers)
        for name, (mine, value, _) in found.items():
            assert mine.shape == value.shape and mine.dtype == value.dtype, name
        return {name: relative_error(mine, value, least) for name, (mine, value, least) in found.items()}

    def check(self, step, note: object, tolerance: float = EXACT) -> None:
        wrong = {name: error for name, error in self.errors(step).items() if not error <= tolerance}
        assert not wrong, f"{note}: {wrong}"


@lru_cache
def family(name: str, wide: bool = True, batch: int = 4, seq: int = 8) -> Case:
    """Return the case of a family of transformers. Token models have labels that are ignored in very different numbers
    from sample to sample."""
    torch.manual_seed(0)
    model, inputs = FAMILIES[name](batch, seq)
    return Case.of(model, ragged(inputs), wide)


@lru_cache
def own(text: str, wide: bool = True, batch: int = 4, seq: int = 8) -> Case:
    """Return the case of one of autopar's own models."""
    model, inputs = models.build(text, batch=batch, seq=seq, device="cpu", seed=0)
    return Case.of(model, inputs, wide)


def ragged(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sample i ignores all its labels but about seq / 2**i."""
    inputs = dict(inputs)
    labels = inputs.get("labels")
    if labels is not None and labels.dim() == 2 and not labels.is_floating_point():
        inputs["labels"] = labels.clone()
        for i, row in enumerate(inputs["labels"]):
            row[max(2, len(row) >> i) :] = -100
    return inputs


class Apart(nn.Module):
    """A loss of the batch, and beside it an output of a parameter alone."""

    def __init__(self):
        super().__init__()
        self.used, self.apart = nn.Linear(6, 4), nn.Parameter(torch.randn(3))

    def forward(self, x):
        return self.used(x).square().mean(), self.apart.norm()


def forward_ops(captured: Captured) -> list[str]:
    return [n.name for n in captured.graph.nodes if is_op(n) and n.meta["phase"] == "forward"]


def even_cuts(captured: Captured, stages: int) -> tuple[str, ...]:
    ops = forward_ops(captured)
    return tuple(ops[len(ops) * i // stages] for i in range(1, stages))


def random_cuts(captured: Captured, stages: int, seed: int) -> tuple[str, ...]:
    """Any ops but the first, in order."""
    ops = forward_ops(captured)
    return tuple(ops[i] for i in sorted(random.Random(seed).sample(range(1, len(ops)), stages - 1)))


@dataclass(frozen=True)
class Step:
    """Holds the results of all micro-batches together; a simulated step (SimulatedStep) has these fields too."""

    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


def play_stages(
    micro: MicroBatched, stages: Sequence[Stage], values: Mapping[str, Tensor], cuts: Sequence[str] = ()
) -> Step:
    """All micro-batches through all stages and back, without ranks and layouts. `cuts`: where the stages begin, if some
    micro-batches are smaller."""
    programs = [_program(stage, micro) for stage in stages]
    if micro.smaller is not None:
        smaller = (_program(stage, micro) for stage in cut(micro.smaller.graph_module, cuts))
        programs = [replace(program, smaller=less) for program, less in zip(programs, smaller)]
    parts = [{**values, **part} for part in parts_of(micro, values)]
    tail = micro.tail and TailRun(micro, lambda node: values[node.name])
    outputs: dict[str, dict[int, Tensor]] = {}
    buffers: dict[str, Tensor] = {}

    def take(role, i: int, found: list[Tensor]) -> None:
        if role.kind == "output":
            outputs.setdefault(role.name, {})[i] = found[0]
        elif role.kind == "joined":
            if (made := tail.take(role.name, i, found[0])) is not None:
                outputs.update((name, {0: value}) for name, value in made[0].items())
                for part, cotangents in zip(parts, made[1]):
                    part |= cotangents
        else:
            buffers[role.name] = found[0]

    def run_of(program: StageProgram) -> Run:
        graph = cache(program.graph)
        return lambda key, arguments: [[v.clone() for v in graph(key)(*values)] for values in arguments]

    executors = {
        i: StageExecutor([p], run_of(p), micro.is_smaller, micro.chunks_of_row) for i, p in enumerate(programs)
    }
    for executor in executors.values():
        executor.begin(lambda node, i, at: parts[i][node.name].clone(), take)
    stage_numbers = range(len(stages))
    numbers = range(micro.micro_batches)
    size = len(numbers) if tail else micro.chunks_of_row
    for together in [numbers[first : first + size] for first in range(0, len(numbers), size)]:
        order = [Action("F", s, i) for i in together for s in stage_numbers]
        order += [Action("B", s, i) for i in reversed(together) for s in reversed(stage_numbers)]
        for _ in walk(zip(order), executors, Links(executors, len(stages))):
            pass
    gradients: dict[str, Tensor] = {}
    for executor in executors.values():
        for name, gradient in executor.end()[0].items():
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
    joined = {name: joined_output(micro, name, [found[i] for i in sorted(found)]) for name, found in outputs.items()}
    return Step(joined, gradients, buffers)


def _program(stage: Stage, micro: MicroBatched) -> StageProgram:
    parts = partition(keep_keys(stage.joint, micro.chunks_of_row))
    return StageProgram(stage, None, None, RankProgram(0, parts), parts.forward, None, None)


# plans
# -----------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _sharded(key: int, micro_batches: int, mesh: Mesh, strategy: str, precision: str, recompute: str) -> Plan:
    options = PlanOptions(load("cpu-gloo"), strategy=None if strategy == "auto" else strategy, precision=precision,
                          baselines=False, recompute=recompute, micro_batches=micro_batches, within=mesh,
                          overlay=_CAPTURES[key][1])  # fmt: skip
    return replace(search(_CAPTURES[key][0], inside(mesh), options).plan, reduces_once=micro_batches > 1)


_CAPTURES: dict[int, tuple] = {}  # with the graph of a smaller micro-batch


def plan_of(micro: MicroBatched, mesh: str, schedule: str, cuts: Sequence[str] | None = None, strategy: str = "auto",
            precision: str = "fp32", recompute: str = "auto", stages_per_rank: int | None = None) -> Plan:  # fmt: skip
    """A plan of the strategy inside of stages that begin at `cuts`, even ones unless given."""
    whole = Mesh.parse(mesh)
    _CAPTURES[id(micro.captured)] = micro.captured, micro.smaller and micro.smaller.graph
    v, p = stages_per_rank or KINDS[schedule].chunks or 2, whole.size("pp")
    cuts = even_cuts(micro.captured, p * v) if cuts is None else tuple(cuts)
    plan = _sharded(id(micro.captured), micro.micro_batches, whole, strategy, precision, recompute)
    samples = micro.samples if micro.smaller is not None else 0
    return replace(
        plan, mesh=whole, pipeline=Pipeline("pp", p, schedule, micro.micro_batches, v, cuts, samples=samples)
    )
