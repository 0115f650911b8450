"""One stage of an asynchronous pipeline: the executor of synchronous ones, whose forwards and backwards meet the
version of the weights that is due, and which updates them.

The stage is on one rank, or on all of its ranks in lock step (a test's).
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
from ..ir.graph import OutputRole, output_node
from ..ir.layout import local_part
from ..ir.mesh import Mesh
from ..schedule.asynchronous import Asynchronous
from .stage_executor import Run, StageExecutor, Values
from .weight_versions import WeightVersions

Batches = Callable[[int], Mapping[str, Tensor]]  # global values of a micro-batch, by placeholder


@dataclass
class Rank:
    """The stage on one rank: the local tensors of what does not train by name, and the versions of what
    does."""

    program: StageProgram
    coordinate: Mapping[str, int]
    fixed: dict[str, Tensor]
    versions: WeightVersions
    optimizer: torch.optim.Optimizer | None
    mutated: dict[str, Tensor] = field(default_factory=dict)  # new values of buffers, of a group


class AsynchronousStage(StageExecutor):
    """`run` as of a StageExecutor; `mesh` is the stage's. `next_forward`, `next_backward`: micro-batches."""

    def __init__(self, ranks: Sequence[Rank], mesh: Mesh, schedule: Asynchronous, run: Run, device: torch.device):
        super().__init__([rank.program for rank in ranks], run, lambda i: False)
        self.ranks, self.mesh, self.schedule, self.device = list(ranks), mesh, schedule, device

    def start(self, has: Callable[[int], bool], take: Batches, give: Callable[[int, str, list[Tensor]], None]) -> None:
        """Begin a run: the weights as they are become version 0. `has(i)`: whether there is a micro-batch `i`, and
        `take(i)` returns it; `give(i, name, values)` takes an output."""
        self.has, self.take, self.give = has, take, give
        self.next_forward = self.next_backward = 0
        for rank in self.ranks:
            rank.versions.restart()
            rank.mutated.clear()
        self.begin(self._leaf, self._output)

    def forward(self, i: int, arrived: Values) -> Values:
        """Run the forward of a micro-batch with the weights that are due."""
        version = self.schedule.version_of(self.index, i)
        self.known = [rank.fixed | rank.versions.at(version) for rank in self.ranks]
        self.given = self.take(i)
        sent = super().forward(i, arrived)
        self.known, self.given, self.next_forward = [], {}, i + 1
        if self.next_forward % self.schedule.group == 0:  # all of a group read the buffers as they were before it
            for rank in self.ranks:
                rank.fixed |= rank.mutated
                rank.mutated.clear()
        return sent

    def backward(self, i: int, arrived: Values) -> Values:
        """Run the backward of a micro-batch. Gradients of the weights add up until the update."""
        self.next_backward = i + 1
        return super().backward(i, arrived)

    def update(self, version: int, arrived: Values) -> Values:
        """Make the next version: run the optimizer's step with the gradients of the micro-batches since the last
        one."""
        more = self.has(self.next_forward)
        needed = self.schedule.needed(self.index, self.next_backward, self.next_forward, more)
        self.reduce(self.sums)
        for rank, sums in zip(self.ranks, self.sums):
            rank.versions.advance(lambda rank=rank, sums=sums: _step(rank, sums), needed)
        return {}

    def _leaf(self, node: fx.Node, i: int, at: int) -> Tensor:
        role, like = node.meta["role"], node.meta["val"]
        if role.kind in ("parameter", "buffer"):
            return self.known[at][role.name]
        if role.kind == "tangent":  # of the loss
            return torch.ones(tuple(like.shape), dtype=like.dtype, device=self.device)
        mine = local_part(self.given[node.name], node.meta["layout"], self.mesh, self.ranks[at].coordinate)
        return mine if role.kind == "random" else mine.to(self.device)

    def _output(self, role: OutputRole, i: int, values: list[Tensor]) -> None:
        if role.kind == "output":
            self.give(i, role.name, values)
            return
        for rank, value in zip(self.ranks, values):
            rank.mutated[role.name] = value


def _step(rank: Rank, sums: dict[str, Tensor]) -> None:
    for name, gradient in sums.items():
        parameter = rank.versions.parameters[name]
        parameter.grad = _as(parameter, gradient.contiguous())
    if rank.optimizer is not None:
        rank.optimizer.step()
        rank.optimizer.zero_grad(set_to_none=True)
    sums.clear()


def rank_of(
    program: StageProgram,
    coordinate: Mapping[str, int],
    fixed: dict[str, Tensor],
    parameters: Mapping[str, nn.Parameter],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> Rank:
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
        for n in graph.nodes
        if n.op == "placeholder" and n.meta["role"].kind == "parameter" and n.meta["role"].trainable
    ]
    shared = [name for name in trained if sum(name in mine for mine in leaves) > 1]
    if shared:
        raise StageError(
            f"stages share {', '.join(shared[:4])}, and an asynchronous pipeline updates each stage by itself",
            fix="untie the weights (tie_word_embeddings=False), or use a synchronous schedule",
        )
