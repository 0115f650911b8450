"""Price what else could cut the sequence of a plan's attentions: each scheme planned anew, all else as the plan's
strategy has it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..errors import AutoparError
from ..ir.mesh import SEQUENCE_AXIS
from .problem.recipes import SEQUENCE, SEQUENCE_HEADS, SEQUENCE_RING
from .solver.solver import Solver
from .spmd.attention_schemes import Cut, cuts_of
from .spmd.planned import Planned

NAMES = {SEQUENCE: "all_gather_kv", SEQUENCE_RING: "ring", SEQUENCE_HEADS: "ulysses"}


@dataclass(frozen=True)
class OtherScheme:
    """The fastest plan that is found with a scheme for all attentions: seconds of an average pass and bytes of a
    device. `note`: why there is none."""

    text: str
    step_seconds: float = math.nan
    bytes_: float = math.nan
    note: str = ""


def other_schemes(
    planned: Planned, solver: Solver, report: Callable[[str], None] = lambda text: None
) -> tuple[OtherScheme, ...]:
    """Return what the schemes that the plan has not would cost, the fastest first and those without a plan last;
    nothing where no sequence is cut and no axis of the mesh is named for that. `solver` searches for their plans,
    `report` is told what is being tried."""
    cuts = cuts_of(planned.problem, planned.evaluation)
    taken = [_roles(cut) for cut in cuts]
    rows = [
        _planned(planned, solver, roles, report)
        for roles in _candidates(_axes(planned, cuts))
        if any(roles != own for own in taken)
    ]
    return tuple(sorted(rows, key=lambda row: (bool(row.note), row.text if row.note else row.step_seconds)))


def _axes(planned: Planned, cuts: list[Cut]) -> tuple[str, ...]:
    """Return the axes that cut the sequence of attentions, or the one that is named for it, in order of the mesh."""
    mesh = planned.problem.mesh
    found = {axis for cut in cuts for axis in cut.axes} or {SEQUENCE_AXIS}
    return tuple(axis for axis in mesh.names if axis in found and mesh.size(axis) > 1)


def _roles(cut: Cut) -> dict[str, str]:
    by_role = {SEQUENCE: cut.gathered, SEQUENCE_RING: cut.ring, SEQUENCE_HEADS: cut.exchanged}
    return {axis: role for role, axes in by_role.items() for axis in axes}


def _candidates(axes: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """Iterate over the roles of axes: the same for all of them, or heads over the last and rows over the others."""
    for role in NAMES if axes else ():
        yield dict.fromkeys(axes, role)
        if len(axes) > 1 and role != SEQUENCE_HEADS:
            yield dict.fromkeys(axes, role) | {axes[-1]: SEQUENCE_HEADS}


def _planned(planned: Planned, solver: Solver, roles: dict[str, str], report: Callable[[str], None]) -> OtherScheme:
    """Plan with these roles of the axes in attention, from the plan that has others."""
    asked = " + ".join(f"{NAMES[role]} over {axis}" for axis, role in roles.items())
    restriction, pins = replace(planned.chosen.restriction, in_attention=roles), dict(planned.options.pin)
    report(asked)
    try:
        found = solver.solve(restriction, pins, [_start(planned, solver.allowed(restriction, pins))])
    except AutoparError as error:
        return OtherScheme(asked, note=error.message)
    made = cuts_of(planned.problem, found.evaluation)
    text = " | ".join(dict.fromkeys(cut.text for cut in made))
    return OtherScheme(text, found.seconds, found.evaluation.bytes_)


def _start(planned: Planned, allowed: Mapping[int, np.ndarray]) -> dict[int, int]:
    """Return the choices of the plan; where they are not allowed, the fastest that are."""
    problem, found = planned.problem, {}
    for cls, mask in allowed.items():
        k = planned.evaluation.choice[cls]
        seconds = np.where(mask, problem.classes[cls].seconds, np.inf)
        found[cls] = k if mask[k] else int(np.argmin(seconds))
    return found
