"""The options of a search for the plan of one graph."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from ...cost.compute import EAGER, EXECUTIONS
from ...cost.expert_load import experts_in
from ...cost.memory import Optimizer
from ...cost.skew import Skew
from ...errors import StrategyError
from ...frontend.precision import compute_dtype, reduce_type, state_type
from ...hardware.profile import Hardware
from ...ir.layout import Layout
from ...ir.mesh import Mesh
from ...passes.pipeline.tail import Tail
from ..objective import loops
from ..problem import offload
from ..problem.recipes import Restriction
from ..solver.minimize import DUAL, ILP, Search
from . import accumulation, fixed_recompute, tiling

AUTO_EXPERTS = "auto"  # of `hot_experts`
IN_DOUBT = "in doubt"  # of `baselines`: experts' plans are looked at where the bound leaves room for a better one


@dataclass(frozen=True)
class PlanOptions:
    """The options of a search. `fixed`: layouts by placeholder name. `forbid`: pairs of a glob and a layout
    that it may not take. `memory_bytes`: None takes the hardware's. `execution`: see `Plan`. `micro_batches`: of a
    step; the graph that is planned is that of one of them. `recompute`: "auto", or the level of every block; `tile`:
    "auto", or what is computed in pieces (see autopar/planner/spmd/tiling.py); `loops`: see
    autopar/planner/objective/loops.py;
    `refuses`: what does not fit the memory (else it is planned anyway). `offload`: see
    autopar/planner/problem/offload.py; `on_host`: placeholders of parameters that are on the host already. `styles`:
    the model's own tensor parallelism (see hf_tp_plan.py), one of the baselines. `reduce_dtype`, `state_dtype`: see
    `Plan`. `within`: the whole mesh, where the planned one is a stage's of a pipeline: links are those of the whole
    mesh, gradients are reduced once a step, and copies of parameters that are kept are gathered once. `overlay`:
    another graph that runs with the same decisions, of fewer samples. `tail`: what a step without stages computes
    between all forwards and all backwards, with so many micro-batches `in_flight`. `expert_load`:
    of the busiest device, or the share of each expert (autopar/cost/skew.py); `expert_capacity`: see `Plan`;
    `hot_experts`: how many of each layer are copied, "auto" none (autopar/planner/hot_choice.py tries some), of
    which a plan `may_copy_none` without a warning."""

    hardware: Hardware
    memory_bytes: float | None = None
    optimizer: str = "adamw"
    precision: str = "fp32"
    execution: str = EAGER
    reduce_dtype: str | None = None
    state_dtype: str | None = None
    strategy: str | None = None
    pin: Mapping[str, str] = field(default_factory=dict)
    forbid: tuple[tuple[str, str], ...] = ()
    fixed: Mapping[str, Layout] = field(default_factory=dict)
    strict: bool = False
    baselines: bool | str = True
    folded: bool = True
    micro_batches: int = 1
    recompute: str = "auto"
    tile: str = "auto"
    loops: str = loops.NEVER
    refuses: bool = True
    offload: str = offload.NONE
    on_host: frozenset[str] = frozenset()
    styles: Mapping[str, str] = field(default_factory=dict)
    search: Search = Search()
    within: Mesh | None = None
    overlay: fx.Graph | None = None
    tail: Tail | None = None
    in_flight: float = 1.0
    expert_load: float | tuple[float, ...] = 1.0
    expert_capacity: float | None = None
    hot_experts: int | str = AUTO_EXPERTS
    may_copy_none: bool = False

    def of_state(self) -> Optimizer:
        """Return the optimizer with the type that its state is kept in. Raise StrategyError for an unknown one."""
        dtype = state_type(self.state_dtype)
        return Optimizer.of(self.optimizer, None if dtype is None else dtype.itemsize)

    def around(self, mesh: Mesh) -> Mesh:
        """Return the mesh on which the distances between the devices of a planned mesh are measured."""
        if self.within is None:
            return mesh
        alone = [name for name in mesh.names if name not in self.within.names]  # of a stage that is one device
        return Mesh((*self.within.names, *alone), (*self.within.sizes, *map(mesh.size, alone)))

    @property
    def hot(self) -> int:
        """Return how many experts of each layer are copied."""
        return self.hot_experts if isinstance(self.hot_experts, int) else 0

    def skew(self, graph: fx.Graph) -> Skew:
        """Return what is assumed of the rows of a graph's experts. Raise StrategyError for other shares than it has
        experts."""
        experts = max(experts_in(graph), default=0)
        if isinstance(self.expert_load, (int, float)):
            return Skew(float(self.expert_load), hot=self.hot, experts=experts if self.hot else 0)
        if odd := {count for count in experts_in(graph) if count != len(self.expert_load)}:
            raise StrategyError(
                f"expert_load has shares of {len(self.expert_load)} experts, and a layer has {min(odd)}",
                fix="give one share for each expert of a layer, or the load of the busiest device",
            )
        return Skew(shares=self.expert_load, hot=self.hot, experts=experts)

    def _check_experts(self) -> None:
        """Raise StrategyError for a routing, a capacity or copies that cannot be."""
        load, capacity, hot = self.expert_load, self.expert_capacity, self.hot_experts
        if isinstance(load, tuple):
            if not load or not all(0.0 <= share < math.inf for share in load) or not sum(load):
                raise StrategyError(
                    f"{str(load):.80} are no shares of rows by expert", fix="give the rows of each expert, or 1.0"
                )
            load = 1.0
        if not 1.0 <= load < math.inf:
            raise StrategyError(
                f"experts of a device get {load} times the mean of their rows",
                fix="give expert_load=1.0, balanced routing, or more",
            )
        if capacity is not None and not max(1.0, load) <= capacity < math.inf:
            raise StrategyError(
                f"a device takes {capacity} times the mean of the rows of experts at a time, and "
                f"{load} times the mean are assumed to come",
                fix=f"give expert_capacity={max(1.0, load)} or more, or leave it out",
            )
        if hot != AUTO_EXPERTS and (isinstance(hot, (str, bool)) or hot < 0):
            raise StrategyError(f"cannot copy hot_experts={hot!r:.80} of each layer", fix='give a number, or "auto"')
        if self.hot and capacity is not None:
            raise StrategyError(
                f"{self.hot} hot experts of each layer are copied, and rows beyond expert_capacity={capacity} go in "
                "further rounds: there is no program of both",
                fix="leave out expert_capacity, or give hot_experts=0",
            )

    def check(self, mesh: Mesh) -> None:
        """Raise StrategyError or MeshError for what can be known to be wrong before the model is traced."""
        Restriction.of(self.strategy, mesh)
        compute_dtype(self.precision)
        reduce_type(self.reduce_dtype)
        if self.execution not in EXECUTIONS:
            raise StrategyError(f"no execution {self.execution!r} is known", fix=f"use {' or '.join(EXECUTIONS)}")
        self._check_experts()
        accumulation.check(self.micro_batches)
        fixed_recompute.check(self.recompute)
        tiling.check(self.tile)
        loops.check(self.loops)
        offload.check(self.offload, self.on_host, self.hardware)
        if self.of_state().orthogonalizes and (self.state_dtype or self.offload != offload.NONE):
            raise StrategyError(
                f"{self.optimizer} orthogonalizes matrices on the device, in a state of their own type",
                fix="leave out state_dtype and offload, or use adamw",
            )
        if self.search.solver not in (DUAL, ILP):
            raise StrategyError(f"no solver {self.search.solver!r} is known", fix=f"use {DUAL} or {ILP}")
