"""Whole training steps in one process, on real values.

`simulate_step` lowers a plan for every rank, runs forward and backward in the simulator and puts outputs and gradients
together again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ..api import entry as api
from ..codegen import pass_manager
from ..codegen.rank_program import LoweredProgram
from ..codegen.verify_graph import check_ranks
from ..compiler import lower
from ..frontend.export import Captured
from ..ir.graph import output_node
from ..plans.plan import Plan
from ..rules.loss_regions import unmade_outputs
from .collectives import Simulator, assemble, local_inputs
from .collectives import simulate_step as run_parts
from .oracle import sorted_results


@dataclass(frozen=True)
class StepResult:
    """One simulated step. `outputs`, `gradients` and `buffers` (new values of all that the forward writes to), both by
    name as in autopar/simulate/oracle.py, are global tensors; `bytes_sent` has one number a rank; `collectives` counts
    what rank 0 calls as (kind, axes)."""

    loss: Tensor | None
    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    bytes_sent: tuple[float, ...]
    collectives: Counter
    programs: tuple[LoweredProgram, ...]


def plan_and_capture(model: nn.Module, mesh: object, example_inputs, **options) -> tuple[Plan, Captured]:
    """Plan as `autopar.plan` does, and return the capture that the plan was made for as well."""
    planned = api.search(model, mesh, example_inputs, **options)
    return planned.plan, planned.captured


def simulate_step(captured: Captured, plan: Plan, values: Mapping[str, Tensor]) -> StepResult:
    """Run one forward and backward of all ranks. `values`: global tensors by placeholder name, tangents included (see
    autopar/simulate/oracle.py). Raises VerifyError if the ranks' programs do not fit together."""
    mesh = plan.mesh
    programs = tuple(lower(captured, plan, rank) for rank in range(mesh.devices))
    check_ranks([p.local for p in programs])
    inputs, tangents = zip(*(local_inputs(p.local, values) for p in programs))
    simulator = Simulator(mesh)
    outputs, gradients = run_parts(simulator, [p.parts for p in programs], inputs, tangents)
    ranks = [(*o, *g) for o, g in zip(outputs, gradients)]

    output = output_node(captured.graph)
    roles = output.meta["roles"]
    is_forward = [r.is_forward for r in roles]
    order = sorted(range(len(roles)), key=lambda i: not is_forward[i])  # as the parts return them
    whole: dict[int, Tensor] = {}
    unmade = unmade_outputs(captured.graph, [t.node for t in plan.tiled])
    made = simulate_step(captured, replace(plan, tiled=()), values).outputs if unmade else ()  # as when they are read
    for position, i in enumerate(order):
        if roles[i].kind == "output" and roles[i].name in unmade:
            whole[i] = made[int(roles[i].name)]
            continue
        blocks, shape = [values[position] for values in ranks], output.args[0][i].meta["val"].shape
        whole[i] = assemble(blocks, plan.sharding.outputs[i], mesh, shape)
    found = sorted_results([whole[i] for i in range(len(roles))], roles)
    loss = None if captured.returns.loss is None else found.outputs[captured.returns.loss]
    calls = Counter((pass_manager.kind_of(op), axes) for op, axes, group in simulator.calls if 0 in group)
    return StepResult(loss, *found, tuple(simulator.bytes_sent), calls, programs)
