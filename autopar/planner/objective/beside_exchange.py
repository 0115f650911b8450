"""Decide which products of a finished plan are computed while rows of experts travel.

An exchange of rows starts, and is waited for where its rows are first read. A product that neither makes these rows nor
reads them may run in between: those of shared experts, which read the same tokens, and gradients of weights. The
exchange of a layer that has least to choose from chooses first: the nearest products, with what has to move along,
until what it has beside it takes as long as the rows do. Products stay in their layer, what is computed again and
products of loops stay where they are, and an exchange that is all latency is left alone.

The plan is searched for without this. The seconds of the link are then hidden instead of waited for, from the first op
beside the exchange on, so that the played step has the exchange as it runs; the bound is of plans without it. What an
exchange fills is in memory from its start on. Where that is too much, exchanges that are on their way when memory is
short are waited for at once. Only where collectives run beside compute.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from torch import fx

from ...cost.exchange import exchange_axes, is_all_latency, link_seconds
from ...cost.expert_load import sent_load_of
from ...hardware.schema import Hardware
from ...passes.distribute.heavy_ops import is_product
from ...plans.sharding import BesideExchange
from ..problem.multipliers import PHASES
from ..problem.problem import Problem
from .beside import Beside
from .evaluate import Evaluation
from .memory_timeline import LiveBytes, live_bytes
from .pricer import Pricer
from .step_order import Execution, StepOrder, moved_beside, step_order

GivenUp = Callable[[Evaluation, LiveBytes], Collection[Beside]]
MOST_GIVEN_UP = 8  # times that exchanges are given up for memory, before all are


def beside_exchanges(
    problem: Problem,
    e: Evaluation,
    pricer: Pricer,
    hardware: Hardware,
    may_move: Callable[[fx.Node, fx.Node], bool] = lambda exchange, node: True,
    order: StepOrder | None = None,
) -> tuple[Beside, ...]:
    """Return what may be beside the exchanges of a plan that has nothing there yet. `may_move`: whether the op of a
    node may be beside an exchange for another reason than order; `order`: of the step, if it is known."""
    if not e.overlap or problem.tiled:
        return ()
    order = order or step_order(problem, e)
    found: list[Beside] = []
    for _, group in groupby(zip(order.runs, order.blocks), lambda pair: (pair[0].phase, pair[1])):
        found += _Layer(problem, e, pricer, hardware, [run for run, _ in group], may_move).found()
    return tuple(found)


def exchanged_seconds(problem: Problem, e: Evaluation, pricer: Pricer, hardware: Hardware) -> float:
    """Return the seconds that rows of experts are on their way in a pass, if anything can be beside them."""
    total, mesh = 0.0, problem.mesh
    for v, copies in zip(problem.vertices, problem.copies(e.first)):
        strategy = problem.choices(v.index).strategies[e.choice[v.index]]
        if v.kind == "op" and e.overlap and exchange_axes(v.node, strategy, mesh):
            sent = sent_load_of(v.node, strategy, mesh, pricer.expert_load)
            total += sent * link_seconds(v.node, strategy, mesh, hardware) * copies
    return total


def choices_of(found: Sequence[Beside]) -> list[list[Beside]]:
    """Return what of it may be taken: all, or that of one phase alone."""
    by_phase = [[one for one in found if one.phase == phase] for phase in PHASES]
    return [[*found], *by_phase] if all(by_phase) else [[*found]] if found else []


def with_beside(e: Evaluation, found: Sequence[Beside]) -> Evaluation:
    """Return a plan with these beside its exchanges and nothing else."""
    compute = dict(e.compute)
    for some, sign in ((e.beside, 1), (found, -1)):
        for one in some:
            compute[one.phase] += sign * one.seconds * one.copies
    return replace(e, compute=compute, beside=tuple(found))


def fitted(
    problem: Problem, e: Evaluation, found: Sequence[Beside], pricer: Pricer, given_up: GivenUp
) -> Evaluation | None:
    """Return a plan with as much of `found` beside its exchanges as fits, None if nothing does. `given_up`: what of it
    a plan with such a memory gives up, nothing if it fits."""
    left = [*found]
    for _ in range(MOST_GIVEN_UP):
        if not left:
            break
        tried = with_beside(e, left)
        live = live_bytes(problem, tried, pricer)
        if not (more := given_up(tried, live)):
            return replace(tried, uncharged_bytes=live.peak_bytes - tried.charged_bytes)
        left = [one for one in left if one not in more]
    return None


def like_those_at(problem: Problem, some: Sequence[Beside], full: int) -> list[Beside]:
    """Return the exchanges that are of a class with one that is on its way while the op of a vertex runs; all if none
    is."""
    at_work = {problem.vertices[one.vertex].cls for one in some if full in (one.vertex, *one.ops)}
    return [one for one in some if problem.vertices[one.vertex].cls in at_work] or [*some]


def exchanges_of(problem: Problem, e: Evaluation) -> tuple[BesideExchange, ...]:
    """Return what is beside exchanges in a plan of the whole graph, as the lowering reads it."""

    def name(vertex: int) -> str:
        return problem.vertices[vertex].node.name

    return tuple(BesideExchange(name(one.vertex), tuple(map(name, one.products))) for one in e.beside if one.products)


@dataclass
class _Travelling:
    """An exchange whose rows take `seconds` on the link of a `stream`, and what is beside it."""

    run: Execution
    seconds: float
    stream: int
    products: list[Execution] = field(default_factory=list)
    beside: set[Execution] = field(default_factory=set)
    covered: float = 0.0


class _Layer:
    """The ops of a layer in one phase, in the order in which they run."""

    def __init__(
        self,
        problem: Problem,
        e: Evaluation,
        pricer: Pricer,
        hardware: Hardware,
        runs: list[Execution],
        may_move: Callable[[fx.Node, fx.Node], bool],
    ):
        self.problem, self.e, self.pricer, self.hardware, self.runs = problem, e, pricer, hardware, runs
        self.may_move = may_move
        self.exchanges = [one for run in runs if (one := self._travelling(run)) is not None]
        self.moved: dict[Execution, _Travelling] = {}
        self.at: dict[Execution, int] = {}  # where each op runs with what is beside exchanges so far

    def _travelling(self, run: Execution) -> _Travelling | None:
        """Return an op as an exchange; None for any other, or one that is not worth it."""
        v, mesh = self.problem.vertices[run.vertex], self.problem.mesh
        strategy = self.problem.choices(run.vertex).strategies[self.e.choice[run.vertex]]
        axes = exchange_axes(v.node, strategy, mesh)
        if not axes or run.recomputed or is_all_latency(v.node, strategy, mesh, self.hardware):
            return None
        sent = sent_load_of(v.node, strategy, mesh, self.pricer.expert_load)
        seconds = sent * link_seconds(v.node, strategy, mesh, self.hardware)
        return _Travelling(run, seconds, self.pricer.prices.stream_of("all_to_all", axes))

    def found(self) -> Iterator[Beside]:
        """Iterate over the exchanges that have something beside them."""
        if not self.exchanges:
            return
        self._read()
        self.at = self.place
        candidates = [(one, self._nearest(one)) for one in self.exchanges]
        for one, products in sorted(candidates, key=lambda pair: self._choice(*pair)):
            for product in products:
                if one.covered < one.seconds and product not in self.moved:
                    self._take(one, product)
        copies = self.problem.copies(self.e.first)
        for one in self.exchanges:
            if one.beside:
                ops = tuple(run.vertex for run in self.runs if run in one.beside)
                drivers = tuple(run.vertex for run in self.runs if run in one.products)
                v = one.run.vertex
                yield Beside(v, one.run.phase, one.seconds, one.stream, ops, drivers, copies[v])

    def _nearest(self, one: _Travelling) -> list[Execution]:
        """Return the products of the layer that neither make rows nor read them, the nearest first."""
        around = _reached(one.run, self.reads) | _reached(one.run, self.readers)
        found = [run for run in self.runs if is_product(self.problem.vertices[run.vertex].node) and run not in around]
        return sorted(found, key=lambda run: abs(self.place[run] - self.place[one.run]))

    def _choice(self, one: _Travelling, products: Sequence[Execution]) -> tuple[float, int]:
        """Return how much an exchange has to choose from, and of as much how far that is."""
        apart = [abs(self.place[run] - self.place[one.run]) for run in products[:1]]
        return sum(map(self._seconds, products)), sum(apart)

    def _read(self) -> None:
        """Find out which ops of the layer each one reads, and by which it is read."""
        here = self.place = {run: i for i, run in enumerate(self.runs)}
        self.reads: dict[Execution, list[Execution]] = {run: [] for run in self.runs}
        self.readers: dict[Execution, list[Execution]] = {run: [] for run in self.runs}
        for run in self.runs:
            for p, _ in self.problem.vertices[run.vertex].inputs:
                again, first = Execution(p, "backward", True), Execution(p, run.phase)
                if (made := again if again in here else first) in here and made != run:
                    self.reads[run].append(made)
                    self.readers[made].append(run)
        self.stays = {v for t in self.e.transfers if t.looped for v in (t.producer, *t.consumers)}

    def _take(self, one: _Travelling, product: Execution) -> None:
        """Put a product beside an exchange, if it may be there, with the ops between that it reads or that read it."""
        place = self.at
        if place[product] > place[one.run]:
            along = _reached(product, self.reads, lambda run: place[run] >= place[one.run])
        else:
            along = _reached(product, self.readers, lambda run: place[run] <= place[one.run])
        along -= one.beside
        if one.run in along or not all(self._may_move(one, run) for run in along):
            return
        one.products.append(product)
        one.beside |= along
        one.covered += sum(self._seconds(run) for run in along)
        self.moved |= dict.fromkeys(along, one)
        self.at = {run: i for i, run in enumerate(self.order())}

    def order(self) -> list[Execution]:
        """Return the ops in the order in which they run with what is beside exchanges so far."""
        return moved_beside(self.runs, {one.run: [r for r in self.runs if r in one.beside] for one in self.exchanges})

    def _may_move(self, one: _Travelling, run: Execution) -> bool:
        v, strategies = self.problem.vertices[run.vertex], self.problem.choices(run.vertex).strategies
        is_free = not run.recomputed and run.vertex not in self.stays and run not in self.moved
        is_exchange = bool(exchange_axes(v.node, strategies[self.e.choice[run.vertex]], self.problem.mesh))
        return is_free and not is_exchange and self.may_move(self.problem.vertices[one.run.vertex].node, v.node)

    def _seconds(self, run: Execution) -> float:
        return float(self.problem.choices(run.vertex).seconds[self.e.choice[run.vertex]])


def _reached(
    first: Execution,
    following: dict[Execution, list[Execution]],
    is_near: Callable[[Execution], bool] = lambda run: True,
) -> set[Execution]:
    """Return what is reached from an op, itself included, through ops that are near."""
    found, left = {first}, [first]
    while left:
        for run in following[left.pop()]:
            if run not in found and is_near(run):
                found.add(run)
                left.append(run)
    return found
