"""The strategies that each class may still choose under a restriction (recipes.py) and pins, as masks."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np
from torch import fx

from ...adapt.lora_site import is_factor
from ...errors import AutoparError, StrategyError
from ...ir.graph import describe
from ...ir.layout import ZIGZAG, Layout
from ...ir.mesh import Mesh
from ...ops import ATTENTION, OF_KEPT_KEYS, autopar
from ...rules import Rule
from ...rules.layers import QUERY_HEADS, RING
from ...rules.reading import bound
from ...rules.rule import Rows, entries_of
from .hf_tp_plan import inside
from .labels import LINEAR_OPS, NORMS, Factors, factors_of
from .problem import Problem
from .recipes import (
    DATA,
    FREE,
    SEQUENCE,
    SEQUENCE_HEADS,
    SEQUENCE_RING,
    SEQUENCE_ROLES,
    TENSOR,
    TENSOR_SEQUENCE,
    WHOLE,
    Restriction,
    required_globs,
)
from .vertices import Vertex

LEAVES = ("parameter", "input", "buffer")  # which globs name
TENSOR_ROLES = (TENSOR, TENSOR_SEQUENCE)
HEADS = ("h", QUERY_HEADS)  # factors of an attention
TENSOR_OPS = LINEAR_OPS | ATTENTION | {autopar.matmul.default}


def allowed_strategies(
    problem: Problem, restriction: Restriction, pins: dict[str, str] | None = None
) -> dict[int, np.ndarray]:
    """Return a mask over the strategies of every class. Raise StrategyError for a pin that nothing can follow, or for a
    class that what is forbidden leaves nothing."""
    mesh = problem.mesh
    given = {role for role in restriction.roles.values() if role != FREE}
    is_restricted = given or restriction.experts or restriction.in_attention
    factors = factors_of(problem, bool(given & {*SEQUENCE_ROLES})) if is_restricted else {}
    plan = restriction.tensor_plan
    if plan is not None:  # which says itself what is whole
        factors = {cls: replace(of, between=set()) for cls, of in factors.items()}
    may_cut = inside(problem, plan) if plan else set()
    masks = {}
    for cls, options in problem.classes.items():
        v = problem.vertices[cls]
        mask = fits = problem.fits.get(cls, np.ones(len(options.strategies), bool))
        if v.kind == "op" and factors:
            module = v.node.meta["module"]
            must_cut = v.node.target in TENSOR_OPS and not is_factor(module)
            if (
                plan is not None
            ):  # beside the layers that the plan cuts there may be one that it leaves whole, as a router
                must_cut &= cls in may_cut and (plan.cuts(module) or v.node.target not in LINEAR_OPS)
            roles = restriction.roles
            if plan is not None and cls not in may_cut:
                roles = roles | dict.fromkeys(restriction.tensor_axes, WHOLE)
            if restriction.experts and (_has_owner(problem.rule_of.get(cls)) or factors[cls].expert):
                # rows of experts as prices say: over the tensor axes their features, more experts or more tokens
                roles = roles | dict.fromkeys((restriction.experts, *restriction.tensor_axes), FREE)
            if restriction.experts and factors[cls].expert:
                fits = fits & _expert_mask(
                    options.strategies, mesh.names.index(restriction.experts), factors[cls].expert, v
                )
            if v.quantizes_weight:  # where its shards are, or where they have been gathered
                roles = {axis: FREE if role == DATA else role for axis, role in roles.items()}
            rows = v.node.target in NORMS
            if v.node.target not in ATTENTION | OF_KEPT_KEYS:
                roles = {axis: SEQUENCE if role in SEQUENCE_ROLES else role for axis, role in roles.items()}
            else:
                roles = roles | restriction.in_attention
            if v.node.target in ATTENTION:
                if SEQUENCE_HEADS in roles.values():
                    _check_heads(v, options.strategies, restriction.of_attention, mesh, fits)
                if SEQUENCE_RING in roles.values():
                    _check_ring(v, options.strategies, restriction.of_attention, mesh, fits)
            mask = _op_mask(options.strategies, roles, mesh, factors[cls], must_cut, fits, rows)
            if plan is not None:
                mask &= _in_place_mask(problem, v, options.strategies, restriction)
        elif v.kind == "parameter":
            held = restriction.experts if cls in factors and 0 in factors[cls].expert else ""
            mask = _parameter_mask(options.strategies, restriction, is_factor(v.node.meta["role"].name), held)
            if cls in factors and factors[cls].between and (whole := _whole_between(mask, options, restriction)).any():
                mask = whole
            if plan is not None and not is_factor(v.node.meta["role"].name):
                mask &= _planned_mask(options.strategies, restriction, v.node.meta["role"].name)
        elif v.kind == "input" and len(options.strategies) > 1:  # else the user's own tensors fix it
            mask = _input_mask(options.strategies, restriction, fits)
        masks[cls] = mask.copy()
    for pattern, text, wanted in restriction.own:
        what = f"{'pin' if wanted else 'forbidden layout'} of strategy {restriction.name},"
        for v, fits in _named(problem, pattern, text, what, True):
            fits = fits if wanted else ~fits
            masks[v.cls] = masks[v.cls] & fits if (masks[v.cls] & fits).any() else fits
    for pattern, text in (pins or {}).items():
        _pin(problem, masks, pattern, text)
    for pattern, text in restriction.forbidden:
        _forbid(problem, masks, pattern, text)
    for cls, strategy in restriction.required:
        masks[cls] = np.zeros(len(masks[cls]), bool)
        masks[cls][strategy] = True
    for cls, mask in masks.items():
        if not mask.any():
            raise _nothing_left(problem, problem.vertices[cls], restriction)
    return masks


def _nothing_left(problem: Problem, v: Vertex, restriction: Restriction) -> StrategyError:
    what = describe(v.node) if v.kind == "op" else f"the {v.kind} {v.node.meta['role'].name}"
    return StrategyError(
        f"{what} has no way to be sharded that {restriction.name} and the pins allow together",
        node=v.name,
        source=v.node.meta.get("source") or None,
        mesh=problem.mesh,
        fix="use strategy auto, or leave out a pin",
    )


def _check_heads(v: Vertex, strategies, restriction: Restriction, mesh: Mesh, fits: np.ndarray) -> None:
    """Raise StrategyError for an attention whose heads cannot be cut over an axis that is to cut them."""
    axes = [i for i, axis in enumerate(mesh.names) if restriction.roles[axis] in (*TENSOR_ROLES, SEQUENCE_HEADS)]
    if any(fit and s.choice and all(s.choice[i] in HEADS for i in axes) for s, fit in zip(strategies, fits)):
        return
    given = bound(v.node)
    heads, kv_heads = (given[name].meta["val"].shape[1] for name in ("q", "k"))
    where = ", ".join(f"{mesh.names[i]}={mesh.sizes[i]}" for i in axes)
    raise StrategyError(
        f"{restriction.name} shares the heads of an attention among {where}: {heads} of queries and {kv_heads} of keys "
        "cannot be",
        node=v.name,
        source=v.node.meta.get("source") or None,
        mesh=mesh,
        fix="use all_gather_kv, or sizes whose product divides the heads of queries",
    )


def _check_ring(v: Vertex, strategies, restriction: Restriction, mesh: Mesh, fits: np.ndarray) -> None:
    """Raise StrategyError for an attention whose keys cannot go round the axis that is to cut them."""
    axes = [i for i, axis in enumerate(mesh.names) if restriction.roles[axis] == SEQUENCE_RING]
    if any(fit and s.choice and all(s.choice[i] == RING for i in axes) for s, fit in zip(strategies, fits)):
        return
    raise StrategyError(
        f"{v.name} cannot have its keys go round in blocks, one for each device",
        node=v.name,
        source=v.node.meta.get("source") or None,
        mesh=mesh,
        fix="use all_gather_kv or ulysses, or fewer devices for so short a sequence",
    )


def _op_mask(
    strategies,
    roles: dict[str, str],
    mesh: Mesh,
    of: Factors,
    must_cut: bool,
    fits: np.ndarray,
    cuts_rows: bool = False,
) -> np.ndarray:
    """Return a mask over the strategies of an op: those that keep to the roles of the axes. With `must_cut` a tensor
    axis shards a factor of the weight where it can, as Megatron cuts every linear and the heads; what runs between
    blocks it leaves whole, or adds up partial sums there. One that takes the sequence too cuts that along it, and with
    `cuts_rows` something where it can. `fits` are the strategies that can be at all."""
    mask = fits.copy()
    for i, axis in enumerate(mesh.names):
        role = roles[axis]
        if role == FREE:
            continue
        chosen = [(s.choice[i] if s.choice else "") for s in strategies]
        factors = [c.split("/")[0] for c in chosen]
        if role == DATA:
            fits = np.array([f in of.batch for f in factors]) & mask
            mask &= fits if fits.any() else np.array([not f or f.startswith("+") for f in factors])
        elif role == SEQUENCE:  # what has lost the sequence, as rows of samples and places together, is free
            fits = np.array([f in of.sequence and f != RING for f in factors]) & mask
            mask &= fits if fits.any() else np.array([f not in of.weight for f in factors])
        elif role == SEQUENCE_HEADS:
            mask &= np.array([f in HEADS for f in factors])
        elif role == SEQUENCE_RING:
            mask &= np.array([f == RING for f in factors])
        elif role == WHOLE:
            mask &= np.array([not f or f.startswith("+") for f in factors])
        elif role == TENSOR and of.between:
            mask &= np.array([not f or f.startswith("+") for f in factors])
        elif role == TENSOR:
            mask &= np.array([not f or f.startswith("+") or (f in of.weight and f not in of.batch) for f in factors])
        else:
            mask &= np.array([f not in of.batch for f in factors])
            rows = mask & np.array([bool(f) and not f.startswith("+") for f in factors])
            places = mask & np.array([f in of.between for f in factors])
            if places.any():
                mask = places | mask & np.array([f.startswith("+") for f in factors])
            elif cuts_rows and rows.any():
                mask = rows
        if must_cut and role in TENSOR_ROLES:
            cuts = np.array([f in of.weight and f not in of.batch for f in factors]) & mask
            mask = cuts if cuts.any() else mask
    return mask


def _has_owner(rule: Rule | None) -> bool:
    return rule is not None and any(
        isinstance(entry, Rows) for dims in rule.inputs for dim in dims for entry in entries_of(dim)
    )


def _expert_mask(strategies, axis: int, factors: Collection[str | int], v: Vertex) -> np.ndarray:
    """Return a mask over the strategies of an op on experts: those that cut them over an axis. Raise StrategyError if
    there are too few to cut."""
    mask = np.array([bool(s.choice) and s.choice[axis] in factors for s in strategies])
    if not mask.any():
        raise StrategyError(
            f"{v.name} has no expert for every device",
            node=v.name,
            source=v.node.meta.get("source") or None,
            fix="make the axis of the experts smaller",
        )
    return mask


def _parameter_mask(strategies, restriction: Restriction, is_thin: bool, experts: str = "") -> np.ndarray:
    """Return a mask over the strategies of a parameter. `is_thin` marks a factor of a LoRA adapter, which tensor
    parallelism cuts only where its base is cut along the same dim; `experts` is the axis that cuts dim 0 if that is of
    experts."""
    layouts = [s.outputs[0] for s in strategies]
    used = [set(layout.sharding_axes) - {experts} for layout in layouts]
    mask = np.array([not (u & set(restriction.whole_axes)) for u in used])
    if experts:
        mask &= [layout.dim_of(experts) == 0 for layout in layouts]
    needed = set() if is_thin and restriction.tensor_axes else set(restriction.sharded_axes)
    needed -= set(restriction.tensor_axes) if experts else set()
    if needed and (len(layouts[0].dims) > 1 or DATA in restriction.roles.values() and not restriction.tensor_axes):
        score = np.array([len(u & needed) if m else -1 for u, m in zip(used, mask)])
        mask &= score == score.max()
    return mask


def _whole_between(mask: np.ndarray, options, restriction: Restriction) -> np.ndarray:
    """Return a mask over the strategies of a parameter that are whole on the tensor axes, which cut no features between
    blocks: every device needs all of the weight of a norm, and of what is added behind a product."""
    axes = {a for a, role in restriction.roles.items() if role in TENSOR_ROLES}
    return mask & np.array([not axes & set(s.outputs[0].sharding_axes) for s in options.strategies])


def _planned_mask(strategies, restriction: Restriction, name: str) -> np.ndarray:
    """Return a mask over the strategies of a parameter: the tensor axes cut the dim that the model's own plan says, and
    no other. Raise StrategyError if they cannot."""
    layouts = [s.outputs[0] for s in strategies]
    dim = restriction.tensor_plan.dim_of(name, len(layouts[0].dims))
    mask = np.array([all(layout.dim_of(a) == dim for a in restriction.tensor_axes) for layout in layouts])
    if not mask.any():
        raise StrategyError(f"no layout of {name} cuts dim {dim}, as the model's own plan says")
    return mask


def _in_place_mask(problem: Problem, v: Vertex, strategies, restriction: Restriction) -> np.ndarray:
    """Return a mask over the strategies of an op: a layer computes with the part of its weight that the device holds.
    Raise StrategyError if it cannot."""
    mask = np.ones(len(strategies), bool)
    for slot, (producer, _) in enumerate(v.inputs):
        parameter = problem.vertices[producer]
        if parameter.kind == "parameter" and not is_factor(parameter.node.meta["role"].name):
            dim = restriction.tensor_plan.dim_of(parameter.node.meta["role"].name, parameter.node.meta["val"].dim())
            mask &= [all(s.inputs[slot].dim_of(a) == dim for a in restriction.tensor_axes) for s in strategies]
    if not mask.any():
        raise StrategyError(f"{v.name} cannot compute with its weight as the model's own plan cuts it")
    return mask


def _input_mask(strategies, restriction: Restriction, fits: np.ndarray) -> np.ndarray:
    """Return a mask over the strategies of an input: dim 0 is cut over data axes only, dim 1 over those that cut the
    sequence, each over as many as it can be where the layout `fits`."""
    data = {a for a, role in restriction.roles.items() if role == DATA}
    fixed = {a for a, role in restriction.roles.items() if role != FREE}
    layouts = [s.outputs[0] for s in strategies]
    first = [set(layout.dims[0]) if layout.dims else set() for layout in layouts]
    mask = fits & np.array([(f & fixed) <= data for f in first])
    if data:
        mask &= np.array([not (set(x.sharding_axes) & data) - f for x, f in zip(layouts, first)])
        mask = _most(mask, [f & data for f in first])
    if sequence := {a for a, role in restriction.roles.items() if role in SEQUENCE_ROLES}:
        second = [set(layout.dims[1]) if len(layout.dims) > 1 else set() for layout in layouts]
        mask &= np.array([not (set(x.sharding_axes) & sequence) - f for x, f in zip(layouts, second)])
        mask = _most(mask, [f & sequence for f in second])
    return mask


def _most(mask: np.ndarray, axes: list[set[str]]) -> np.ndarray:
    """Return those of the strategies in a mask that have most axes."""
    score = np.array([len(found) if m else -1 for found, m in zip(axes, mask)])
    return mask & (score == score.max())


def _pin(problem: Problem, masks: dict[int, np.ndarray], pattern: str, text: str) -> None:
    for v, fits in _named(problem, pattern, text, "pin"):
        if not (masks[v.cls] & fits).any():
            raise StrategyError(
                f"no layout of {v.node.meta['role'].name} follows the pin {pattern}: {text}",
                shape=tuple(v.node.meta["val"].shape),
                mesh=problem.mesh,
                fix="pin a dim that the axis divides, or leave the parameter to the planner",
            )
        masks[v.cls] &= fits


def _forbid(problem: Problem, masks: dict[int, np.ndarray], pattern: str, text: str) -> None:
    for v, fits in _named(problem, pattern, text, "forbidden"):
        left = masks[v.cls] & ~fits
        if not left.any():
            layouts = [
                s.outputs[0].text() for s, allowed in zip(problem.classes[v.cls].strategies, masks[v.cls]) if allowed
            ]
            raise StrategyError(
                f"{v.node.meta['role'].name} has no layout left when {text} is forbidden to {pattern}",
                shape=tuple(v.node.meta["val"].shape),
                mesh=problem.mesh,
                fix=f"forbid less: it may only be {', '.join(layouts[:3])}",
            )
        masks[v.cls] = left


def check_globs(strategy: str | None, graph: fx.Graph) -> None:
    """Raise StrategyError for a glob of a strategy that matches no leaf of a whole graph and is not optional."""
    names = [n.meta["role"].name for n in graph.nodes if n.op == "placeholder" and n.meta["role"].kind in LEAVES]
    for pattern, what in required_globs(strategy).items():
        if not fnmatch.filter(names, pattern):
            raise _matches_nothing(f"{what} {pattern!r} of strategy {strategy}", pattern, names)


def _matches_nothing(what: str, pattern: str, names: Collection[str]) -> StrategyError:
    close = difflib.get_close_matches(pattern.replace("*", ""), names, 3, cutoff=0.2) or list(names)[:3]
    return StrategyError(f"the {what} matches no parameter", fix=f"the nearest names are {', '.join(close)}")


def _named(
    problem: Problem, pattern: str, text: str, what: str, is_optional: bool = False
) -> Iterator[tuple[Vertex, np.ndarray]]:
    """Iterate over the leaves that a glob matches, each with a mask of the strategies that place it as the text says.
    `what`: that the user asked for. Raise MeshError for an axis that the mesh does not have, and StrategyError for a
    layout that one of the leaves cannot have, or if the glob matches none."""
    found = False
    names = {}
    for v in problem.vertices:
        if v.kind not in LEAVES:
            continue
        name = v.node.meta["role"].name
        names[name] = v
        if not fnmatch.fnmatchcase(name, pattern):
            continue
        found = True
        shape = tuple(v.node.meta["val"].shape)
        words = [word.split(":")[0] for word in text.replace(",", " ").split() if word != "R"]
        try:
            wanted = Layout.parse(text, len(shape))
            for axis in words:
                problem.mesh.size(axis)
        except AutoparError as error:
            message = f"{name} cannot follow the {what} {pattern}: {text}: {error.message}"
            raise type(error)(message, shape=shape, mesh=error.mesh, fix=error.fix) from None
        options = problem.classes[v.cls].strategies
        yield v, np.array([_follows(s.outputs[0], wanted, set(words) or None) for s in options])
    if not found and not is_optional:
        raise _matches_nothing(f"{what} {pattern!r}", pattern, names)


def _follows(layout: Layout, wanted: Layout, axes: set[str] | None) -> bool:
    """Return whether the named axes are placed as wanted; all axes if none is named ("R")."""
    if axes is None:
        return layout == wanted
    for axis in axes:
        if layout.dim_of(axis) != wanted.dim_of(axis):
            return False
    return all(w == p or w == 1 and p != ZIGZAG for w, p in zip(wanted.parts, layout.parts))
