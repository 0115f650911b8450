"""Run the stages of a pipeline in one process, on all ranks, in the order of its schedule.

The stages are those that processes run (autopar/runtime/stage_executor.py), on all of their ranks: these run a graph in
lock step in a simulator of their own (autopar/simulate/collectives.py). What is received before it was sent, or never,
is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, fx

from ..codegen.pass_manager import kind_of
from ..codegen.rank_program import GraphKey, StageProgram
from ..codegen.split_batch import TailRun, joined_output, parts_of
from ..compiler import lower_stage, smaller_stages_of, stages_of
from ..frontend.export import Captured
from ..ir.graph import OutputRole, output_node
from ..ir.layout import local_part
from ..ir.mesh import Mesh
from ..passes.pipeline.micro_batch import MicroBatched
from ..plans.plan import Plan
from ..runtime.stage_executor import StageExecutor
from ..runtime.walk import Links, walk
from ..schedule.play import play
from .collectives import Simulator, assemble
from .oracle import output_name


@dataclass(frozen=True)
class SimulatedStep:
    """One simulated step. Outputs by their position in the call, gradients and new values by name as in
    autopar/simulate/oracle.py are global. `in_flight`: by stage, the most micro-batches of which something was kept at
    once. `sends`: by (stage, phase), how many values it sent. `bytes_sent`: by stage and rank, of the collectives
    inside of it; `collectives`: by stage, how often its first rank called which, as (kind, axes)."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    in_flight: tuple[int, ...]
    sends: Counter
    bytes_sent: tuple[list[float], ...]
    collectives: tuple[Counter, ...]


@dataclass(frozen=True)
class Lowered:
    """A plan's programs: by stage, those of all ranks. They are the same for all schedules with as many stages."""

    micro: MicroBatched
    stages: list[list[StageProgram]]

    @classmethod
    def of(cls, captured: Captured, plan: Plan, check: bool = True) -> Lowered:
        """Lower every stage of a plan for all of its ranks; `check` as in autopar/compiler.py."""
        micro, stages = stages_of(captured, plan)
        ranks, pairs = range(plan.sharding.mesh.devices), zip(stages, smaller_stages_of(micro, plan), strict=True)
        return cls(
            micro, [[lower_stage(stage, micro, plan, rank, check, smaller=s) for rank in ranks] for stage, s in pairs]
        )


def simulate_pipeline(
    captured: Captured, plan: Plan, values: Mapping[str, Tensor], check: bool = True
) -> SimulatedStep:
    """Run forward and backward of all micro-batches. `values`: global tensors by placeholder name of the whole graph,
    tangents included (see autopar/simulate/oracle.py). Raises VerifyError if the stages do not fit together."""
    return simulate_lowered(Lowered.of(captured, plan, check), plan, values)


def simulate_lowered(lowered: Lowered, plan: Plan, values: Mapping[str, Tensor]) -> SimulatedStep:
    """Run programs that are there already as `simulate_pipeline` does, in the order of the plan's schedule."""
    return _Simulation(lowered, plan, values).step()


class SimulatedStage:
    """Runs the graphs of a stage on all of its ranks, as a StageExecutor asks for it. `programs`: by rank; `stages`:
    those of all stages."""

    def __init__(self, programs: Sequence[StageProgram], mesh: Mesh, stages: Sequence[Sequence[StageProgram]] = ()):
        self.programs, self.simulator = programs, Simulator(mesh)
        self.others = [dict(enumerate(of_rank)) for of_rank in zip(*stages)] or [{} for _ in programs]
        self.graphs: dict[GraphKey, list[fx.GraphModule]] = {}

    def __call__(self, key: GraphKey, arguments: list[list[Tensor]]) -> list[tuple]:
        if key not in self.graphs:
            self.graphs[key] = [p.graph(key, others) for p, others in zip(self.programs, self.others)]
        results = self.simulator.run(self.graphs[key], arguments)
        if not key.makes_gradients:
            return results
        return [tuple(v.clone() if isinstance(v, Tensor) else v for v in mine) for mine in results]


class _Simulation:
    def __init__(self, lowered: Lowered, plan: Plan, values: Mapping[str, Tensor]):
        self.plan, self.values, self.mesh, self.micro = plan, values, plan.sharding.mesh, lowered.micro
        self.runs = [SimulatedStage(programs, self.mesh, lowered.stages) for programs in lowered.stages]
        sizes = self.micro.is_smaller, self.micro.chunks_of_row
        self.stages = {i: StageExecutor(run.programs, run, *sizes) for i, run in enumerate(self.runs)}
        self.links = Links(self.stages, len(self.stages))
        self.parts = [{**values, **part} for part in parts_of(self.micro, values)]
        self.outputs: dict[str, dict[int, Tensor]] = {}
        self.gradients: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        self.tail = TailRun(self.micro, lambda node: values[node.name]) if self.micro.tail is not None else None
        for stage in self.stages.values():
            stage.begin(self._leaf, partial(self._output, stage.program))

    def step(self) -> SimulatedStep:
        """Run all actions of the schedule and assemble the results. Raises VerifyError if a value is never received."""
        most, gradients = [0] * len(self.stages), self.gradients
        orders = self.plan.pipeline.orders
        starts = {action: start for _, action, start, _ in play(orders)}
        every = [together for rank in range(orders.ranks) for together in orders.together(rank)]
        for action, _, _ in walk(sorted(every, key=lambda both: starts[both[0]]), self.stages, self.links):
            stage = self.stages[action.stage]
            most[action.stage] = max(most[action.stage], len(stage.saved) + len(stage.stash))
        for stage in self.stages.values():
            sums = stage.end()
            stage.reduce(sums)
            for name in sums[0]:
                gradient = whole_output(stage.program, OutputRole("gradient", name), [mine[name] for mine in sums])
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
        outputs = {
            name: joined_output(self.micro, name, [parts[i] for i in sorted(parts)])
            for name, parts in self.outputs.items()
        }
        simulators = [run.simulator for run in self.runs]
        calls = tuple(Counter((kind_of(op), axes) for op, axes, group in s.calls if 0 in group) for s in simulators)
        bytes_sent = tuple(s.bytes_sent for s in simulators)
        return SimulatedStep(outputs, gradients, self.buffers, tuple(most), self.links.sends, bytes_sent, calls)

    def _leaf(self, node: fx.Node, i: int, at: int) -> Tensor:
        return local_part(self.parts[i][node.name], node.meta["layout"], self.mesh, self.mesh.coordinate(at))

    def _output(self, program: StageProgram, role: OutputRole, i: int, values: list[Tensor]) -> None:
        whole = whole_output(program.sizes[self.micro.is_smaller(i)], role, values)
        if role.kind == "output":
            self.outputs.setdefault(role.name, {})[i] = whole
        elif role.kind == "joined" and self.tail is not None:
            if (made := self.tail.take(role.name, i, whole)) is not None:
                self.outputs |= {name: {0: value} for name, value in made[0].items()}
                self.parts = [part | mine for part, mine in zip(self.parts, made[1])]
        elif role.kind == "input_gradient":
            self.gradients[output_name(role)] = whole
        else:  # every micro-batch reads the old value
            self.buffers[output_name(role)] = whole


def whole_output(program: StageProgram, role: OutputRole, blocks: list[Tensor]) -> Tensor:
    """Return the global tensor of an output of a stage's joint graph, of which the stage's ranks hold `blocks`."""
    output, plan = output_node(program.stage.joint.graph), program.plan
    at = output.meta["roles"].index(role)
    return assemble(blocks, plan.sharding.outputs[at], plan.mesh, output.args[0][at].meta["val"].shape)
