"""Whole training steps in one process, on real values, of any plan.

`simulate_step` lowers a plan for every rank and runs forward and backward as autopar/simulate/pipeline.py does: a step
of one program is one stage and one micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ..api import entry as api
from ..codegen.rank_program import LoweredProgram, StageProgram
from ..codegen.verify_graph import check_ranks
from ..compiler import lower
from ..frontend.export import Captured
from ..ir.graph import output_node
from ..passes.pipeline.micro_batch import SAME, MicroBatched
from ..passes.pipeline.stages import Stage
from ..plans.plan import Plan
from ..rules.loss_regions import unmade_outputs
from .pipeline import Lowered, simulate_lowered, simulate_pipeline


@dataclass(frozen=True)
class StepResult:
    """One simulated step. `outputs`, `gradients` and `buffers` (new values of all that the forward writes to), both by
    name as in autopar/simulate/oracle.py, are global tensors; `bytes_sent` has one number a rank, inside of all stages;
    `collectives` counts what the first rank of each stage calls as (kind, axes), `sends` the values that pass between
    stages by phase. `programs`: of all ranks, if a step is one program."""

    loss: Tensor | None
    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    bytes_sent: tuple[float, ...]
    collectives: Counter
    sends: Counter[str]
    programs: tuple[LoweredProgram, ...]


def plan_and_capture(model: nn.Module, mesh: object, example_inputs, **options) -> tuple[Plan, Captured]:
    """Plan as `autopar.plan` does, and return the capture that the plan was made for as well."""
    planned = api.search(model, mesh, example_inputs, **options)
    return planned.plan, planned.captured


def simulate_step(captured: Captured, plan: Plan, values: Mapping[str, Tensor]) -> StepResult:
    """Run forward and backward of all ranks. `values`: global tensors by placeholder name, tangents included (see
    autopar/simulate/oracle.py). Raises VerifyError if the ranks' programs do not fit together."""
    programs: tuple[LoweredProgram, ...] = ()
    if plan.pipeline.is_one_program:
        programs = tuple(lower(captured, plan, rank) for rank in range(plan.mesh.devices))
        check_ranks([p.local for p in programs])
        step = simulate_lowered(_as_stage(captured, plan, programs), plan, values)
    else:
        step = simulate_pipeline(captured, plan, values)
    unmade = unmade_outputs(captured.graph, [t.node for t in plan.tiled]) if programs else ()
    made = simulate_step(captured, replace(plan, tiled=()), values).outputs if unmade else ()  # as when they are read
    outputs = step.outputs | {name: made[int(name)] for name in unmade}
    whole, sends = tuple(outputs[name] for name in sorted(outputs, key=int)), Counter[str]()
    for (_, phase), count in step.sends.items():
        sends[phase] += count
    loss = None if captured.returns.loss is None else whole[captured.returns.loss]
    sent, calls = tuple(map(sum, zip(*step.bytes_sent))), sum(step.collectives, Counter())
    return StepResult(loss, whole, step.gradients, step.buffers, sent, calls, sends, programs)


def _as_stage(captured: Captured, plan: Plan, programs: Sequence[LoweredProgram]) -> Lowered:
    """Return the programs of all ranks as those of a stage, for a batch of one micro-batch."""
    roles = output_node(captured.graph).meta["roles"]
    micro = MicroBatched(captured, 1, {role.name: SAME for role in roles if role.kind == "output"})
    stage = Stage(0, captured.graph_module, (), (), (), (), (), {}, tuple(range(len(roles))))
    return Lowered(micro, [[StageProgram(stage, captured, plan, p, p.parts.forward, None, None) for p in programs]])
