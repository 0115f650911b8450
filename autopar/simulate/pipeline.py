"""Run the stages of a pipeline in one process, on all ranks, in the order of its schedule.

A stage's ranks run its graphs in lock step in a simulator of their own (autopar/simulate/collectives.py). What passes
between stages is kept by its name and micro-batch until it is received; what is received before it was sent, or never,
is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, fx

from ..codegen.pass_manager import kind_of
from ..codegen.rank_program import StageProgram
from ..codegen.split_batch import join, parts_of
from ..compiler import lower_stage, smaller_stages_of, stages_of
from ..errors import VerifyError
from ..frontend.export import Captured
from ..ir.graph import output_node
from ..ir.layout import local_part
from ..passes.pipeline.micro_batch import MicroBatched
from ..plans.plan import Plan
from ..schedule.play import play
from .collectives import Simulator, assemble


@dataclass
class _Running:
    """One stage on all its ranks. By micro-batch: what each rank saved for the backward, and what B left for W."""

    programs: Sequence[StageProgram]
    simulator: Simulator
    saved: dict[int, list] = field(default_factory=dict)
    stash: dict[int, list] = field(default_factory=dict)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)  # by rank
    copies: list[dict[str, Tensor]] = field(default_factory=list)  # and what micro-batches share
    most_in_flight: int = 0

    def of(self, is_smaller: bool) -> Sequence[StageProgram]:
        """Return, by rank, the programs for a micro-batch."""
        return [p.smaller for p in self.programs] if is_smaller else self.programs

    def count(self) -> None:
        """Keep the largest number of micro-batches of which something is kept."""
        self.most_in_flight = max(self.most_in_flight, len(self.saved) + len(self.stash))


@dataclass(frozen=True)
class PipelineStep:
    """One simulated step. Outputs by their position in the call, gradients by parameter and new values of buffers are
    global. `in_flight`: by stage, the most micro-batches of which something was kept at once. `sends`: by (stage,
    phase), how many values it sent. `bytes_sent`: by stage and rank, of the collectives inside of it; `collectives`: by
    stage, how often its first rank called which, as (kind, axes)."""

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


def simulate_pipeline(captured: Captured, plan: Plan, values: Mapping[str, Tensor], check: bool = True) -> PipelineStep:
    """Run forward and backward of all micro-batches. `values`: global tensors by placeholder name of the whole graph,
    tangents included (see autopar/simulate/oracle.py). Raises VerifyError if the stages do not fit together."""
    return simulate_lowered(Lowered.of(captured, plan, check), plan, values)


def simulate_lowered(lowered: Lowered, plan: Plan, values: Mapping[str, Tensor]) -> PipelineStep:
    """Run programs that are there already as `simulate_pipeline` does, in the order of the plan's schedule."""
    return _Simulation(lowered, plan, values).step()


class _Simulation:
    def __init__(self, lowered: Lowered, plan: Plan, values: Mapping[str, Tensor]):
        self.plan, self.values, self.mesh, self.micro = plan, values, plan.sharding.mesh, lowered.micro
        self.running = [_Running(p, Simulator(self.mesh), gradients=[{} for _ in p]) for p in lowered.stages]
        self.parts = parts_of(self.micro, values)
        for stage in self.running:
            stage.copies = self._copies(stage)
        self.passing: dict[tuple[int, int, str], list[Tensor]] = {}  # to which stage, of which micro-batch
        self.outputs: dict[str, dict[int, Tensor]] = {}
        self.buffers: dict[str, Tensor] = {}
        self.sends: Counter = Counter()

    def step(self) -> PipelineStep:
        """Run all actions of the schedule and assemble the results. Raises VerifyError if a value is never received."""
        run = {"F": self._forward, "B": self._backward, "I": self._input, "W": self._weight}
        for _, action, _, _ in sorted(play(self.plan.pipeline.orders), key=lambda event: event[2]):
            run[action.kind](action.stage, action.micro_batch)
        if self.passing:
            raise VerifyError(f"sent and never received: {', '.join(sorted(name for _, _, name in self.passing))}")
        gradients: dict[str, Tensor] = {}
        for stage in self.running:
            for name, gradient in self._reduced(stage).items():
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
        outputs = {
            name: join([parts[i] for i in sorted(parts)], self.micro.joins[name])
            for name, parts in self.outputs.items()
        }
        in_flight = tuple(stage.most_in_flight for stage in self.running)
        bytes_sent = tuple(stage.simulator.bytes_sent for stage in self.running)
        calls = tuple(
            Counter((kind_of(op), axes) for op, axes, group in s.simulator.calls if 0 in group) for s in self.running
        )
        return PipelineStep(outputs, gradients, self.buffers, in_flight, self.sends, bytes_sent, calls)

    def _copies(self, stage: _Running) -> list[dict[str, Tensor]]:
        """Return, by rank, the copies of parameters that all micro-batches share."""
        graphs = [p.copies for p in stage.programs]
        if graphs[0] is None:
            return [{} for _ in graphs]
        inputs = [
            [self._given(n, self.values, rank, {}) for n in graph.graph.nodes if n.op == "placeholder"]
            for rank, graph in enumerate(graphs)
        ]
        names = [role.name for role in output_node(graphs[0].graph).meta["roles"]]
        return [dict(zip(names, made)) for made in stage.simulator.run(graphs, inputs)]

    def _programs(self, at: int, i: int) -> Sequence[StageProgram]:
        return self.running[at].of(self.micro.is_smaller(i))

    def _forward(self, at: int, i: int) -> None:
        stage, programs = self.running[at], self._programs(at, i)
        arrived = self._arrived(at, i, programs[0].stage.received)
        values = {**self.values, **self.parts[i]}
        arrived |= {name: [copies[name] for copies in stage.copies] for name in stage.copies[0]}
        inputs = [
            [self._given(n, values, rank, arrived) for n in p.forward.graph.nodes if n.op == "placeholder"]
            for rank, p in enumerate(programs)
        ]
        results = stage.simulator.run([p.forward for p in programs], inputs)
        kept = len(results[0]) - len(programs[0].saved)
        for position, role in enumerate(output_node(programs[0].forward.graph).meta["roles"][:kept]):
            if role.kind == "activation":
                self._send(at, at + 1, i, role.name, [r[position] for r in results])
            else:
                whole = self._whole(programs[0], role.kind, role.name, [r[position] for r in results])
                if role.kind == "output":
                    self.outputs.setdefault(role.name, {})[i] = whole
                else:  # every micro-batch reads the old value
                    self.buffers[role.name] = whole
        stage.saved[i] = [r[kept:] for r in results]
        stage.count()

    def _backward(self, at: int, i: int) -> None:
        stage, programs = self.running[at], self._programs(at, i)
        graphs = [p.backward for p in programs]
        if graphs[0] is None:  # nothing that the stage computes has a gradient
            del stage.saved[i]
            return
        self._take(at, i, graphs[0], stage.simulator.run(graphs, self._backward_inputs(at, i)))

    def _input(self, at: int, i: int) -> None:
        stage, programs = self.running[at], self._programs(at, i)
        if programs[0].backward is None:
            return
        inputs, splits = self._backward_inputs(at, i), [p.split for p in programs]
        results = stage.simulator.run([s.input for s in splits], inputs)
        count = len(results[0]) - len(splits[0].stash)
        self._take(at, i, splits[0].input, [r[:count] for r in results])
        stage.stash[i] = [(*(x[k] for k in s.kept), *r[count:]) for x, r, s in zip(inputs, results, splits)]
        stage.count()

    def _weight(self, at: int, i: int) -> None:
        stage, programs = self.running[at], self._programs(at, i)
        if programs[0].backward is None:
            del stage.saved[i]
            return
        graphs = [p.split.weight for p in programs]
        self._take(at, i, graphs[0], stage.simulator.run(graphs, stage.stash.pop(i)))

    def _backward_inputs(self, at: int, i: int) -> list[tuple]:
        stage, programs = self.running[at], self._programs(at, i)
        arrived = self._arrived(at, i, programs[0].stage.arriving)
        inputs = []
        for rank, saved in enumerate(stage.saved.pop(i)):
            graph = programs[rank].backward.graph
            given = [n for n in graph.nodes if n.op == "placeholder"][len(saved) :]
            inputs.append((*saved, *(self._given(n, self.values, rank, arrived) for n in given)))
        return inputs

    def _given(
        self, node: fx.Node, values: Mapping[str, Tensor], rank: int, arrived: Mapping[str, list[Tensor]]
    ) -> Tensor:
        """Return what a placeholder takes on a rank: what came from another stage, or its part of a global value."""
        if node.name in arrived:
            return arrived[node.name][rank]
        return local_part(values[node.name], node.meta["layout"], self.mesh, self.mesh.coordinate(rank))

    def _take(self, at: int, i: int, graph: fx.GraphModule, results: Sequence[tuple]) -> None:
        """Add up the gradients of parameters, and send what the stage before reads there."""
        roles = output_node(graph.graph).meta["roles"]
        for position, role in enumerate(roles[: len(results[0])]):
            if role.kind == "returned":
                self._send(at, at - 1, i, role.name, [r[position] for r in results])
            else:
                for sums, result in zip(self.running[at].gradients, results):
                    sums[role.name] = sums[role.name] + result[position] if role.name in sums else result[position]

    def _send(self, here: int, to: int, i: int, name: str, values: list[Tensor]) -> None:
        self.passing[to, i, name] = values
        self.sends[here, "forward" if to > here else "backward"] += 1

    def _arrived(self, at: int, i: int, names: Sequence[str]) -> dict[str, list[Tensor]]:
        missing = [name for name in names if (at, i, name) not in self.passing]
        if missing:
            raise VerifyError(f"stage {at} waits for {', '.join(missing)} of micro-batch {i}, which nobody sent")
        return {name: self.passing.pop((at, i, name)) for name in names}

    def _reduced(self, stage: _Running) -> dict[str, Tensor]:
        """Return the global gradients of a stage, reduced over its ranks."""
        sums, names = stage.gradients, list(stage.gradients[0])
        deferred = [p.deferred for p in stage.programs]
        if deferred[0] is not None:
            waiting = list(deferred[0].layouts)
            results = stage.simulator.run([d.reduce for d in deferred], [[mine[n] for n in waiting] for mine in sums])
            for mine, reduced in zip(sums, results):
                mine |= dict(zip(waiting, reduced))
        return {name: self._whole(stage.programs[0], "gradient", name, [mine[name] for mine in sums]) for name in names}

    def _whole(self, program: StageProgram, kind: str, name: str, blocks: list[Tensor]) -> Tensor:
        output = output_node(program.stage.joint.graph)
        at = next(k for k, r in enumerate(output.meta["roles"]) if (r.kind, r.name) == (kind, name))
        return assemble(blocks, program.plan.sharding.outputs[at], self.mesh, output.args[0][at].meta["val"].shape)
