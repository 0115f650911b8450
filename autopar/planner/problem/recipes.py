"""Strategies by name: recipes, autopar's own and a user's, and the restriction that one is on a mesh.

Axes get roles from the strategy. A *data* axis shards only factors that come from dim 0 of the inputs (the batch); a
*tensor* axis only factors that come from a parameter's dim, with sequence parallelism any factor but the batch; a
*sequence* axis the sequence of the inputs wherever an op has it, with "heads in attention" heads there. ZeRO says
whether parameters are stored sharded over data axes and whether a gathered copy is kept for the backward. One axis may
carry experts besides: stacked weights of experts are cut by expert over it, and their products with them. Everything
else, such as which weight is cut by column and which by row, the same integer program decides as without a restriction
(allowed.py).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ...errors import StrategyError, check_new
from ...ir.mesh import NOT_DATA, SEQUENCE_AXIS, Mesh

if TYPE_CHECKING:
    from .hf_tp_plan import TensorPlan

DATA, TENSOR, TENSOR_SEQUENCE, WHOLE, FREE = "data", "tensor", "tensor with sequence", "whole", "free"
SEQUENCE, SEQUENCE_HEADS, SEQUENCE_RING = "sequence", "sequence, heads in attention", "sequence, keys go round"
SEQUENCE_ROLES = (SEQUENCE, SEQUENCE_HEADS, SEQUENCE_RING)
ROLES = (DATA, TENSOR, TENSOR_SEQUENCE, *SEQUENCE_ROLES, WHOLE, FREE)


@dataclass(frozen=True)
class Recipe:
    """The roles that a strategy gives to the axes of a mesh and to parameters.

    data: all axes carry the batch.
    tensor: what the tensor axis does, "tensor" or "tensor with sequence"; the others carry the batch.
    sequence: what the axis named cp does, else the last one, "sequence", "sequence, heads in attention" or "sequence,
        keys go round"; the others carry the batch.
    roles: instead of these three, each axis's role by its name: one of those, "data", "whole" (the axis cuts no op)
        or "free" (the planner says).
    shard: the data axes over which parameters are stored sharded: "none", "last", "all".
    keep: whether gathered copies stay for the backward (None: as memory's price says).
    replicates: over all data axes but those that shard, so that there must be two.
    reduces_once: whether micro-batches reduce gradients once a step (True) or each (False); None tries both.
    pin, forbid: layouts of parameters by glob; they go before all of the above.
    optional: those of these globs that a model need not have a parameter for.
    """

    data: bool = False
    tensor: str | None = None
    sequence: str | None = None
    roles: Mapping[str, str] = field(default_factory=dict)
    shard: str = "none"
    keep: bool | None = None
    replicates: bool = False
    reduces_once: bool | None = None
    pin: Mapping[str, str] = field(default_factory=dict)
    forbid: Mapping[str, str] = field(default_factory=dict)
    optional: Sequence[str] = ()

    def __post_init__(self):
        kinds = self.data + (self.tensor is not None) + (self.sequence is not None) + bool(self.roles)
        roles = {*self.roles.values(), self.tensor or TENSOR, self.sequence or SEQUENCE}
        if kinds != 1 or not roles <= set(ROLES) or self.shard not in ("none", "last", "all"):
            raise StrategyError(
                f"cannot read data={self.data}, tensor={self.tensor!r}, sequence={self.sequence!r}, "
                f"roles={dict(self.roles)} and shard={self.shard!r} as a recipe",
                fix=f'give one of data=True, tensor="tensor", sequence="sequence" and roles={{"dp": "data", ...}} with '
                f'roles {", ".join(ROLES)}; shard is "none", "last" or "all"',
            )

    def roles_on(self, name: str, mesh: Mesh) -> dict[str, str]:
        """Return the role of every axis. Without roles by name, an axis named tp carries the tensors if one named dp
        or ep is there; else the last axis does, and the others the batch. Raise StrategyError for a mesh with other
        axes."""
        if self.roles:
            if missing := [axis for axis in mesh.names if axis not in self.roles]:
                raise StrategyError(
                    f"{name} gives no role to the axis {missing[0]}",
                    mesh=mesh,
                    fix=f"name the axes {', '.join(self.roles)}",
                )
            return {axis: self.roles[axis] for axis in mesh.names}
        if self.sequence:
            return dict.fromkeys(mesh.names, DATA) | {sequence_axis(mesh): self.sequence}
        names = set(mesh.names)
        is_named = "tp" in names and names & {"dp", EXPERT_AXIS}
        tensor = () if self.data else ("tp",) if is_named else mesh.names[-1:]
        return {axis: self.tensor if axis in tensor else DATA for axis in mesh.names}

    def on(self, name: str, mesh: Mesh) -> Restriction:
        """Return what the strategy of this name restricts on a mesh. Raise StrategyError if that has not the axes."""
        roles = self.roles_on(name, mesh)
        data = tuple(axis for axis, role in roles.items() if role == DATA)
        if self.replicates and len(data) < 2:
            raise StrategyError(
                f"{name} replicates over one axis and shards over another, the mesh has {len(mesh.names)}",
                mesh=mesh,
                fix="give the mesh two axes, such as dp_replicate=2,dp_shard=4, or use fsdp",
            )
        stored = {"none": (), "last": data[-1:], "all": data}[self.shard]
        kept = *data, *(axis for axis, role in roles.items() if role in SEQUENCE_ROLES)
        return Restriction(
            name,
            roles,
            tuple(a for a, role in roles.items() if a in stored or role in (TENSOR, TENSOR_SEQUENCE)),
            tuple(a for a in kept if a not in stored),
            self.keep,
            own=(*((g, x, True) for g, x in self.pin.items()), *((g, x, False) for g, x in self.forbid.items())),
        )


def sequence_axis(mesh: Mesh) -> str:
    """Return the axis that a recipe cuts the sequence over."""
    return SEQUENCE_AXIS if SEQUENCE_AXIS in mesh.names else mesh.names[-1]


def may_cut_sequence(strategy: str | None, mesh: Mesh, samples: int) -> bool:
    """Return whether a plan may cut the sequence of an attention: where a strategy says so, or without one on a mesh
    with an axis for it, or with more devices along the axes that may carry samples than there are."""
    roles = Restriction.of(strategy, mesh).roles
    if FREE not in roles.values():
        return bool({*roles.values()} & {*SEQUENCE_ROLES})
    named = SEQUENCE_AXIS in mesh.names
    return named or math.prod(size for axis, size in mesh.axis_sizes.items() if axis not in NOT_DATA) > samples


RECIPES: dict[str, Recipe] = {}
BASELINES: list[str] = []  # names that plans are compared with
COMBINED = ("megatron_sp+zero1", "megatron_sp+fsdp")  # compared with too, where a mesh has axes for both
REPLICATED = "megatron_sp+hsdp"  # the same with two data axes
IN_SEQUENCE = ("all_gather_kv", "ring", "ulysses")
EXPERT, EXPERT_AXIS = "expert", "ep"  # the strategy of experts, and the axis that they are cut over if there is one
FREELY = "auto"  # the name of no strategy
MODELS_OWN = "hf_tp"  # the name of what a model itself says (see hf_tp_plan.py)
ALIASES = {"zero3": "fsdp", "tp": "megatron", "tp_sp": "megatron_sp", "auto": None, EXPERT: f"{EXPERT}+ddp"}


def register_strategy(name: str, recipe: Recipe, *, baseline: bool = False, replace: bool = False) -> None:
    """Let `strategy=name` plan by a recipe, from the next plan on. With `baseline` plans without a strategy are
    compared with it. Raises StrategyError for a name that is taken, unless it is to `replace` that strategy."""
    check_new(StrategyError, "strategy", name, {*RECIPES, *ALIASES, MODELS_OWN}, replace and name in RECIPES)
    if not isinstance(recipe, Recipe):
        raise StrategyError(f"the strategy {name} is a {type(recipe).__name__}", fix="give an autopar.Recipe")
    RECIPES[name] = recipe
    BASELINES[:] = [other for other in BASELINES if other != name] + [name] * baseline


register_strategy("ddp", Recipe(data=True, reduces_once=True), baseline=True)
register_strategy("zero1", Recipe(data=True, shard="all", keep=True, reduces_once=True), baseline=True)
register_strategy("zero2", Recipe(data=True, shard="all", keep=True, reduces_once=False), baseline=True)
register_strategy("fsdp", Recipe(data=True, shard="all", keep=False), baseline=True)
register_strategy("hsdp", Recipe(data=True, shard="last", keep=False, replicates=True), baseline=True)
register_strategy("megatron", Recipe(tensor=TENSOR, reduces_once=True), baseline=True)
register_strategy("megatron_sp", Recipe(tensor=TENSOR_SEQUENCE, reduces_once=True), baseline=True)
register_strategy("all_gather_kv", Recipe(sequence=SEQUENCE, reduces_once=True))
register_strategy("ulysses", Recipe(sequence=SEQUENCE_HEADS, reduces_once=True))
register_strategy("ring", Recipe(sequence=SEQUENCE_RING, reduces_once=True))


@dataclass(frozen=True)
class Restriction:
    """Roles of the axes and the treatment of parameters. Without a strategy every axis is free. `forbidden`: pairs of a
    glob and a layout that the parameters it matches may not take; `own`: the recipe's globs with a layout, and whether
    it must be (True) or must not. `required`: pairs of a class and the one strategy that it may take. `tensor_plan`:
    which parameters the tensor axes cut, and that what it leaves whole is whole."""

    name: str
    roles: dict[str, str]
    sharded_axes: tuple[str, ...] = ()  # parameters must be sharded over these where a dim allows it
    whole_axes: tuple[str, ...] = ()  # parameters must not be sharded over these
    keep: bool | None = None
    forbidden: tuple[tuple[str, str], ...] = ()
    own: tuple[tuple[str, str, bool], ...] = ()
    required: tuple[tuple[int, int], ...] = ()
    tensor_plan: TensorPlan | None = None
    experts: str = ""  # the axis that cuts experts, instead of what its role says of them
    in_attention: dict[str, str] = field(default_factory=dict)  # roles of axes there, instead of their own

    @staticmethod
    def of(strategy: str | None, mesh: Mesh, forbid: Sequence[tuple[str, str]] = ()) -> Restriction:
        """Return the restriction of a strategy, with what is forbidden beside it. Raise StrategyError for an unknown
        one, or one that the mesh has not the axes for."""
        name = ALIASES.get(strategy, strategy) if strategy is not None else None
        if name is None:
            found = Restriction(FREELY, dict.fromkeys(mesh.names, FREE))
        elif str(name).startswith(f"{EXPERT}+"):
            found = _with_experts(str(strategy), str(name).partition("+")[2], mesh)
        elif "+" in str(name):
            found = _both(str(name), mesh)
        elif name in RECIPES:
            found = RECIPES[name].on(name, mesh)
        else:
            known = ", ".join(["auto", *RECIPES, EXPERT])
            close = difflib.get_close_matches(str(strategy), [*RECIPES, EXPERT], 1)
            raise StrategyError(
                f"no strategy {strategy!r} is known", fix=f"use {close[0] if close else 'one of ' + known}"
            )
        return replace(found, forbidden=tuple(forbid))

    @staticmethod
    def of_model(plan: TensorPlan, mesh: Mesh) -> Restriction:
        """Return the restriction to what the model itself says of its parameters, on the axis that Megatron cuts
        tensors over; the others carry the batch."""
        return replace(Restriction.of("megatron", mesh), name=MODELS_OWN, sharded_axes=(), tensor_plan=plan)

    @property
    def of_attention(self) -> Restriction:
        """Return what holds for ops that are attentions."""
        return replace(self, roles=self.roles | self.in_attention)

    @property
    def tensor_axes(self) -> tuple[str, ...]:
        """Return the axes that cut tensors, with or without the sequence."""
        return tuple(a for a, role in self.roles.items() if role in (TENSOR, TENSOR_SEQUENCE))


def compared_on(mesh: Mesh) -> list[str]:
    """Return the names of the strategies that plans on a mesh are compared with: on one with an axis cp also those that
    cut the sequence over it, beside what others do with the other axes."""
    if not BASELINES:
        return []
    others = [axis for axis in mesh.names if axis != SEQUENCE_AXIS]
    combined = [*COMBINED, *([REPLICATED] if len(others) > 2 else [])] if len(others) > 1 else []
    inner = ["megatron_sp+zero1", "megatron_sp+fsdp"] if "tp" in others and len(others) > 1 else ["zero1", "fsdp"]
    in_sequence = [f"{name}+{other}" for name in IN_SEQUENCE for other in inner] if SEQUENCE_AXIS in mesh.names else []
    return [*BASELINES, *combined, *in_sequence]


def mapping_of_experts(mesh: Mesh) -> str | None:
    """Return the strategy that Megatron's mapping of a mixture of experts is on a mesh, None if that has no axis for
    tensors beside one for the batch."""
    return f"{EXPERT}+megatron_sp+zero1" if "tp" in mesh.names and len(mesh.names) > 1 else None


def reduces_once(strategy: str | None) -> bool | None:
    """Return what a strategy says of micro-batches: see Recipe. Of two it is the one of the data axes that says it."""
    name = (ALIASES.get(strategy or "", strategy) or "").rpartition("+")[2]
    recipe = RECIPES.get(ALIASES.get(name, name))
    return recipe.reduces_once if recipe else None


def globs_of(strategy: str | None) -> list[str]:
    """Return the globs by which a strategy, and those that plans are compared with, tell parameters apart."""
    return [glob for r in _recipes([*(strategy or "").split("+"), *BASELINES]) for glob in (*r.pin, *r.forbid)]


def required_globs(strategy: str | None) -> dict[str, str]:
    """Return the globs of a strategy that must match a parameter of the model, each with what it is."""
    recipes = _recipes((strategy or "").split("+"))
    return {
        glob: what
        for r in recipes
        for what, globs in (("pin", r.pin), ("forbidden", r.forbid))
        for glob in globs
        if glob not in r.optional
    }


def _recipes(names: Sequence[str]) -> list[Recipe]:
    return [recipe for name in names if (recipe := RECIPES.get(ALIASES.get(name, name)))]


def _with_experts(strategy: str, others: str, mesh: Mesh) -> Restriction:
    """Return the restriction of `"expert+zero1"`: what the other strategies say, with experts cut over the axis ep if
    there is one, else over the last axis that carries the batch or the last of all."""
    found = Restriction.of(others, mesh)
    data = [axis for axis, role in found.roles.items() if role == DATA]
    axis = EXPERT_AXIS if EXPERT_AXIS in mesh.names else (data or mesh.names)[-1]
    return replace(found, name=strategy, experts=axis)


def _both(strategy: str, mesh: Mesh) -> Restriction:
    """Return the restriction of two strategies, as of `"megatron_sp+zero1"`: a tensor-parallel recipe, and what a
    data-parallel one says of the parameters on its data axes; or of one that cuts the sequence, and what another says
    of the other axes. Raise StrategyError for any other two."""
    outer = RECIPES.get(strategy.partition("+")[0])
    if outer is not None and outer.sequence:
        return _beside_sequence(outer, strategy, mesh)
    names = [ALIASES.get(name, name) for name in strategy.split("+")]
    first, second = Restriction.of(names[0], mesh), RECIPES.get(names[1])
    data = [axis for axis, role in first.roles.items() if role == DATA]
    is_possible = len(names) == 2 and first.tensor_axes and second is not None and second.data
    if not is_possible or second.replicates and len(data) < 2:
        raise _not_together(strategy)
    both = replace(first, name=strategy, own=(*first.own, *second.on(strategy, mesh).own))
    if second.shard == "none":
        return both
    whole = tuple(data[:-1]) if second.shard == "last" else ()
    stored = tuple(axis for axis in mesh.names if axis not in whole)
    return replace(both, sharded_axes=stored, whole_axes=whole, keep=second.keep)


def _beside_sequence(outer: Recipe, strategy: str, mesh: Mesh) -> Restriction:
    """Return the restriction of a recipe that cuts the sequence over an axis and of the strategy that the rest of the
    name gives the other axes; parameters stored over all data axes are stored over this one as well."""
    axis, rest = sequence_axis(mesh), strategy.partition("+")[2]
    last = rest.rpartition("+")[2]
    data = RECIPES.get(ALIASES.get(last, last) or "")
    sizes = {name: size for name, size in mesh.axis_sizes.items() if name != axis}
    if data is None or not (sizes or data.data and not data.replicates):
        raise _not_together(strategy)
    restriction = outer.on(strategy, mesh)
    if sizes:
        other = Restriction.of(rest, Mesh(tuple(sizes), tuple(sizes.values())))
        roles = {name: other.roles.get(name, role) for name, role in restriction.roles.items()}
        restriction = replace(
            other, name=strategy, roles=roles, whole_axes=(*other.whole_axes, axis), own=(*restriction.own, *other.own)
        )
    if data.shard != "all":
        return restriction
    stored = {*restriction.sharded_axes, axis}
    return replace(
        restriction,
        keep=data.keep,
        sharded_axes=tuple(name for name in mesh.names if name in stored),
        whole_axes=tuple(name for name in restriction.whole_axes if name != axis),
    )


def _not_together(strategy: str) -> StrategyError:
    return StrategyError(
        f"cannot read {strategy!r} as two strategies",
        fix="write a tensor-parallel and a data-parallel one, megatron_sp+zero1; before them one that cuts the "
        "sequence, where the mesh has an axis for it: all_gather_kv+megatron_sp+zero1",
    )
