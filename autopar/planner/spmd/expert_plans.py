"""Plans of experts' recipes, beside the one that is searched for: each the one that is found if it is asked for by
name.

That is the fastest of the recipe's shardings, with as much computed again as the memory demands. What else makes one
fit is tried in autopar/planner/made_to_fit.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...errors import AutoparError
from ..problem.recipes import MODELS_OWN, Restriction, compared_on
from ..solver.search import Outcome
from ..solver.solver import Solver
from .accumulation import solvers_for

Row = Outcome | AutoparError


def rows(solvers: Sequence[Solver], styles: Mapping[str, str] | None = None) -> dict[str, Row]:
    """Return the plan of every expert strategy, or why it has none; and that of the tensor parallelism of the model's
    own `styles`, if it has any. A plan that does not fit is the fastest of the strategy's."""
    known: dict[str, Outcome] = {}
    found = {name: row(name, solvers, known=known) for name in compared_on(solvers[0].problem.mesh)}
    return found | ({MODELS_OWN: row(MODELS_OWN, solvers, styles)} if styles else {})


def row(
    name: str,
    solvers: Sequence[Solver],
    styles: Mapping[str, str] | None = None,
    known: dict[str, Outcome] | None = None,
) -> Row:
    """Return the plan of one strategy, the fastest of all ways in which it reduces gradients. `known`: the rows of what
    other strategies allow, to which this one's is added: with one micro-batch ZeRO-1 and 2 are the same."""
    used, known = solvers_for(solvers, name), {} if known is None else known
    alike = allowed_by(name, used)
    if alike in known:
        return replace(known[alike], restriction=Restriction.of(name, used[0].problem.mesh))
    found = [solver.baseline(name, styles) for solver in used]
    outcomes = [one for one in found if isinstance(one, Outcome)]
    fitting = [one for one in outcomes if one.fits]
    fastest = min(fitting, key=lambda one: one.seconds, default=outcomes[0] if outcomes else None)
    if alike and fastest:
        known[alike] = fastest
    return fastest or found[0]


def allowed_by(name: str, solvers: Sequence[Solver]) -> str:
    """Return what a strategy allows, and in which ways it reduces gradients, as a text; nothing if the mesh or the
    model say what."""
    try:
        restriction = replace(Restriction.of(name, solvers[0].problem.mesh), name="")
    except AutoparError:
        return ""
    return f"{restriction} {[solver.pricer.reduces_once for solver in solvers]}"
