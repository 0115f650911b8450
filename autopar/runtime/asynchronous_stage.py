"""One stage of an asynchronous pipeline: its forwards, backwards and updates, each with the version of the weights that
is due.

The stage is on one rank, or on all of its ranks in lock step (autopar/simulate/asynchronous.py): what follows from the
schedule is the same, so values come as lists here, with one item a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from .. import _torch
from ..codegen.rank_program import StageProgram
from ..errors import StageError
from ..ir.graph import output_node
from ..ir.layout import local_part
from ..ir.mesh import Mesh
from ..schedule.asynchronous import Asynchronous
from .weight_versions import WeightVersions

Run = Callable[
    [str, list[list[Tensor]]], Sequence[Sequence[Tensor]]
]  # "forward", "backward" or "reduce"; arguments by rank
Blocks = dict[str, list[Tensor]]  # local tensors by name, then by rank


@dataclass
class Rank:
    """What the stage has on one rank: the local tensors of what does not train by name, and the versions of what
    does."""

    program: StageProgram
    coordinate: Mapping[str, int]
    fixed: dict[str, Tensor]
    versions: WeightVersions
    optimizer: torch.optim.Optimizer | None
    saved: dict[int, list[Tensor]] = field(default_factory=dict)  # by micro-batch
    sums: dict[str, Tensor] = field(default_factory=dict)
    mutated: dict[str, Tensor] = field(default_factory=dict)  # new values of buffers, of a group


class AsynchronousStage:
    """`run` runs a graph of the stage; `mesh` is the stage's."""

    def __init__(self, ranks: Sequence[Rank], mesh: Mesh, schedule: Asynchronous, run: Run, device: torch.device):
        self.ranks, self.mesh, self.schedule, self.run, self.device = list(ranks), mesh, schedule, run, device
        program = self.ranks[0].program
        self.program, self.index = program, program.stage.index
        self.received, self.arriving = program.stage.received, program.stage.arriving if program.backward else ()
        self.begin()

    def begin(self) -> None:
        """Begin a new run: the weights as they are become version 0."""
        self.next_forward = self.next_backward = 0
        for rank in self.ranks:
            rank.versions.restart()
            for kept in (rank.saved, rank.sums, rank.mutated):
                kept.clear()

    def forward(self, i: int, given: Mapping[str, Tensor], arrived: Blocks) -> tuple[Blocks, Blocks]:
        """Run the forward of micro-batch `i` and return (what goes to the next stage, outputs of the call). `given`:
        global values of the micro-batch by placeholder; `arrived`: what the stage before sent."""
        version, inputs = self.schedule.version_of(self.index, i), []
        for at, rank in enumerate(self.ranks):
            known = rank.fixed | rank.versions.at(version)
            inputs.append(
                [self._given(n, at, known, given, arrived) for n in _placeholders(rank.program.forward_alone.graph)]
            )
        results = [list(r) for r in self.run("forward", inputs)]
        kept = len(results[0]) - len(self.program.saved)
        sent, outputs = {}, {}
        for position, role in enumerate(output_node(self.program.forward_alone.graph).meta["roles"][:kept]):
            values = [r[position] for r in results]
            if role.kind == "mutation":
                for rank, value in zip(self.ranks, values):
                    rank.mutated[role.name] = value
            else:
                (sent if role.kind == "activation" else outputs)[role.name] = values
        self.next_forward = i + 1
        for rank, result in zip(self.ranks, results):
            rank.saved[i] = result[kept:]
            if (
                i + 1
            ) % self.schedule.group == 0:  # every micro-batch of a group reads the buffers as they were before it
                rank.fixed |= rank.mutated
                rank.mutated.clear()
        return sent, outputs

    def backward(self, i: int, arrived: Blocks) -> Blocks:
        """Run the backward of micro-batch `i` and return what goes to the stage before. Gradients of the weights add up
        until the update."""
        self.next_backward = i + 1
        saved = [rank.saved.pop(i) for rank in self.ranks]
        if self.program.backward is None:  # nothing that the stage computes has a gradient
            return {}
        inputs = []
        for at, (rank, mine) in enumerate(zip(self.ranks, saved)):
            others = _placeholders(rank.program.backward.graph)[len(mine) :]
            inputs.append([*mine, *(self._given(n, at, {}, {}, arrived) for n in others)])
        del saved
        results, returned = self.run("backward", inputs), {}
        for position, role in enumerate(output_node(self.program.backward.graph).meta["roles"]):
            values = [r[position] for r in results]
            if role.kind == "returned":
                returned[role.name] = values
                continue
            for rank, value in zip(self.ranks, values):
                rank.sums[role.name] = rank.sums[role.name] + value if role.name in rank.sums else value
        return returned

    def _given(
        self, node: fx.Node, at: int, known: Mapping[str, Tensor], given: Mapping[str, Tensor], arrived: Blocks
    ) -> Tensor:
        """Return what a placeholder takes on the rank at index `at`."""
        role = node.meta["role"]
        if role.kind in ("parameter", "buffer"):
            return known[role.name]
        if role.kind in ("activation", "arriving"):
            return arrived[role.name][at]
        if role.kind == "tangent":  # of the loss
            like = node.meta["val"]
            return torch.ones(tuple(like.shape), dtype=like.dtype, device=self.device)
        mine = local_part(given[node.name], node.meta["layout"], self.mesh, self.ranks[at].coordinate)
        return mine if role.kind == "random" else mine.to(self.device)

    def update(self, more: bool) -> None:
        """Run the optimizer's step with the gradients of the micro-batches since the last one. `more`: whether forwards
        follow."""
        needed = self.schedule.needed(self.index, self.next_backward, self.next_forward, more)
        deferred = self.program.deferred
        if deferred is not None and deferred.layouts:
            waiting = list(deferred.layouts)
            results = self.run("reduce", [[rank.sums[name] for name in waiting] for rank in self.ranks])
            for rank, result in zip(self.ranks, results):
                rank.sums |= dict(zip(waiting, result))
        for rank in self.ranks:
            rank.versions.advance(lambda rank=rank: _step(rank), needed)


def _step(rank: Rank) -> None:
    for name, gradient in rank.sums.items():
        parameter = rank.versions.parameters[name]
        parameter.grad = _as(parameter, gradient.contiguous())
    if rank.optimizer is not None:
        rank.optimizer.step()
        rank.optimizer.zero_grad(set_to_none=True)
    rank.sums.clear()


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "placeholder"]


def rank_of(program: StageProgram, coordinate: Mapping[str, int], fixed: dict[str, Tensor],
            parameters: Mapping[str, nn.Parameter],
            optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Rank:  # fmt: skip
    """Return a stage's part on a rank. `parameters` are those that the stage reads; what has no gradient is never
    updated."""
    roles = output_node(program.stage.joint.graph).meta["roles"]
    names = {role.name for role in roles if role.kind == "gradient"}
    trained = {name: p for name, p in parameters.items() if name in names}
    still = {name: p for name, p in parameters.items() if name not in names}
    made = optimizer(list(trained.values())) if trained else None
    return Rank(program, coordinate, fixed | dict(WeightVersions(still).at(0)), WeightVersions(trained), made)


def _as(parameter: nn.Parameter, local: Tensor) -> Tensor:
    """Return local values in the form that a parameter has."""
    return _torch.as_dtensor(local, parameter._spec) if isinstance(parameter, DTensor) else local


def check_apart(leaves: Sequence[frozenset[str]], graph: fx.Graph) -> None:
    """Raise StageError if stages, of which each reads the parameters and buffers `leaves`, share a parameter that
    trains: its copies would be updated at different times."""
    trained = [
        n.meta["role"].name
        for n in _placeholders(graph)
        if n.meta["role"].kind == "parameter" and n.meta["role"].trainable
    ]
    shared = [name for name in trained if sum(name in mine for mine in leaves) > 1]
    if shared:
        raise StageError(
            f"stages share {', '.join(shared[:4])}, and an asynchronous pipeline updates each stage by itself",
            fix="untie the weights (tie_word_embeddings=False), or use a synchronous schedule",
        )  # fmt: skip
