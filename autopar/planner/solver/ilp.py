"""The integer program: one strategy for every class, flows of layouts on every use, one payment for every
redistribution.

For classes v with strategies k (x one-hot) and uses e = (tensor u -> consumer v) with flows y_e[p, q] >= 0 over the
layouts p that u may come out in and q that v may want:

    min   sum copies_v (seconds_{v,k} + price * bytes_{v,k}) x_{v,k}  +  sum_hubs copies * (payments)
    s.t.  sum_k x_{v,k} = 1                              -> Program._one_hot
          sum_q y_e[p, q] = sum_{k: out(k) = p} x_{u,k}  -> Program._flow
          sum_p y_e[p, q] = sum_{k: in_e(k) = q} x_{v,k} -> Program._flow
          y_e[p, q] <= z[p, q]                           one payment for all uses of a hub        -> Program._pay_once
          y_e[p, q] <= b[p, q] + k[p, q], k <= f         made again in the backward, or kept      -> Program._keep_or_redo
          f[p, q] <= sum of the forward's y_e[p, q]      only what the forward reads is kept      -> Program._keep_or_redo
          y_e[p, p] <= s[p], b[p, q] <= s[p]             what the backward reads must be saved    -> Program._keep_or_redo

A hub is a tensor with all its uses; hubs of one producer class with the same consumer classes are copies of each other.
Only x is integer: the flow polytope is integral in all but pathological cases, so the linear relaxation is the bound
that certifies the plan. Memory enters as a price per byte (Lagrange), so the program has no coupling row that would
break that structure.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..problem.multipliers import Prices
from ..problem.problem import Problem
from .dual import own_cost
from .hyperedges import Hub, HubPrices

SCALE = 1e6  # objective in microseconds, well inside the solver's tolerances


@dataclass
class Solution:
    """Strategy of every class, objective and proven lower bound in seconds (price included)."""

    choice: dict[int, int]
    objective: float
    bound: float


class Program:
    """Assembles and solves the program for given allowed strategies (a boolean mask a class)."""

    def __init__(
        self,
        problem: Problem,
        hubs: Sequence[HubPrices],
        allowed: dict[int, np.ndarray],
        prices: Prices,
        keep_parameters: bool | None = None,
    ):
        self.problem, self.allowed, self.prices, self.keep_parameters = problem, allowed, prices, keep_parameters
        self._cost: list[np.ndarray] = []
        self._rows: list[np.ndarray] = []
        self._columns: list[np.ndarray] = []
        self._values: list[np.ndarray] = []
        self._low: list[np.ndarray] = []
        self._high: list[np.ndarray] = []
        self._extra: list[tuple[int, float]] = []  # seconds added to variables that exist already
        self.variables = self.constraints = 0
        self._one_hot()
        self.binaries = self.variables
        for hub in hubs:
            self._hub(hub)

    # assembly

    def _new_variables(self, cost: np.ndarray) -> np.ndarray:
        first = self.variables
        self.variables += len(cost)
        self._cost.append(np.asarray(cost, float))
        return np.arange(first, self.variables)

    def _new_rows(self, count: int, low: float, high: float) -> np.ndarray:
        first = self.constraints
        self.constraints += count
        self._low.append(np.full(count, low))
        self._high.append(np.full(count, high))
        return np.arange(first, self.constraints)

    def _entries(self, rows, columns, value: float) -> None:
        size = max(np.size(rows), np.size(columns))
        self._rows.append(np.broadcast_to(rows, size))
        self._columns.append(np.broadcast_to(columns, size))
        self._values.append(np.full(size, value))

    def _one_hot(self) -> None:
        self.first: dict[int, int] = {}
        self.index: dict[int, np.ndarray] = {}
        for cls in self.problem.classes:
            index = np.flatnonzero(self.allowed[cls])
            variables = self._new_variables(own_cost(self.problem, cls, self.prices)[index])
            self.first[cls], self.index[cls] = int(variables[0]), index
            self._entries(self._new_rows(1, 1.0, 1.0), variables, 1.0)

    def _flow(self, producer: int, sources, source_of, consumer: int, targets, target_of, possible) -> np.ndarray:
        """Add flow variables for the possible pairs, and return them as an array of variable numbers (-1: no
        variable)."""
        p, q = np.nonzero(possible)
        variables = self._new_variables(np.zeros(len(p)))
        rows = self._new_rows(len(sources), 0.0, 0.0)
        self._entries(rows[p], variables, 1.0)
        self._entries(rows[source_of], self.first[producer] + np.arange(len(source_of)), -1.0)
        rows = self._new_rows(len(targets), 0.0, 0.0)
        self._entries(rows[q], variables, 1.0)
        self._entries(rows[target_of], self.first[consumer] + np.arange(len(target_of)), -1.0)
        flow = np.full(possible.shape, -1)
        flow[p, q] = variables
        return flow

    def _hub(self, priced: HubPrices) -> None:
        hub, prices = priced.hub, self.prices
        sources, source_of = np.unique(priced.source_of[self.index[hub.producer]], return_inverse=True)
        flows = {"forward": [], "backward": []}
        for i, (cls, _, phase) in enumerate(hub.consumers):
            targets, target_of = np.unique(priced.target_of[i][self.index[cls]], return_inverse=True)
            seconds = priced.once[np.ix_(sources, targets)] * (prices.hidden(phase) if priced.is_hidden else 1.0)
            possible = priced.is_possible[np.ix_(sources, targets)]
            flow = self._flow(hub.producer, sources, source_of, cls, targets, target_of, possible)
            same = priced.same_as[targets][None, :] == sources[:, None]
            i, j = np.nonzero(flow >= 0)
            columns = (sources[i], targets[j], same[i, j], flow[i, j], seconds[i, j])
            flows[phase] += zip(*(column.tolist() for column in columns))
        is_once = priced.gathers_once and self.keep_parameters is not False
        if is_once or prices.saved and priced.is_saved and flows["backward"]:
            self._keep_or_redo(priced, flows)
        elif priced.is_parameter and self.keep_parameters is False:
            self._pay_once(hub, flows["forward"])
            self._pay_once(hub, flows["backward"])
        else:
            self._pay_once(hub, flows["forward"] + flows["backward"])

    def _grouped(self, flows) -> dict[tuple, tuple[float, list[int]]]:
        """Group flow variables by (source, target) where something must be moved, with the seconds of the move."""
        groups: dict[tuple, tuple[float, list[int]]] = {}
        for p, q, same, variable, seconds in flows:
            if not same:
                groups.setdefault((p, q), (seconds, []))[1].append(variable)
        return groups

    def _pay_once(self, hub: Hub, flows) -> dict[tuple, int]:
        """Add a payment variable per (source, target), or charge the flow itself where it is the only one. Return those
        variables."""
        paid = {}
        groups = self._grouped(flows)
        shared = {pair: g for pair, g in groups.items() if len(g[1]) > 1}
        for pair, (seconds, variables) in groups.items():
            if pair not in shared:
                self._extra.append((variables[0], seconds * hub.copies))
                paid[pair] = variables[0]
        if shared:
            payments = self._new_variables(np.array([s * hub.copies for s, _ in shared.values()]))
            sharers = np.concatenate([variables for _, variables in shared.values()])
            rows = self._new_rows(len(sharers), 0.0, np.inf)
            self._entries(rows, np.repeat(payments, [len(variables) for _, variables in shared.values()]), 1.0)
            self._entries(rows, sharers, -1.0)
            paid |= zip(shared, payments.tolist())
        return paid

    def _keep_or_redo(self, priced: HubPrices, flows) -> None:
        """Add what decides about a forward tensor that the backward reads: copies kept or made again, base saved or
        not, at the price of memory. A copy that all passes share takes 1 / m of its seconds in each; where that spares
        more than keeping it costs, it is kept for the forward alone already."""
        hub, is_parameter = priced.hub, priced.is_parameter
        price = self.prices.byte_seconds * hub.copies if self.prices.saved else 0.0
        early = {pair: seconds for pair, (seconds, _) in self._grouped(flows["forward"]).items()}
        more = {(p, q): price * priced.held_bytes[q] for p, q in early}  # what keeping a copy costs
        if priced.gathers_once and self.keep_parameters is not False:
            more = {
                pair: m - early[pair] * hub.copies * (1 - 1 / priced.pricer.micro_batches) for pair, m in more.items()
            }
            at_once = {pair: m for pair, m in more.items() if m <= 0 or self.keep_parameters}
            flows["forward"] = [(p, q, same, variable, s + at_once.get((p, q), 0.0) / hub.copies)
                                for p, q, same, variable, s in flows["forward"]]  # fmt: skip
            more |= dict.fromkeys(at_once, 0.0)
        made = self._pay_once(hub, flows["forward"])
        readers = self._grouped(flows["forward"])
        base: dict = {}

        def base_of(p) -> int | None:
            if is_parameter:
                return None
            if p not in base:
                base[p] = int(self._new_variables(np.array([price * priced.base_bytes[p]]))[0])
            return base[p]

        for p, _, same, variable, _ in flows["backward"]:
            if same and not is_parameter:
                row = self._new_rows(1, 0.0, np.inf)
                self._entries(row, np.array([base_of(p)]), 1.0)
                self._entries(row, np.array([variable]), -1.0)
        for (p, q), (seconds, variables) in self._grouped(flows["backward"]).items():
            redo = int(self._new_variables(np.array([seconds * hub.copies]))[0])
            cover = [redo]
            may_keep = not (is_parameter and self.keep_parameters is False)
            if (p, q) in made and may_keep:
                keep = int(self._new_variables(np.array([more[p, q]]))[0])
                row = self._new_rows(1, 0.0, np.inf)  # only a copy that the forward made can be kept
                self._entries(row, np.array([made[p, q]]), 1.0)
                self._entries(row, np.array([keep]), -1.0)
                cover.append(keep)
                if len(readers[p, q][1]) > 1:  # and it makes none that only the backward reads
                    row = self._new_rows(1, 0.0, np.inf)
                    self._entries(row, np.array(readers[p, q][1]), 1.0)
                    self._entries(row, np.array([made[p, q]]), -1.0)
                if is_parameter and self.keep_parameters:  # what the forward made is kept, not made again
                    row = self._new_rows(1, -np.inf, 1.0)
                    self._entries(row, np.array([made[p, q]]), 1.0)
                    self._entries(row, np.array([redo]), 1.0)
            rows = self._new_rows(len(variables), 0.0, np.inf)
            for variable in cover:
                self._entries(rows, variable, 1.0)
            self._entries(rows, np.array(variables), -1.0)
            if base_of(p) is not None:
                row = self._new_rows(1, 0.0, np.inf)
                self._entries(row, np.array([base_of(p)]), 1.0)
                self._entries(row, np.array([redo]), -1.0)

    # solving

    def solve(self, seconds_limit: float, relative_gap: float = 1e-4, relax: bool = False) -> Solution | None:
        """Solve the program: return what is optimal within `relative_gap`, or the best found in the time; None if
        nothing was found. The result is deterministic but for the time limit: one thread, fixed seed."""
        from ortools.math_opt import model_pb2
        from ortools.math_opt.python import mathopt

        cost = np.concatenate(self._cost)
        for variable, seconds in self._extra:
            cost[variable] += seconds
        cost *= SCALE
        rows, columns = np.concatenate(self._rows), np.concatenate(self._columns)
        values = np.concatenate(self._values)
        rows, columns, values = _summed(rows, columns, values, self.variables)
        model = model_pb2.ModelProto()
        model.variables.ids.extend(range(self.variables))
        model.variables.lower_bounds.extend([0.0] * self.variables)
        model.variables.upper_bounds.extend([1.0] * self.variables)
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
        parameters = mathopt.SolveParameters(
            time_limit=datetime.timedelta(seconds=seconds_limit),
            relative_gap_tolerance=None if relax else relative_gap,
            random_seed=0,
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
        return Solution(choice, result.objective_value() / SCALE, bound)


def _summed(rows, columns, values, width):
    """Sort entries by row, then column, and add up those of one place; what adds up to 0 is left out."""
    key = rows * width + columns
    order = np.argsort(key, kind="stable")
    key, values = key[order], values[order]
    first = np.flatnonzero(np.r_[True, key[1:] != key[:-1]])
    total = np.add.reduceat(values, first)
    keep = total != 0
    return key[first][keep] // width, key[first][keep] % width, total[keep]
