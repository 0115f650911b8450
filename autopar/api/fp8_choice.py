"""FP8("auto"): which recipe, and on which kinds of layers, by the seconds of a step that is played.

Plans are made of the model in its own precision, and for each recipe of all layers that it takes, then without the
kinds of layers (all that are called q_proj, say) that do not take less time in that plan than in the first: five plans
at most. The fastest is taken, in its own precision if nothing is faster.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..adapt import FP8, order
from ..adapt.fp8 import AUTO, NONE, sites_of
from ..adapt.order import Adaptation
from ..adapt.targets import Targets
from ..errors import AdaptError, MicroBatchError
from ..ir.mesh import Mesh
from ..ops.fp8_linear import RECIPES
from ..planner.options import hardware_of
from ..planner.spmd.planned import Planned
from ..plans.plan import Plan
from ..processes import agree
from ..runtime.inputs import global_example

Adaptations = Sequence[Adaptation]


def is_open(adapt: Adaptations) -> bool:
    """Return whether the planner is to choose what computes in FP8."""
    return any(isinstance(a, FP8) and a.recipe == AUTO for a in adapt)


def with_choice(adapt: Adaptations, chosen: FP8 | None) -> tuple[Adaptation, ...]:
    """Return the adaptations with what was chosen in the place of FP8("auto")."""
    left = (chosen if isinstance(a, FP8) and a.recipe == AUTO else a for a in adapt)
    return tuple(a for a in left if a is not None)


def chosen_in(text: str) -> FP8 | None:
    """Return what a plan says that it chose (Plan.fp8). Raises AdaptError for a plan that was not asked to choose."""
    if not text:
        raise AdaptError(
            'the plan was not made with FP8("auto")', fix="compile with the adapt= that the plan was made with"
        )
    return None if text == NONE else FP8.parse(text)


def agreed(
    search: Callable[..., Planned],
    model: nn.Module,
    device_mesh: DeviceMesh,
    example_inputs: Any,
    inputs: str,
    plan: Plan | str | Path | None,
    adapt: Adaptations,
    asked: Mapping[str, Any],
) -> tuple[Adaptations, str]:
    """Return the adaptations with which all ranks compile, and what their plan says of FP8: what the given plan chose,
    or what rank 0 finds by `search` with the options that are `asked`. Raises AdaptError for a plan that was not asked
    to choose."""
    if not is_open(adapt):
        return adapt, ""

    def chosen() -> str:
        if plan is not None:
            return (plan if isinstance(plan, Plan) else Plan.load(plan)).fp8
        mesh = Mesh.of(device_mesh)
        example, _ = global_example(example_inputs, inputs, mesh)
        here = {"adapt": adapt, "baselines": False, "hardware": hardware_of(device_mesh, asked["hardware"])}
        return search(model, mesh, example, **{**asked, **here}).plan.fp8

    text = agree.from_rank_zero(chosen)
    return with_choice(adapt, chosen_in(text)), text


def fastest(model: nn.Module, adapt: Adaptations, planned: Callable[[Adaptations], Planned]) -> Planned:
    """Return the fastest plan of the model with FP8("auto") among its adaptations, which it says; `planned` plans it
    with others. Without such an adaptation there is one plan."""
    if not is_open(adapt):
        return planned(adapt)
    asked = next(a for a in adapt if isinstance(a, FP8))
    plain = planned(with_choice(adapt, None))
    found = [replace(plain, fp8=NONE)]
    for recipe in RECIPES:
        everywhere = replace(asked, recipe=recipe)
        try:
            kinds = _kinds(model, everywhere)
            whole = planned(with_choice(adapt, everywhere))
        except (AdaptError, MicroBatchError):  # no layer has the sizes; a scale of all samples in micro-batches
            continue
        found.append(replace(whole, fp8=everywhere.text))
        losing = _losing(plain.plan, whole.plan, kinds)
        if 0 < len(losing) < len(kinds):
            some = replace(everywhere, exclude_modules=_with_names(asked.exclude_modules, losing))
            found.append(replace(planned(with_choice(adapt, some)), fp8=some.text))
    return min(found, key=lambda one: one.plan.step_seconds / max(1, one.plan.samples))


def _kinds(model: nn.Module, everywhere: FP8) -> list[str]:
    """Return the kinds of the layers that would compute in FP8: the last parts of their names. Raises AdaptError if
    there are none."""
    with order.attached(model, [everywhere]):
        return list(dict.fromkeys(path.rpartition(".")[2] for path, _, _ in sites_of(model)))


def _losing(plain: Plan, whole: Plan, kinds: Sequence[str]) -> list[str]:
    """Return the kinds of layers whose modules do not take less time in the second plan."""

    def seconds(plan: Plan, kind: str) -> float:
        rows = (r for r in plan.regions if r.name.rpartition(".")[2] == kind)
        return sum(r.compute_seconds + r.communication_seconds for r in rows)

    return [kind for kind in kinds if seconds(whole, kind) >= seconds(plain, kind)]


def _with_names(excluded: Targets, names: Sequence[str]) -> Targets:
    """Return targets with more names of modules, or ends of names."""
    if not isinstance(excluded, str):
        return (*excluded, *names)
    return rf"{excluded}|(.*\.)?({'|'.join(map(re.escape, names))})"
