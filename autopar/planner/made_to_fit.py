"""Make an expert's recipe fit where computing again does not: by more micro-batches, then by offload.

A step of more micro-batches holds the activations of one of them alone; offloaded, parameters, gradients and optimizer
state are on the host. Asked for by name with the same micro-batches and the same offload, a recipe gives the figures of
its row again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..cost.compute import EAGER
from ..errors import AutoparError, MemoryInfeasibleError
from ..frontend.export import Captured
from .problem import offload
from .problem.recipes import MODELS_OWN, Restriction
from .solver.search import Outcome
from .solver.solver import Solver
from .spmd import plan
from .spmd.accumulation import fastest, solvers_for
from .spmd.batch import at_least, data_ways, micro_batch_of, samples_of
from .spmd.expert_plans import Row, allowed_by, row
from .spmd.planned import Planned

USEFUL = 10.0  # times the seconds of a recipe where memory is no limit, from where a plan of it is of no use


@dataclass(frozen=True)
class _Way:
    """A way in which a recipe is tried."""

    micro_batches: int
    offload: str = offload.NONE


def made_to_fit(planned: Planned, captured: Captured, report: Callable[[str], None]) -> Planned:
    """Return the finished search for the captured call of a whole batch with the recipes that did not fit as they do
    with more micro-batches, or offloaded, if they fit so."""
    search = _Ways(planned, captured, report)
    found = {name: one if _fits(one) else search.fitting(name) or one for name, one in planned.others.items()}
    return replace(planned, others=found)


class _Ways:
    """The problems of a mesh in all ways that recipes are tried in, each built when it is first asked for."""

    def __init__(self, planned: Planned, captured: Captured, report: Callable[[str], None]):
        self.planned, self.captured, self.report = planned, captured, report
        self.mesh, self.options = planned.problem.mesh, planned.options
        self.batch, self.limit_bytes = samples_of(captured.signature), planned.solver.limit_bytes
        self.solvers: dict[_Way, list[Solver]] = {}
        self.rows: dict[_Way, dict[str, Outcome]] = defaultdict(dict)
        self.in_full: dict[str, Outcome | None] = {}

    def fitting(self, name: str) -> Outcome | None:
        """Return the plan of a recipe in the first way in which it fits, None if there is none."""
        for way in self._tried(name):
            styles = self.options.styles if name == MODELS_OWN else None
            one = row(name, self._solvers(way), styles, self.rows[way])
            if not isinstance(one, Outcome):
                continue
            if not _fits_host(one):  # nor does it in more micro-batches
                break
            if one.fits:
                return one
        return self._in_full(name)

    def _in_full(self, name: str) -> Outcome | None:
        """Return the plan of a recipe as it is if other shardings of it fit than the fastest, None if none does."""
        failed = self.planned.others[name]
        if name == MODELS_OWN or not isinstance(failed, Outcome) or _state_bytes(failed) > self.limit_bytes:
            return None
        solvers = solvers_for(self._solvers(_Way(self.options.micro_batches, self.options.offload)), name)
        alike = allowed_by(name, solvers)
        if alike not in self.in_full:
            self.in_full[alike] = self._searched(solvers, Restriction.of(name, self.mesh), USEFUL * failed.seconds)
        found = self.in_full[alike]
        return found and replace(found, restriction=Restriction.of(name, self.mesh))

    def _searched(self, solvers: list[Solver], restriction: Restriction, seconds: float) -> Outcome | None:
        """Return the fastest plan of a restriction that fits, None if there is none that takes less than so many
        seconds."""
        able = [solver for solver in solvers if solver.may_fit(restriction, seconds)]
        try:
            return fastest(able, restriction, {})[1] if able else None
        except AutoparError:
            return None

    def _tried(self, name: str) -> list[_Way]:
        """Return the ways to try: as many micro-batches as activations are too large, or as there can be, and the same
        offloaded. What holds too much before any activation is not tried with more of them."""
        now, failed = self.options.micro_batches, self.planned.others[name]
        if not isinstance(failed, Outcome):
            return []
        replicas = data_ways(self.mesh, None if name == MODELS_OWN else name)
        more = [k for k in range(now + 1, self.batch + 1) if self.batch % k == 0 and self.batch // k % replicas == 0]
        counts = sorted({at_least(more, now * self._excess(failed)) or more[-1], more[-1]}) if more else []
        found = [_Way(k) for k in counts] if _state_bytes(failed) <= self.limit_bytes else []
        if self._may_offload():
            found += [_Way(k, offload.OPTIMIZER) for k in (now, *counts[-1:])]
        return found

    def _excess(self, failed: Outcome) -> float:
        """Estimate how many times as large the activations are as the room for them."""
        e, limit = failed.evaluation, self.limit_bytes
        others = _state_bytes(failed)
        return max(2.0, (e.bytes_ - others) / max(limit - others, 1.0))

    def _may_offload(self) -> bool:
        if self.options.offload != offload.NONE:
            return False
        try:
            replace(self.options, offload=offload.OPTIMIZER).check(self.mesh)
        except AutoparError:
            return False
        return True

    def _solvers(self, way: _Way) -> list[Solver]:
        if way not in self.solvers:
            host = ", offloaded" if way.offload != offload.NONE else ""
            self.report(f"recipes in {way.micro_batches} micro-batches{host}")
            execution = EAGER if way.offload != self.options.offload else self.options.execution  # as compile() has it
            options = replace(self.options, micro_batches=way.micro_batches, offload=way.offload, execution=execution)
            micro, options = micro_batch_of(self.captured, options)
            one = micro.captured if micro else self.captured
            known = self.planned.pricer if execution == self.options.execution else None  # of ops too
            self.solvers[way] = plan.solvers_of(one, self.mesh, options, self.report, known)
        return self.solvers[way]


def _fits(one: Row) -> bool:
    return isinstance(one, Outcome) and one.fits


def _fits_host(one: Outcome) -> bool:
    try:
        offload.check_host(one.pricer.problem, one.evaluation)
    except MemoryInfeasibleError:
        return False
    return True


def _state_bytes(one: Outcome) -> float:
    """Return the bytes of an evaluated plan that more micro-batches do not make fewer."""
    e = one.evaluation
    return one.pricer.problem.reserve_bytes + e.resident_bytes + e.gradient_bytes
