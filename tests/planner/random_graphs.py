"""Small random graphs whose plans can all be listed: what the search is held against."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import fx, nn

from autopar.frontend.export import Captured
from autopar.ir.graph import OutputRole, Role
from autopar.planner.problem.multipliers import Prices
from autopar.planner.solver.dual import Dual, own_cost
from autopar.planner.solver.hyperedges import HyperedgePrices, served
from autopar.planner.solver.ilp import Program
from autopar.planner.solver.minimize import Search

from .planning import Instance, toy

aten, autopar = torch.ops.aten, torch.ops.autopar
UNARY = (aten.relu.default, aten.t.default, aten.neg.default)
BINARY = (aten.mm.default, autopar.linear.default, aten.add.Tensor, aten.mul.Tensor)
PRICES = [  # and whether gathered parameters are kept
    (Prices(), None), (Prices(1e-9, True), None), (Prices(1e-7, True), None), (Prices(1e-9), False),
    (Prices(1e-8, True), False), (Prices(1e-8, True), True), (Prices(1e-8, True, 0.0, 0.9,
                                                                     ((0.3,), (0.8,))), None),
]  # fmt: skip
MESHES = ["a=2", "a=4", "a=2,b=2"]
SWEEPS = 60
WAITING = toy(latency=1e-6, launch=1e-7)  # latency and launches, so that few large steps can beat many small ones


class _Matrices:
    """A joint graph on square matrices in the making."""

    def __init__(self, size: int):
        self.graph, self.size = fx.Graph(), size

    def leaf(self, name: str, role: Role) -> fx.Node:
        return self._described(self.graph.placeholder(name), role=role, phase="forward")

    def op(self, phase: str, target, *args: fx.Node) -> fx.Node:
        return self._described(self.graph.call_function(target, args), phase=phase)

    def _described(self, node: fx.Node, **meta) -> fx.Node:
        node.meta |= dict(val=torch.empty(self.size, self.size, device="meta"), module="", source="", **meta)
        return node

    def captured(self, output: fx.Node, gradient: fx.Node) -> Captured:
        self.graph.output((output, gradient)).meta["roles"] = [OutputRole("output", "0"), OutputRole("gradient", "w0")]
        return Captured(fx.GraphModule(nn.Module(), self.graph), None, None, {})


def random_graph(rng: random.Random, most_nodes: int = 8) -> Captured:
    """A joint graph of 4 to `most_nodes` nodes: an input, one or two parameters, ops of both phases of which the last
    gives the gradient of the first parameter, and what the forward ends with as an output."""
    made = _Matrices(rng.choice([4, 7, 8]))  # 7 is cut unevenly

    def op(phase: str) -> fx.Node:
        target = rng.choice(UNARY + 2 * BINARY)
        fresh = [n for n in values if not n.users] or values
        first = rng.choice(fresh if rng.random() < 0.7 else values)
        return made.op(phase, target, *((first, rng.choice(values)) if target in BINARY else (first,)))

    values = [made.leaf("x", Role("input", "0"))]
    values += [made.leaf(f"w{i}", Role("parameter", f"w{i}", trainable=i == 0)) for i in range(rng.randint(1, 2))]
    ops = rng.randint(2, most_nodes - len(values))
    forward = rng.randint(1, ops - 1)
    for i in range(ops):
        values.append(op("forward" if i < forward else "backward"))
    return made.captured(values[-1 - ops + forward], values[-1])


def read_often(rng: random.Random) -> Captured:
    """A chain of ops that all read one parameter: more of them than a factor of the dual has consumers."""
    made = _Matrices(8)
    value, weight = made.leaf("x", Role("input", "0")), made.leaf("w0", Role("parameter", "w0", trainable=True))
    for _ in range(rng.randint(2, 3)):
        output = value = made.op("forward", rng.choice(BINARY[:3]), value, weight)
    for _ in range(3):
        value = made.op("backward", rng.choice(BINARY[:3]), value, weight)
    return made.captured(output, value)


def thinned(instance: Instance, rng: random.Random, most: int) -> dict[int, np.ndarray]:
    """Masks that leave at most `most` plans, the replicated one among them: strategies are taken away, half of a class
    at a time, until so few are left."""
    masks = {cls: mask.copy() for cls, mask in instance.allowed.items()}
    while math.prod(int(mask.sum()) for mask in masks.values()) > most:
        mask = masks[max(rng.sample(sorted(masks), len(masks) // 2 + 1), key=lambda cls: masks[cls].sum())]
        others = np.flatnonzero(mask)[1:].tolist()
        mask[rng.sample(others, (len(others) + 1) // 2)] = False
    return masks


def every_cost(instance: Instance, masks: dict[int, np.ndarray], prices: Prices, keep: bool | None) -> np.ndarray:
    """Priced cost of all plans within the masks of an unfolded problem, one axis a class, inf where a plan is
    impossible."""
    index = {cls: np.flatnonzero(mask) for cls, mask in masks.items()}
    axis = {cls: i for i, cls in enumerate(masks)}
    total = np.zeros([len(i) for i in index.values()])

    def along(values: np.ndarray, classes: list[int]) -> np.ndarray:
        """Values with one axis each of `classes`, as they are added to the total."""
        shape = [1] * total.ndim
        for cls in classes:
            shape[axis[cls]] = len(index[cls])
        return values.transpose(np.argsort([axis[cls] for cls in classes])).reshape(shape)

    for cls in masks:
        total += along(own_cost(instance.problem, cls, prices)[index[cls]], [cls])
    for hyperedge in instance.hyperedges:
        classes = [hyperedge.hyperedge.producer, *dict.fromkeys(cls for cls, _, _ in hyperedge.hyperedge.consumers)]
        total += along(_hyperedge_costs(hyperedge, index, classes, prices, keep), classes)
    return total


def _hyperedge_costs(
    hyperedge: HyperedgePrices, index: dict[int, np.ndarray], classes: list[int], prices: Prices, keep
) -> np.ndarray:
    producer, *consumers = classes
    costs = np.zeros([len(index[cls]) for cls in classes])
    modes, sources = hyperedge.modes(prices, keep), hyperedge.source_of[index[producer]]
    for place in np.ndindex(costs.shape[1:]):
        chosen = {cls: index[cls][k] for cls, k in zip(consumers, place)}
        columns = [int(of[chosen[cls]]) for of, (cls, _, _) in zip(hyperedge.target_of, hyperedge.hyperedge.consumers)]
        costs[(slice(None), *place)] = served(modes, sources, columns, hyperedge.phases) * hyperedge.hyperedge.copies
    return costs


@dataclass(frozen=True)
class Checked:
    """One random problem: how many plans it has, the cost of the best, and those that were found."""

    plans: int
    best: float
    found: float
    bound: float
    exact: float


def check(
    seed: int, most_plans: int, shared_by: int = 1, draw: Callable[[random.Random], Captured] = random_graph,
    reduce_dtype: torch.dtype | None = None,
) -> Checked:  # fmt: skip
    """A random graph, mesh, machine and price: all plans listed, the judge asked about some of them, the search and
    HiGHS held against the best. `shared_by`: micro-batches that share copies of parameters. Raises AssertionError."""
    rng = random.Random(seed)
    mesh, (prices, keep), machine = rng.choice(MESHES), rng.choice(PRICES), rng.choice([toy(), toy(link=1e8), WAITING])
    instance = Instance(draw(rng), mesh, machine, folded=False, shared_by=shared_by, reduce_dtype=reduce_dtype)
    masks = thinned(instance, rng, most_plans)
    costs = every_cost(instance, masks, prices, keep)
    best = float(costs.min())
    places = [np.unravel_index(costs.argmin(), costs.shape)]
    places += [tuple(rng.randrange(n) for n in costs.shape) for _ in range(20)]
    for place in places:
        choice = {cls: int(np.flatnonzero(masks[cls])[k]) for cls, k in zip(masks, place)}
        if np.isfinite(costs[place]):
            judged = instance.objective(choice, prices, keep)
            assert math.isclose(costs[place], judged, rel_tol=1e-9, abs_tol=1e-15), (costs[place], judged)
    found = instance.minimize(prices, keep, masks)
    exact = Program(instance.problem, instance.hyperedges, masks, [prices], keep).solve(60, 1e-7)
    assert math.isclose(exact.objective, best, rel_tol=2e-6), (exact.objective, best)
    assert math.isclose(found.objective, instance.objective(found.choice, prices, keep), rel_tol=1e-9)
    assert best * (1 - 1e-9) <= found.objective <= best * (1 + Search().gap), (found.objective, best)
    assert found.bound <= best * (1 + 1e-9), (found.bound, best)
    dual = Dual(instance.problem, instance.hyperedges, masks, prices, keep)
    for i in range(SWEEPS):  # as far as the bound rises, where a search may stop before
        dual.sweep(forward=i % 2 == 0)
    assert dual.bound() <= best * (1 + 1e-9), (dual.bound(), best)
    return Checked(costs.size, best, found.objective, found.bound, exact.objective)
