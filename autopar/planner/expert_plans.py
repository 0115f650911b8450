"""Plans of experts' recipes, beside the one that is searched for: each the one that is found if it is asked for by
name.

That is the fastest of the recipe's shardings, with as much computed again as the memory demands. What else makes one
fit is tried in autopar/planner/made_to_fit.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import AutoparError
from .accumulation import solvers_for
from .problem.recipes import MODELS_OWN, compared_on
from .solver.search import Outcome
from .solver.solver import Solver

Row = Outcome | AutoparError


def rows(solvers: Sequence[Solver], styles: Mapping[str, str] | None = None) -> dict[str, Row]:
    """Return the plan of every expert strategy, or why it has none; and that of the tensor parallelism of the model's
    own `styles`, if it has any. A plan that does not fit is the fastest of the strategy's."""
    found = {name: row(name, solvers) for name in compared_on(solvers[0].problem.mesh)}
    return found | ({MODELS_OWN: row(MODELS_OWN, solvers, styles)} if styles else {})


def row(name: str, solvers: Sequence[Solver], styles: Mapping[str, str] | None = None) -> Row:
    """Return the plan of one strategy, the fastest of all ways in which it reduces gradients."""
    found = [solver.baseline(name, styles) for solver in solvers_for(solvers, name)]
    outcomes = [one for one in found if isinstance(one, Outcome)]
    fitting = [one for one in outcomes if one.fits]
    return min(fitting, key=lambda one: one.seconds, default=outcomes[0] if outcomes else found[0])
