"""Expert strategies by name, as restrictions of the search space; restrict.py applies them.

Axes get roles from the strategy. A *data* axis shards only factors that come from dim 0 of the inputs (the batch); a
*tensor* axis only factors that come from a parameter's dim, with sequence parallelism any factor but the batch. ZeRO
says whether parameters are stored sharded over data axes and whether a gathered copy is kept for the backward.
Everything else, such as which weight is cut by column and which by row, the same integer program decides as without a
restriction.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...errors import StrategyError
from ...ir.mesh import Mesh

if TYPE_CHECKING:
    from .hf_tp_plan import TensorPlan

DATA, TENSOR, TENSOR_SEQUENCE, WHOLE, FREE = "data", "tensor", "tensor with sequence", "whole", "free"


@dataclass(frozen=True)
class Recipe:
    """A named strategy. `shard`: which data axes store parameters sharded ("none", "last", "all"). `keep`: whether
    gathered copies stay for the backward (None: as memory's price says)."""

    data: bool
    tensor: str | None = None
    shard: str = "none"
    keep: bool | None = None
    replicates: bool = False  # over all data axes but those that shard


RECIPES = {
    "ddp": Recipe(data=True),
    "zero1": Recipe(data=True, shard="all", keep=True),
    "zero2": Recipe(data=True, shard="all", keep=True),
    "fsdp": Recipe(data=True, shard="all", keep=False),
    "hsdp": Recipe(data=True, shard="last", keep=False, replicates=True),
    "megatron": Recipe(data=False, tensor=TENSOR),
    "megatron_sp": Recipe(data=False, tensor=TENSOR_SEQUENCE),
}
MODELS_OWN = "hf_tp"  # the name of what a model itself says (see hf_tp_plan.py)
ALIASES = {"zero3": "fsdp", "tp": "megatron", "tp_sp": "megatron_sp", "auto": None}


@dataclass(frozen=True)
class Restriction:
    """Roles of the axes and the treatment of parameters. Without a strategy every axis is free. `forbidden`: pairs of a
    glob and a layout that the parameters it matches may not take. `forced`: pairs of a class and the one strategy that
    it may take. `tensor_plan`: which parameters the tensor axes cut, and that what it leaves whole is whole."""

    name: str
    roles: dict[str, str]
    sharded_axes: tuple[str, ...] = ()  # parameters must be sharded over these where a dim allows it
    whole_axes: tuple[str, ...] = ()  # parameters must not be sharded over these
    keep: bool | None = None
    forbidden: tuple[tuple[str, str], ...] = ()
    forced: tuple[tuple[int, int], ...] = ()
    tensor_plan: TensorPlan | None = None

    @staticmethod
    def of(strategy: str | None, mesh: Mesh) -> Restriction:
        """Return the restriction of a strategy. Raise StrategyError for an unknown one, or one that the mesh has too
        few axes for.

        An axis named tp carries the tensors if one named dp carries the batch; else the last axis does, and the others
        the batch. Strategies that are data-parallel alone spread the batch over all axes."""
        name = ALIASES.get(strategy, strategy) if strategy is not None else None
        if name is None:
            return Restriction("auto", dict.fromkeys(mesh.names, FREE))
        if "+" in str(name):
            return _both(str(name), mesh)
        if name not in RECIPES:
            known = ", ".join(["auto", *RECIPES])
            close = difflib.get_close_matches(str(strategy), list(RECIPES), 1)
            raise StrategyError(
                f"no strategy {strategy!r} is known", fix=f"use {close[0] if close else 'one of ' + known}"
            )
        recipe = RECIPES[name]
        if recipe.replicates and len(mesh.names) < 2:
            raise StrategyError(
                f"{name} replicates over one axis and shards over another, the mesh has {len(mesh.names)}",
                mesh=mesh, fix="give the mesh two axes, such as dp_replicate=2,dp_shard=4, or use fsdp",
            )  # fmt: skip
        if recipe.data:
            sharded = {"none": (), "last": mesh.names[-1:], "all": mesh.names}[recipe.shard]
            whole = tuple(a for a in mesh.names if a not in sharded)
            roles = dict.fromkeys(mesh.names, DATA)
            return Restriction(name, roles, sharded, whole, recipe.keep)
        tensor = ("tp",) if {"dp", "tp"} <= set(mesh.names) else mesh.names[-1:]
        data = tuple(a for a in mesh.names if a not in tensor)
        roles = {a: recipe.tensor if a in tensor else DATA for a in mesh.names}
        return Restriction(name, roles, tensor, data, None)

    @staticmethod
    def of_model(plan: TensorPlan, mesh: Mesh) -> Restriction:
        """Return the restriction to what the model itself says of its parameters, on the axis that Megatron cuts
        tensors over; the others carry the batch."""
        return replace(Restriction.of("megatron", mesh), name=MODELS_OWN, sharded_axes=(), tensor_plan=plan)

    @property
    def tensor_axes(self) -> tuple[str, ...]:
        """Return the axes that cut tensors, with or without the sequence."""
        return tuple(a for a, role in self.roles.items() if role in (TENSOR, TENSOR_SEQUENCE))


def _both(strategy: str, mesh: Mesh) -> Restriction:
    """Return the restriction of two strategies, as of `"megatron_sp+zero1"`: a tensor-parallel recipe, and what a
    data-parallel one says of the parameters on its data axes. Raise StrategyError for any other two."""
    names = [ALIASES.get(name, name) for name in strategy.split("+")]
    first, second = Restriction.of(names[0], mesh), RECIPES.get(names[1])
    if len(names) != 2 or not first.tensor_axes or second is None or not second.data or second.replicates:
        raise StrategyError(
            f"cannot read {strategy!r} as two strategies",
            fix="write a tensor-parallel and a data-parallel one, megatron_sp+zero1",
        )
    if second.shard == "none":
        return replace(first, name=strategy)
    return replace(first, name=strategy, sharded_axes=mesh.names, whole_axes=(), keep=second.keep)
