"""Turn the sums that the stages of a rank leave into the gradients of its parameters, in the backward of a call.

Each stage reduces what waited for all of its micro-batches, and stages that share a parameter add up its gradients.
Inside of `no_sync` the reductions wait for the next backward outside (see accumulation.py): gradients are Partial over
the ranks of their stage. What stages share is reduced at once all the same, one by one, since no DTensor is Partial
over stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..codegen.rank_program import StageProgram
from ..ir.graph import output_node
from ..ir.layout import Layout, local_part, local_shape
from ..processes import watch
from ..processes.dtensors import as_dtensor, spec_of
from ..processes.stage_mesh import StageMesh
from .accumulation import Accumulation, Locals, ParameterGradients
from .stage_executor import StageExecutor

Sums = dict[int, Locals]  # by stage


class StageGradients:
    """Gradients of the parameters `names`, which have the DTensor `specs`. `stages`: of this rank. All ranks make one
    together."""

    def __init__(
        self,
        stages: Mapping[int, StageExecutor],
        names: list[str],
        specs: list,
        stage: StageMesh,
        accumulation: Accumulation,
    ):
        self.gradients = ParameterGradients(names, specs, accumulation)
        self.specs, self.layouts = dict(zip(names, specs)), accumulation.layouts
        self.stages, self.stage = stages, stage
        deferred = {i: s.program.deferred for i, s in stages.items()}
        self.waiting: dict[int, dict[str, Layout]] = {i: d.layouts for i, d in deferred.items() if d is not None}
        made = [name for s in stages.values() for name in _trained(s.program)]
        everyone = stage.from_all_pp_ranks((made, names), "which stages share parameters")
        times = Counter(name for theirs, _ in everyone for name in theirs)
        pp_ranks = {n: [p for p, (_, held) in enumerate(everyone) if n in held] for n in sorted(times)}
        self.tied = {name: ranks for name, ranks in pp_ranks.items() if len(ranks) > 1}
        self.shared = frozenset(self.tied) | {name for name, count in times.items() if count > 1}
        self.unreduced = {
            name: spec_of(
                layout, self.specs[name].shape, self.specs[name].tensor_meta.dtype, stage.mesh, stage.device_mesh
            )
            for layouts in self.waiting.values()
            for name, layout in layouts.items()
            if name not in self.shared
        }

    @property
    def unreduced_bytes(self) -> int:
        """Return the bytes of this rank's gradients that are Partial inside of no_sync."""
        waiting = {name: layout for mine in self.waiting.values() for name, layout in mine.items()}
        layouts = {name: waiting[name] for name in self.unreduced}
        return self.gradients.accumulation.bytes_of(layouts, self.specs)

    def __call__(self, sums: Sums, scale: Tensor, parameters: Sequence[Tensor], nodes: Sequence) -> list[Tensor | None]:
        """Return the gradients of the loss, in the order of `names`: the sums times `scale`. `nodes` are what autograd
        does with them next. The sums are used up."""
        for of_stage in sums.values():
            if of_stage:
                torch._foreach_mul_(list(of_stage.values()), scale)
        return self.gradients(parameters, nodes, self.unreduced, partial(self._total, sums))

    def _total(self, sums: Sums, waits: bool, taken: Locals) -> Locals:
        """Return the gradients of all stages together, not yet reduced if they may wait, else with those `taken`."""
        total: Locals = {}
        for i, of_stage in sums.items():
            for name in [n for n in taken if n in of_stage]:
                of_stage[name].add_(taken.pop(name))
            if waits:
                for name in [n for n in self.waiting.get(i, ()) if n in self.shared]:
                    of_stage[name] = self._reduced_alone(of_stage[name], name, self.waiting[i][name])
            else:
                self.stages[i].reduce([of_stage])
            _add(total, of_stage)
        return self._shared(total)

    def _reduced_alone(self, mine: Tensor, name: str, layout: Layout) -> Tensor:
        """Return a sum in its parameter's layout, reduced without a graph."""
        stage, shape = self.stage, self.specs[name].shape
        with watch.collective(f"the gradient of {name}, which stages share"):
            whole = as_dtensor(mine, shape, layout, stage.mesh, stage.device_mesh).full_tensor()
        parameter = self.layouts[name]
        return local_part(whole, parameter, stage.mesh, stage.coordinate)

    def _shared(self, total: Locals) -> Locals:
        """Return all gradients, after adding up what several ranks along the pipeline have a part of, or need without
        having one."""
        for name, pp_ranks in self.tied.items():
            if self.stage.pp_rank in pp_ranks:
                if name not in total:
                    total[name] = self._nothing(name)
                with watch.collective(f"the gradient of {name}, which stages share"):
                    total[name] = self._exchange(total[name].contiguous(), pp_ranks)
        return {name: total[name] for name in self.gradients.names}

    def _nothing(self, name: str) -> Tensor:
        """Return the local gradient of a parameter that another rank's stage alone reads."""
        spec, stage = self.specs[name], self.stage
        shape = local_shape(spec.shape, self.layouts[name], stage.mesh, stage.coordinate)
        return torch.zeros(shape, dtype=spec.tensor_meta.dtype, device=stage.device_mesh.device_type)

    def _exchange(self, mine: Tensor, pp_ranks: list[int]) -> Tensor:
        """Return the sum over some ranks along the axis, in their order on all of them, so that the sums are equal."""
        others = [p for p in pp_ranks if p != self.stage.pp_rank]
        received = {p: torch.empty_like(mine) for p in others}
        work = [dist.isend(mine, group=self.stage.pp_group, group_dst=p) for p in others]
        work += [dist.irecv(received[p], group=self.stage.pp_group, group_src=p) for p in others]
        for w in work:
            w.wait()
        parts = received | {self.stage.pp_rank: mine}
        total = parts[pp_ranks[0]].clone()
        for p in pp_ranks[1:]:
            total += parts[p]
        return total


def _add(total: Locals, more: Locals) -> None:
    for name, gradient in more.items():
        total[name] = total[name] + gradient if name in total else gradient


def _trained(program: StageProgram) -> list[str]:
    return [r.name for r in output_node(program.stage.joint.graph).meta["roles"] if r.kind == "gradient"]
