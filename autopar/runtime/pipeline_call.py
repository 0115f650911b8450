"""The leaves and outputs of one call of a model that runs in micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from .. import _torch
from ..codegen.split_batch import TailRun, parts_of
from ..ir.graph import Role
from ..ir.layout import local_part
from .joined_outputs import JoinedOutputs
from .saved_call import MICRO_BATCHES, SavedCall

if TYPE_CHECKING:
    from .pipeline_step import PipelineStep


class PipelineCall:
    """The leaves and outputs of one call's micro-batches. `unmade`: outputs that it lets go of."""

    def __init__(self, step: PipelineStep, inputs: list[Tensor]):
        self.step, values = step, {}
        named = dict(zip(step.micro.captured.signature.tensor_names, inputs))
        self.unmade = step.unmade
        self.tensors = saved_call(step, named) if self.unmade else None
        for node in step.micro.of_rows.captured.graph.nodes:
            role = node.meta["role"] if node.op == "placeholder" else None
            if role is not None and role.kind == "input":
                values[node.name] = named[role.name]
            elif role is not None and role.kind == "random":  # on all ranks alike, whichever stages draw
                values[node.name] = step.random.next()
        with torch.no_grad():
            self.parts = parts_of(step.micro, values)
        self.outputs = JoinedOutputs(step.micro, step.empty, step.gathered)
        self.buffers: dict[str, Tensor] = {}
        self.tail = self._tail()

    def _tail(self) -> TailRun | None:
        return TailRun(self.step.micro, self._tangent) if self.step.micro.tail is not None else None

    def again(self, name: str) -> PipelineCall:
        """Return the same call for one output that it has let go of. Raises InputError if what it reads was written to
        since."""
        if self.tensors is not None:
            self.tensors.check(range(len(self.tensors.roles)), MICRO_BATCHES)
        other = copy.copy(self)
        other.unmade = {*self.step.micro.joins} - {name}
        other.outputs, other.buffers = JoinedOutputs(self.step.micro, self.step.empty, self.step.gathered), {}
        other.tail = other._tail()
        return other

    def leaf(self, node: fx.Node, i: int, at: int) -> Tensor:
        """Return this rank's local value of a placeholder for micro-batch `i`."""
        step, role = self.step, node.meta["role"]
        if role.kind in ("parameter", "buffer"):
            table, leaf = step.tables[role.kind, role.name]
            return _torch.local_of(table[leaf]) if role.kind == "parameter" else table[leaf]
        if role.kind == "tangent":
            return self._tangent(node)
        whole = self.parts[i][node.name]
        if role.kind not in ("input", "cotangent"):
            return whole
        return local_part(whole, node.meta["layout"], step.stage.mesh, step.stage.coordinate)

    def _tangent(self, node: fx.Node) -> Tensor:
        """Return the gradient of an output."""
        ones = torch.ones(node.meta["val"].shape, dtype=node.meta["val"].dtype, device=self.step.device)
        return ones if self.step.seed is None else ones * self.step.seed

    def output(self, role, i: int, values: list[Tensor]) -> None:
        """Take an output of micro-batch `i`, the new value of a buffer, or what the tail of the step reads: its last
        value runs it."""
        if role.kind == "mutation":
            self.buffers[role.name] = values[0]
        elif role.kind == "joined" and self.tail is not None:
            if (made := self.tail.take(role.name, i, values[0])) is not None:
                for name in made[0].keys() - self.unmade:
                    self.outputs.take(name, 0, made[0][name])
                self.parts = [part | mine for part, mine in zip(self.parts, made[1])]
        elif role.name not in self.unmade:
            self.outputs.take(role.name, i, values[0])

    def write_buffers(self) -> None:
        """Write the new values into the buffers."""
        for name, value in self.buffers.items():
            table, leaf = self.step.tables["buffer", name]
            table[leaf].copy_(value)


def saved_call(step: PipelineStep, inputs: Mapping[str, Tensor]) -> SavedCall:
    """Return what outputs that are made when they are read need to know of a call's tensors."""
    owners = {Role("input", name): tensor for name, tensor in inputs.items()}
    owners |= {Role(*key): table[leaf] for key, (table, leaf) in step.tables.items()}
    return SavedCall([*owners], [*owners.values()], range(len(owners)), None)
