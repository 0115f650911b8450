"""Explain why a plan chose what it chose: each alternative forced in turn, and the rest searched anew around it.

A strategy of one op or parameter costs little by itself; what it makes its neighbours do costs more. So every
alternative is priced by a whole plan that has it, the fastest that the same search finds under the same limit. Only the
alternatives that the dual bound ranks best are tried.
"""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..cost.compute import FREE
from ..errors import MemoryInfeasibleError, StrategyError
from ..plans.loops import loop_lines
from ..plans.routing import routing_lines
from ..rules import Strategy
from .explain_text import explain_text
from .objective.evaluate import Evaluation
from .objective.module_table import module_of
from .other_schemes import OtherScheme, other_schemes
from .problem.vertices import Vertex
from .solver.dual import Dual
from .solver.search import Outcome
from .solver.solver import Solver
from .spmd.attention_schemes import scheme_text
from .spmd.attention_text import attention_text
from .spmd.plan import with_loops
from .spmd.planned import Planned

SWEEPS = 16
TRIED_GAP = 1e-2  # good enough for a plan that is only compared with
ROUNDS = 24  # of the search for each alternative, which starts from the chosen plan
FAR_MORE = 1e6  # times the memory limit: as good as none


@dataclass(frozen=True)
class Instead:
    """An alternative with the fastest plan that has it, as differences from the chosen plan: seconds of compute
    (recomputation and the host's part included), of communication of the tensors that the choice reads and makes
    (`here`) and of all others (`elsewhere`), of what of it hides behind compute, and bytes of a device. `fits`: whether
    any plan that has it fits the memory; if not, there are no numbers."""

    text: str
    fits: bool
    step_seconds: float = math.nan
    compute_seconds: float = math.nan
    here_seconds: float = math.nan
    elsewhere_seconds: float = math.nan
    hidden_seconds: float = math.nan
    bytes_: float = math.nan


@dataclass(frozen=True)
class Choice:
    """One decision, shared by `copies` equal ops or parameters of which `name` is the first. `binding`: what keeps it
    from being another. `left_out`: how many alternatives were not tried. `attends`: to what an attention does;
    `scheme`: what cuts it, and what that makes a device compute and send."""

    kind: str
    name: str
    copies: int
    shape: tuple[int, ...]
    module: str
    source: str
    chosen: str
    binding: str
    instead: tuple[Instead, ...]
    left_out: int
    attends: str = ""
    scheme: str = ""


@dataclass(frozen=True)
class Explanation:
    """The decisions that a pattern matches; `print` it. `left_out`: how many more it matches. `routing`: what the plan
    says of experts' rows, if it sends any.
    `schemes`: what else could cut the sequence of attentions, if one is among the choices."""

    pattern: str
    model: str
    mesh: str
    step_seconds: float
    peak_bytes: float
    choices: tuple[Choice, ...]
    left_out: int
    routing: tuple[str, ...] = ()
    schemes: tuple[OtherScheme, ...] = ()

    def __str__(self) -> str:
        return explain_text(self)


def explain_plan(
    planned: Planned,
    pattern: str,
    alternatives: int = 6,
    choices: int = 8,
    report: Callable[[str], None] = lambda text: None,
) -> Explanation:
    """Explain what the glob `pattern` matches: parameters, ops by their node's name, or everything in modules. Explain
    at most so many `choices`, with so many `alternatives` each. `report` is told what is being tried. Raise
    StrategyError if nothing matches."""
    classes = _matched(planned, pattern)
    explainer = _Explainer(planned, classes[:choices], alternatives, report)
    e, found = planned.evaluation, tuple(explainer.choices())
    return Explanation(
        pattern,
        planned.model,
        str(planned.problem.mesh),
        planned.chosen.seconds,
        e.bytes_,
        found,
        max(0, len(classes) - choices),
        () if planned.options.within else (*routing_lines(planned.plan), *loop_lines(planned.plan)),
        other_schemes(planned, explainer.solver, report) if any(choice.scheme for choice in found) else (),
    )


def runners_up(planned: Planned) -> dict[str, tuple[str, float]]:
    """Return by name of a parameter or input the layout that would be next best, and about the seconds of a step that
    it costs at least, where memory is short with the price of its bytes. Both come from bounds alone, without a
    search."""
    problem = planned.problem
    classes = [cls for cls in problem.classes if problem.vertices[cls].kind in ("parameter", "input")]
    ranks, result = _Explainer(planned, classes, 0).ranks(), {}
    for cls in classes:
        taken = {planned.evaluation.choice[m] for m in problem.classes[cls].members}
        others = [
            k for k in np.argsort(ranks[cls], kind="stable").tolist() if k not in taken and math.isfinite(ranks[cls][k])
        ]
        if others:
            found = (
                strategy_text("parameter", problem.classes[cls].strategies[others[0]]),
                round(float(ranks[cls][others[0]]), 9),
            )
            result |= {_name(problem.vertices[m]): found for m in problem.classes[cls].members}
    return result


def _matched(planned: Planned, pattern: str) -> list[int]:
    """Return the classes whose names the pattern matches, or else those in modules that it matches, in graph order.
    Views in a module are left out: nobody decides about those. Raise StrategyError if nothing matches."""
    by_name, by_module, names = {}, {}, {}
    for v in planned.problem.vertices:
        if v.kind not in ("op", "parameter", "input"):
            continue
        name, module = _name(v), module_of(v)
        paths = list(itertools.accumulate(module.split("."), lambda a, b: f"{a}.{b}")) if module else []
        names |= dict.fromkeys((name, *paths))
        if fnmatch.fnmatchcase(name, pattern):
            by_name[v.cls] = None
        elif not (v.kind == "op" and v.node.target in FREE) and any(fnmatch.fnmatchcase(p, pattern) for p in paths):
            by_module[v.cls] = None
    if not by_name and not by_module:
        raise StrategyError(
            f"{pattern!r} matches no parameter, op or module",
            mesh=planned.problem.mesh,
            fix=_nearest(pattern, list(names)),
        )
    return list(by_name or by_module)


def _nearest(pattern: str, names: Sequence[str]) -> str:
    """Say what to write instead of a pattern that matches none of the names, which are in graph order."""
    word = pattern.strip("*")
    if word and any(word in name for name in names):
        return f"the pattern is for whole names: write '*{word}*'"
    close = difflib.get_close_matches(pattern.replace("*", ""), names, 3, cutoff=0.5)
    return f"the nearest names are {', '.join(close)}" if close else f"names are such as {', '.join(names[:3])}"


def _name(v: Vertex) -> str:
    return v.name if v.kind == "op" else v.node.meta["role"].name


def strategy_text(kind: str, strategy: Strategy) -> str:
    """Return the text of a strategy: of a parameter its layout, of an op `what it reads -> what it makes`, equal
    neighbours once."""
    made = " | ".join(dict.fromkeys(x.text() for x in strategy.outputs))
    if kind != "op":
        return made + " on the host" * strategy.on_host
    read = [text for text, _ in itertools.groupby(x.text() for x in strategy.inputs)]
    return f"{', '.join(read)} -> {made}" if read else made


class _Explainer:
    def __init__(
        self, planned: Planned, classes: list[int], alternatives: int, report: Callable[[str], None] = lambda text: None
    ):
        self.planned, self.classes, self.alternatives, self.report = planned, classes, alternatives, report
        self.problem, self.evaluation = planned.problem, planned.evaluation
        self.restriction, self.pins = planned.chosen.restriction, dict(planned.options.pin)
        self.allowed = planned.solver.allowed(self.restriction, self.pins)
        self.chosen = {cls: self.evaluation.choice[cls] for cls in self.problem.classes}
        self.solver = self._solver(planned.solver.limit_bytes)
        self.roomy = self._without_limit()

    def choices(self) -> Iterator[Choice]:
        """Iterate over the decisions of the classes, each with its alternatives, the fastest first and those that do
        not fit last."""
        rank = self.ranks()
        for cls in self.classes:
            v, options = self.problem.vertices[cls], self.problem.classes[cls]
            taken = Counter(self.evaluation.choice[m] for m in options.members)
            others = [
                k
                for k in np.argsort(rank[cls], kind="stable").tolist()
                if k not in taken and math.isfinite(rank[cls][k])
            ]
            candidates = tuple(sorted((self._instead(cls, k) for k in others[: self.alternatives]), key=_by_seconds))
            texts = {k: strategy_text(v.kind, options.strategies[k]) for k in taken}
            chosen = " or ".join(
                texts[k] + (f" ({n} of them)" if len(taken) > 1 else "") for k, n in sorted(taken.items())
            )
            reader = v if v.kind == "op" else self._first_reader(cls)
            yield Choice(
                v.kind,
                _name(v),
                options.copies,
                tuple(v.values[0].shape),
                module_of(v),
                reader.node.meta.get("source") or "" if reader else "",
                chosen,
                self._binding(cls, taken),
                candidates,
                len(others) - len(candidates),
                attention_text(v.node) if v.kind == "op" else "",
                scheme_text(self.problem, self.evaluation, v),
            )

    def _solver(self, limit_bytes: float) -> Solver:
        """Make another solver, whose searches are short."""
        search = self.planned.options.search
        search = replace(search, gap=max(search.gap, TRIED_GAP), rounds=ROUNDS, largest_program=0)
        overlap = self.planned.solver.free.overlap
        return Solver(self.problem, self.planned.pricer, limit_bytes, search, overlap=overlap)

    def _without_limit(self) -> Outcome | None:
        """Return the plan that would be the fastest if memory were no matter, or None unless it is faster than the
        chosen one and needs more memory than there is."""
        limit = self.planned.solver.limit_bytes
        found = self._solver(limit * FAR_MORE).solve(self.restriction, self.pins, [self.chosen])
        found = with_loops(found, self.planned.options)
        is_faster = found.seconds < self.planned.chosen.seconds * (1 - 1e-6)
        return found if is_faster and found.evaluation.bytes_ > limit else None

    def ranks(self) -> dict[int, np.ndarray]:
        """Return by class and strategy about how much more a plan with it costs than the best; it is infinite for
        strategies that are not to be tried."""
        free = dict(self.allowed)
        for cls in self.classes:
            if free[cls].sum() == 1 or self._pins(cls):  # a pin or a recipe decided: the alternatives are outside of it
                free[cls] = np.ones(len(free[cls]), bool)
        price = self.solver.free.byte_seconds
        if self.roomy:
            e, roomy = self.evaluation, self.roomy.evaluation
            price = max(price, (e.seconds - roomy.seconds) / max(roomy.bytes_ - e.bytes_, 1.0))
        prices = replace(self.solver.free, byte_seconds=price, saved=bool(self.roomy))
        dual = Dual(self.problem, self.solver.hyperedges, free, prices, self.restriction.keep)
        for _ in range(SWEEPS):
            dual.sweep(True)
            dual.sweep(False)
        _, reduced = dual.reduced_costs()
        ranks = {}
        for cls in self.classes:
            i = dual.position[cls]
            ranks[cls] = np.full(len(free[cls]), np.inf)
            ranks[cls][dual.index[i]] = reduced[i]
        return ranks

    def _instead(self, cls: int, k: int) -> Instead:
        text = strategy_text(self.problem.vertices[cls].kind, self.problem.classes[cls].strategies[k])
        self.report(f"{_name(self.problem.vertices[cls])} as {text}")
        required, starts = replace(self.restriction, required=((cls, k),)), [self.chosen | {cls: k}]
        try:
            outcome = with_loops(self.solver.solve(required, self.pins, starts), self.planned.options)
        except MemoryInfeasibleError:
            return Instead(text, False)
        found = outcome.evaluation
        (compute, here, all_), (compute_now, here_now, all_now) = (
            self._parts(cls, found),
            self._parts(cls, self.evaluation),
        )
        return Instead(
            text,
            True,
            outcome.seconds,
            compute - compute_now,
            here - here_now,
            (all_ - here) - (all_now - here_now),
            outcome.hidden_seconds - self.planned.chosen.hidden_seconds,
            found.bytes_ - self.evaluation.bytes_,
        )

    def _parts(self, cls: int, e: Evaluation) -> tuple[float, float, float]:
        """Return the seconds of compute, of communication at a class, and of all communication."""
        return (
            e.compute_seconds + e.recompute_seconds + e.parameter_seconds,
            self._here(cls, e),
            e.communication_seconds,
        )

    def _here(self, cls: int, e: Evaluation) -> float:
        """Return the seconds of communication of the tensors that the members of a class make or read."""
        members = set(self.problem.classes[cls].members)
        return sum(
            t.alone_seconds * t.copies
            for t in e.every_transfer
            if t.producer in members or not members.isdisjoint(t.consumers)
        )

    def _binding(self, cls: int, taken: Counter) -> str:
        """Say what keeps a choice from being another."""
        v, options = self.problem.vertices[cls], self.problem.classes[cls]
        if pins := self._pins(cls):
            return f"pinned by {' and '.join(pins)}"
        if len(options.strategies) == 1:
            return "there is nothing else to choose"
        if self.allowed[cls].sum() == 1:
            return (
                f"strategy {self.restriction.name}"
                if not self.restriction.forbidden
                else "everything else is ruled out"
            )
        if self.roomy and (k := self.roomy.evaluation.choice[cls]) not in taken:
            return f"memory limit, without it {strategy_text(v.kind, options.strategies[k])}"
        return "none, it is the fastest" + (
            "" if self.restriction.name == "auto" else f" of strategy {self.restriction.name}"
        )

    def _pins(self, cls: int) -> list[str]:
        v = self.problem.vertices[cls]
        return [
            f"{glob}={text}"
            for glob, text in self.pins.items()
            if v.kind != "op" and fnmatch.fnmatchcase(_name(v), glob)
        ]

    def _first_reader(self, cls: int) -> Vertex | None:
        readers = [u.consumer for u in self.problem.uses if u.producer == cls]
        return next((self.problem.vertices[r] for r in sorted(readers) if self.problem.vertices[r].kind == "op"), None)


def _by_seconds(instead: Instead) -> tuple:
    return (not instead.fits, instead.step_seconds if instead.fits else 0.0, instead.text)
