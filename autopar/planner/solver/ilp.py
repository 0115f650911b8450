"""The integer program: one strategy for every class, flows of layouts on every use, one payment for every copy.

Its sets, variables and rows are in autopar/planner/problem/__init__.py; what a copy costs comes from the modes in which
its tensor may be served (autopar/planner/objective/modes.py). A hyperedge is a tensor with all its uses; hyperedges of
one producer class with the same consumer classes are copies of each other. Only the strategies are integer: the flow
polytope is integral in all but pathological cases, so the linear relaxation is the bound that certifies the plan. At
given prices of memory and of hidden communication the program has no row that couples all classes and would break that
structure.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..objective.modes import BACKWARD, BOTH, FORWARD
from ..problem.multipliers import Prices
from ..problem.problem import Problem
from .dual import options_of, own_cost
from .hyperedges import HyperedgePrices

SCALE = 1e6  # objective in microseconds, well inside the solver's tolerances


@dataclass
class Solution:
    """Strategy of every class, objective and proven lower bound in seconds (price included)."""

    choice: dict[int, int]
    objective: float
    bound: float
    is_optimal: bool = False  # as far as a solver's gap says


class _Readers(dict):
    """The flows that read copies of a tensor in a phase: by source and target the variables of each reader, of which
    one is 1 if it reads this copy. `unmoved`: the same, with the source, of what is read as it was made."""

    def __init__(self):
        super().__init__()
        self.unmoved: list[tuple[int, list[int]]] = []

    def add(self, p: np.ndarray, q: np.ndarray, flow: np.ndarray, same_as: np.ndarray) -> None:
        """Add a reader with its flows (-1: none) from ends in the layouts `p` to ends in the layouts `q`."""
        i, j = np.nonzero(flow >= 0)
        own: dict[tuple[int, int], list[int]] = {}
        for pair, variable in zip(zip(p[i].tolist(), q[j].tolist()), flow[i, j].tolist()):
            own.setdefault(pair, []).append(variable)
        source_of = same_as.tolist()
        for pair, variables in own.items():
            if source_of[pair[1]] == pair[0]:
                self.unmoved.append((pair[0], variables))
            else:
                self.setdefault(pair, []).append(variables)


@dataclass(frozen=True)
class _Costs:
    """The cost of serving all copies of a hyperedge, with a first axis for the prices: of a copy that is made in the
    forward, in the backward, or for both, of what `retained` ones cost more than they did in the forward, and of the
    tensor itself (`base`) where it waits."""

    early: np.ndarray
    late: np.ndarray
    both: np.ndarray
    retained: np.ndarray
    base: np.ndarray

    @classmethod
    def of(
        cls, hyperedge: HyperedgePrices, prices: Sequence[Prices], keep: bool | None, reruns: Collection[int]
    ) -> _Costs:
        """Read the costs of a hyperedge off its modes: those of kept copies off the first, which may save no base, all
        others off the last, which does."""
        modes = [hyperedge.modes(p, keep, reruns) for p in prices]

        def stacked(mode: int, phases: int) -> np.ndarray:
            block = np.stack([found[mode].block[phases] for found in modes])
            return np.where(hyperedge.is_possible, block, 0.0) * hyperedge.hyperedge.copies

        early = stacked(-1, FORWARD)
        base = np.stack([found[-1].base[0] for found in modes]) * hyperedge.hyperedge.copies
        return cls(early, stacked(-1, BACKWARD), stacked(-1, BOTH), stacked(0, BOTH) - early, base)

    @property
    def has_base(self) -> bool:
        return bool(self.base.any())

    @property
    def is_the_same_for_all(self) -> bool:
        """Return whether a copy costs the same whoever reads it."""
        return not self.has_base and np.array_equal(self.early, self.late) and np.array_equal(self.early, self.both)


class Program:
    """The program for given allowed strategies (a boolean mask a class), priced in several ways at once: every variable
    has a cost for each of `prices`."""

    def __init__(
        self,
        problem: Problem,
        hyperedges: Sequence[HyperedgePrices],
        allowed: dict[int, np.ndarray],
        prices: Sequence[Prices],
        keep_parameters: bool | None = None,
        reruns: Collection[int] = (),
        most_variables: float = math.inf,
        options: Mapping[int, np.ndarray] | None = None,
    ):
        """Assemble the program. Classes of `reruns` may run again in the backward: their options are as those of Dual.
        `options`: those that are left of every class, by default all that are allowed. Beyond `most_variables` it is
        left incomplete, and of no use."""
        self.problem, self.allowed, self.prices = problem, allowed, prices
        self.keep_parameters, self.reruns = keep_parameters, frozenset(reruns)
        self._cost: list[np.ndarray] = []
        self._rows: list[np.ndarray] = []
        self._columns: list[np.ndarray] = []
        self._values: list[np.ndarray] = []
        self._low: list[np.ndarray] = []
        self._high: list[np.ndarray] = []
        self._extra: list[tuple[np.ndarray, np.ndarray]] = []  # costs added to variables that exist already
        self.variables = self.constraints = 0
        self._one_hot(options)
        self.binaries = self.variables
        left = {cls: np.isin(np.arange(len(mask)), self.index[cls] % len(mask)) for cls, mask in allowed.items()}
        for hyperedge in hyperedges:
            if self.variables > most_variables:
                break
            self._hyperedge(hyperedge.among(left))
        self.shares = self.variables  # that are no seconds

    # assembly

    def _new_variables(self, cost: np.ndarray) -> np.ndarray:
        """Add variables; `cost` has a row for each of the prices."""
        first = self.variables
        self.variables += cost.shape[1]
        self._cost.append(cost)
        return np.arange(first, self.variables)

    def _new_rows(self, count: int, low: float, high: float) -> np.ndarray:
        first = self.constraints
        self.constraints += count
        self._low.append(np.full(count, low))
        self._high.append(np.full(count, high))
        return np.arange(first, self.constraints)

    def _entries(self, rows, columns, values) -> None:
        size = max(np.size(rows), np.size(columns))
        self._rows.append(np.broadcast_to(rows, size))
        self._columns.append(np.broadcast_to(columns, size))
        self._values.append(np.broadcast_to(values, size).astype(float))

    def _at_most(self, less: Sequence[int], more: Sequence[int]) -> None:
        """Add a row: some variables are together no more than others are."""
        row = self._new_rows(1, 0.0, np.inf)
        self._entries(row, np.array(more), 1.0)
        self._entries(row, np.array(less), -1.0)

    def _one_hot(self, options: Mapping[int, np.ndarray] | None) -> None:
        self.first: dict[int, int] = {}
        self.index: dict[int, np.ndarray] = {}
        for cls in self.problem.classes:
            index = options[cls] if options else options_of(cls, self.allowed[cls], self.reruns)
            costs = [own_cost(self.problem, cls, prices, self.reruns)[index] for prices in self.prices]
            variables = self._new_variables(np.stack(costs))
            self.first[cls], self.index[cls] = int(variables[0]), index
            self._entries(self._new_rows(1, 1.0, 1.0), variables, 1.0)

    def _ends(self, cls: int, layout_of: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the ends of flows at a class: their layouts, whether the class runs again, and the end of each
        option."""
        rerun, k = np.divmod(self.index[cls], len(layout_of))
        ends, end_of = np.unique(layout_of[k] + rerun * (layout_of.max() + 1), return_inverse=True)
        rerun, layouts = np.divmod(ends, layout_of.max() + 1)
        return layouts, rerun, end_of

    def _flow(self, producer: int, source_of, consumer: int, target_of, possible) -> np.ndarray:
        """Add flow variables for the possible pairs of ends, and return them as an array of variable numbers (-1: no
        variable)."""
        p, q = np.nonzero(possible)
        variables = self._new_variables(np.zeros((len(self.prices), len(p))))
        for ends, at, cls, end_of in zip(possible.shape, (p, q), (producer, consumer), (source_of, target_of)):
            rows = self._new_rows(ends, 0.0, 0.0)
            self._entries(rows[at], variables, 1.0)
            self._entries(rows[end_of], self.first[cls] + np.arange(len(end_of)), -1.0)
        flow = np.full(possible.shape, -1)
        flow[p, q] = variables
        return flow

    def _hyperedge(self, priced: HyperedgePrices) -> None:
        """Add the flows of a hyperedge, and what its modes say about them."""
        hyperedge = priced.hyperedge
        p, rerun, source_of = self._ends(hyperedge.producer, priced.source_of)
        readers = {FORWARD: _Readers(), BACKWARD: _Readers()}
        for i, (cls, _, _) in enumerate(hyperedge.consumers):
            q, late, target_of = self._ends(cls, priced.target_of[i])
            flow = self._flow(hyperedge.producer, source_of, cls, target_of, priced.is_possible[np.ix_(p, q)])
            phases = priced.phases[i] | np.where(late, BACKWARD, 0)
            for phase, found in readers.items():
                found.add(p, q, np.where(phases & phase, flow, -1), priced.same_as)
        recomputed = {
            layout: (
                self.first[hyperedge.producer] + np.flatnonzero(rerun[source_of] & (p[source_of] == layout))
            ).tolist()
            for layout in p.tolist()
        }
        self._serve(_Costs.of(priced, self.prices, self.keep_parameters, self.reruns), readers, recomputed)

    def _serve(self, costs: _Costs, readers: dict[int, _Readers], recomputed: dict[int, list[int]]) -> None:
        """Add a payment for every copy. Those of the forward may be kept for the backward; what the backward makes, or
        reads as it is, it makes of the tensor itself, which is saved or `recomputed` by its producer."""
        if costs.is_the_same_for_all:
            for pair, own in readers[BACKWARD].items():
                readers[FORWARD].setdefault(pair, []).extend(own)
            self._pay_once(readers[FORWARD], costs.early)
            return
        saved: dict[int, list[int]] = {}

        def base(layout: int) -> list[int]:
            if layout not in saved:
                saved[layout] = [*self._new_variables(costs.base[:, [layout]]).tolist(), *recomputed[layout]]
            return saved[layout]

        made, redone = self._pay_once(readers[FORWARD], costs.early), {}
        for layout, own in readers[BACKWARD].unmoved if costs.has_base else ():
            self._at_most(own, base(layout))
        for pair, own in readers[BACKWARD].items():
            late, retained = (amount[:, [pair[0]], [pair[1]]] for amount in (costs.late, costs.retained))
            if not costs.has_base and (pair not in made or (retained >= late).all()):
                redone[pair] = own
                continue
            cover = self._new_variables(late).tolist()
            if costs.has_base:
                self._at_most(cover, base(pair[0]))
            if pair in made:
                if (costs.both > costs.early + costs.late)[:, pair[0], pair[1]].any():  # what is made is kept
                    self._entries(row := self._new_rows(1, -np.inf, 1.0), np.array(made[pair]), 1.0)
                    self._entries(row, np.array(cover), 1.0)
                keep = self._new_variables(retained).tolist()
                self._at_most(keep, made[pair])  # only a copy that the forward made can be kept,
                if len(readers[FORWARD][pair]) > 1:  # and it makes none that only the backward reads
                    self._at_most(made[pair], [v for reader in readers[FORWARD][pair] for v in reader])
                cover += keep
            for reader in own:
                self._at_most(reader, cover)
        self._pay_once(redone, costs.late)

    def _pay_once(self, readers: dict, cost: np.ndarray) -> dict[tuple[int, int], list[int]]:
        """Charge each copy once for all its readers: by a payment, or as part of the flow to its only reader. Return
        the variables that say whether a copy is made."""
        p, q = (np.array([pair[end] for pair in readers], int) for end in (0, 1))
        prices = cost[:, p, q]
        is_shared = np.array([len(own) > 1 for own in readers.values()], bool)
        payments = iter(self._new_variables(prices[:, is_shared]).tolist())
        paid = {pair: [next(payments)] if len(own) > 1 else own[0] for pair, own in readers.items()}
        shared = [(paid[pair][0], reader) for pair, own in readers.items() if len(own) > 1 for reader in own]
        rows = self._new_rows(len(shared), 0.0, np.inf)
        self._entries(rows, np.array([payment for payment, _ in shared], int), 1.0)
        self._entries(
            np.repeat(rows, [len(reader) for _, reader in shared]),
            np.array([v for _, reader in shared for v in reader], int),
            -1.0,
        )
        alone = [(v, i) for i, own in enumerate(readers.values()) if len(own) == 1 for v in own[0]]
        self._extra.append((np.array([v for v, _ in alone], int), prices[:, [i for _, i in alone]]))
        return paid

    # solving

    def limit(self, amounts: np.ndarray, most: float) -> None:
        """Add a row: by these amounts of the variables, no more than `most` in all."""
        columns = np.flatnonzero(amounts)
        self._entries(self._new_rows(1, -np.inf, most), columns, amounts[columns])

    def costs(self) -> np.ndarray:
        """Return the cost of every variable, in a row for each of the prices."""
        costs = np.concatenate(self._cost, axis=1)
        for variables, prices in self._extra:
            costs[:, variables] += prices
        return costs

    def busiest(self, base: np.ndarray, beyond: np.ndarray, spans: Sequence[Sequence[int]]) -> np.ndarray:
        """Let every span take as long as its busiest stream: what the rows of `beyond` that are the span's cost more
        than `base`, if anything. Return the costs with those of the new variables."""
        for rows in spans:
            more = self._new_variables(np.ones((len(self.prices), 1)))
            for stream in rows:
                row, columns = self._new_rows(1, 0.0, np.inf), np.flatnonzero(beyond[stream])
                self._entries(row, more, 1.0)
                self._entries(row, columns, -beyond[stream][columns])
        return np.concatenate([base, np.ones(len(spans))])

    def solve(
        self,
        seconds_limit: float,
        relative_gap: float = 1e-4,
        relax: bool = False,
        costs: np.ndarray | None = None,
        most_nodes: int | None = None,
    ) -> Solution | None:
        """Minimize `costs`, by default those at the first prices: return what is optimal within `relative_gap`, or the
        best found in the time or with so many nodes of the branching; None if nothing was found. The result is
        deterministic but for the time limit: one thread, fixed seed."""
        from ortools.math_opt import model_pb2
        from ortools.math_opt.python import mathopt
        from ortools.math_opt.solvers import highs_pb2

        cost = (self.costs()[0] if costs is None else costs) * SCALE
        rows, columns = np.concatenate(self._rows), np.concatenate(self._columns)
        values = np.concatenate(self._values)
        rows, columns, values = _summed(rows, columns, values, self.variables)
        model = model_pb2.ModelProto()
        model.variables.ids.extend(range(self.variables))
        model.variables.lower_bounds.extend([0.0] * self.variables)
        model.variables.upper_bounds.extend(np.where(np.arange(self.variables) < self.shares, 1.0, np.inf).tolist())
        model.variables.integers.extend([not relax and i < self.binaries for i in range(self.variables)])
        nonzero = np.flatnonzero(cost)
        model.objective.linear_coefficients.ids.extend(nonzero.tolist())
        model.objective.linear_coefficients.values.extend(cost[nonzero].tolist())
        model.linear_constraints.ids.extend(range(self.constraints))
        model.linear_constraints.lower_bounds.extend(np.concatenate(self._low).tolist())
        model.linear_constraints.upper_bounds.extend(np.concatenate(self._high).tolist())
        model.linear_constraint_matrix.row_ids.extend(rows.tolist())
        model.linear_constraint_matrix.column_ids.extend(columns.tolist())
        model.linear_constraint_matrix.coefficients.extend(values.tolist())
        nodes = {} if most_nodes is None else {"mip_max_nodes": most_nodes}
        parameters = mathopt.SolveParameters(
            time_limit=datetime.timedelta(seconds=seconds_limit),
            relative_gap_tolerance=None if relax else relative_gap,
            random_seed=0,
            highs=highs_pb2.HighsOptionsProto(  # one thread; restarts at the root search again what was found there
                string_options={"parallel": "off"}, int_options=nodes, bool_options={"mip_allow_restart": False}
            ),
        )
        result = mathopt.solve(mathopt.Model.from_model_proto(model), mathopt.SolverType.HIGHS, params=parameters)
        if not result.has_primal_feasible_solution():
            return None
        x = np.zeros(self.variables)
        for variable, value in result.variable_values().items():
            x[variable.id] = value
        choice = {}
        for cls, index in self.index.items():
            choice[cls] = int(index[np.argmax(x[self.first[cls] : self.first[cls] + len(index)])])
        bound = result.termination.objective_bounds.dual_bound / SCALE
        is_optimal = result.termination.reason == mathopt.TerminationReason.OPTIMAL
        return Solution(choice, result.objective_value() / SCALE, bound, is_optimal)


def flows_of(hyperedges: Sequence[HyperedgePrices], options: Mapping[int, np.ndarray]) -> int:
    """Return about how many variables a program of these options by class has: a flow for each pair of layouts of every
    use."""
    total = sum(map(len, options.values()))
    for priced in hyperedges:
        of, hyperedge = priced.source_of, priced.hyperedge
        sources = _count(options[hyperedge.producer], of)
        total += sum(
            sources * _count(options[cls], target) for (cls, _, _), target in zip(hyperedge.consumers, priced.target_of)
        )
    return total


def _count(options: np.ndarray, layout_of: np.ndarray) -> int:
    rerun, k = np.divmod(options, len(layout_of))
    return len(set((layout_of[k] + rerun * (layout_of.max() + 1)).tolist()))


def _summed(rows, columns, values, width):
    """Sort entries by row, then column, and add up those of one place; what adds up to 0 is left out."""
    key = rows * width + columns
    order = np.argsort(key, kind="stable")
    key, values = key[order], values[order]
    first = np.flatnonzero(np.r_[True, key[1:] != key[:-1]])
    total = np.add.reduceat(values, first)
    keep = total != 0
    return key[first][keep] // width, key[first][keep] % width, total[keep]
