"""Three searches that know nothing of bounds try to beat the planner, given the same prices and the same clock.

    OMP_NUM_THREADS=1 python benchmarks/adversary.py [WORD ...] [--times 1000] [--most 20000] [--seed 0]

For each case the planner plans, and its evaluations of whole plans are counted. Then each adversary may evaluate
`--times` as many, but no more than `--most`, which the table says: it chooses a strategy for every class of ops, with
the layouts of neighbours made to agree or not, what does not fit computes as much again as it must, and what may be
faster is played. All played plans of a case, the planner's own too, must take the planner's bound or more.

random      a strategy for some op, spread over the graph by taking strategies that read what is there; each plan anew
evolution   a population of such plans and of the experts' plans: crossover of a stretch of the graph, and mutations
annealing   one change after the other from the planner's own plan, at falling temperatures (Kirkpatrick et al., Science
            220(4598), 1983)

`gain`: how much less the best plan of an adversary takes than the planner's; not above 0: it was not beaten (then plans
are not played which need more, and what they need at least is told).
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from autopar import models
from autopar.api import entry
from autopar.cli.common import quiet
from autopar.planner.objective.evaluate import Evaluation, evaluate
from autopar.planner.objective.player import played_seconds
from autopar.planner.plan import Planned
from autopar.planner.solver import search

SPREAD = 0.9  # of an op's neighbours that take a strategy which fits it
POPULATION, TOURNAMENT, MUTATIONS = 40, 3, 3
HOT, COLD = 0.03, 1e-5  # temperatures, as shares of the plan's seconds
PATIENCE = 400  # changes without gain after which annealing goes back to its best plan


@dataclass(frozen=True)
class Case:
    """`memory`: share of what the plan without a limit takes, or None."""

    model: str
    mesh: str
    batch: int
    seq: int
    memory: float | None = None

    def __str__(self) -> str:
        limit = "" if self.memory is None else f" {self.memory:.0%} of its memory"
        return f"{self.model.split(':')[0]} {self.mesh} {self.batch} x {self.seq}{limit}"


WIDE = "hidden=1024,layers=2,heads=16,vocab=8192,seq=512"
CASES = [
    Case("mlp:hidden=4096,layers=3", "a=4", 1024, 1),
    Case("mlp:hidden=4096,layers=3", "a=2,b=2", 1024, 1),
    Case("mlp:hidden=4096,layers=3", "a=4", 32768, 1, 0.9),
    Case(f"gpt:{WIDE}", "a=4", 8, 512),
    Case(f"gpt:{WIDE}", "a=2,b=4", 8, 512),
    Case(f"gpt:{WIDE}", "a=4", 32, 512, 0.9),
    Case("llama:hidden=1024,layers=2,heads=16,kv_heads=4,ffn=2816,vocab=8192,seq=512", "a=8", 8, 512),
    Case("llama:hidden=1024,layers=2,heads=16,kv_heads=4,ffn=2816,vocab=8192,seq=512", "a=2,b=4", 32, 512, 0.9),
    Case("gpt2", "a=8", 64, 1024),
    Case("llama3-8b", "dp=8,tp=8", 16, 8192),
]


class Space:
    """The plans of a finished search, and the clock. `played`: seconds of all plans that were played."""

    def __init__(self, planned: Planned, rng: random.Random):
        self.planned, self.rng, self.problem, self.solver = planned, rng, planned.problem, planned.solver
        self.allowed = {c: np.flatnonzero(m) for c, m in self.solver.allowed(planned.chosen.restriction).items()}
        self.classes, self.vertices = sorted(self.allowed), self.problem.vertices
        self.evaluations, self.played = 0, [planned.plan.step_seconds]
        self.neighbours: dict[int, list[tuple[int, int, int, bool]]] = {c: [] for c in self.classes}
        for use in self.problem.uses:
            producer, consumer = self.vertices[use.producer].cls, self.vertices[use.consumer].cls
            self.neighbours[producer].append((consumer, use.output, use.slot, True))
            self.neighbours[consumer].append((producer, use.output, use.slot, False))
        self.neighbours = {c: list(dict.fromkeys(found)) for c, found in self.neighbours.items()}

    def seconds(self, choice: dict[int, int]) -> float:
        """Return the seconds of a choice by class: played, if they can be less than any so far; infinite if it does not
        fit."""
        self.evaluations += 1
        e = self._fitted({v.index: choice[v.cls] for v in self.vertices})
        if e is None or not e.seconds < min(self.played):
            return math.inf if e is None else e.seconds
        self.played.append(played_seconds(self.problem, e, self.solver.pricer))
        return self.played[-1]

    def _fitted(self, choice: dict[int, int]) -> Evaluation | None:
        solver = self.solver
        e = evaluate(self.problem, choice, solver.pricer, solver.free)
        if not math.isfinite(e.seconds):
            return None
        if e.charged_bytes + self.problem.reserve_bytes < 0.9 * solver.limit_bytes:  # what passes by is less than that
            return e
        limit, e = solver.limit_bytes, solver.with_peak(e)
        for _ in range(4):
            fitted, _ = solver.blocks.fit(e, limit, solver.free)
            fitted = fitted and solver.with_peak(fitted)
            if fitted is None or fitted.bytes_ <= solver.limit_bytes:
                return fitted
            limit -= fitted.bytes_ - solver.limit_bytes
        return None

    def spread(self, choice: dict[int, int], cls: int, changes: int) -> dict[int, int]:
        """A choice with another strategy for a class, and for so many classes around it strategies that fit."""
        choice, rng = dict(choice), self.rng
        choice[cls] = int(rng.choice(self.allowed[cls]))
        done, waiting = {cls}, [cls]
        while waiting and changes > 0:
            here = waiting.pop(rng.randrange(len(waiting)))
            for other, output, slot, is_consumer in rng.sample(self.neighbours[here], len(self.neighbours[here])):
                if other in done or rng.random() > SPREAD or changes <= 0:
                    continue
                done.add(other)
                pair = (here, other) if is_consumer else (other, here)
                made = self.problem.classes[pair[0]].output_layouts(output)
                wanted = self.problem.classes[pair[1]].layouts(slot)
                mine, theirs = (made, wanted) if is_consumer else (wanted, made)
                fitting = [k for k in self.allowed[other] if theirs[k] == mine[choice[here]]]
                if fitting:
                    choice[other] = int(rng.choice(fitting))
                    waiting.append(other)
                    changes -= 1
        return choice

    def any_plan(self) -> dict[int, int]:
        """A random choice, made of a few strategies that are spread over the graph."""
        choice = {c: int(self.allowed[c][0]) for c in self.classes}
        for _ in range(self.rng.randint(1, 6)):
            choice = self.spread(choice, self.rng.choice(self.classes), self.rng.randint(1, 2 * len(self.classes)))
        return choice

    def starts(self) -> Iterator[dict[int, int]]:
        """The planner's plan, then the experts'."""
        yield {c: self.planned.evaluation.choice[c] for c in self.classes}
        for other in self.planned.others.values():
            if isinstance(other, search.Outcome):
                yield {c: other.evaluation.choice[c] for c in self.classes}


def at_random(space: Space, budget: int) -> float:
    return min(space.seconds(space.any_plan()) for _ in range(budget))


def evolved(space: Space, budget: int) -> float:
    rng, classes = space.rng, space.classes
    first = [*space.starts()][1:] + [space.any_plan() for _ in range(POPULATION)]
    population = [(space.seconds(choice), i, choice) for i, choice in enumerate(first)]
    for number in range(len(population), budget):
        one, other = (min(rng.sample(population, TOURNAMENT))[2] for _ in range(2))
        low, high = sorted(rng.choices(range(len(classes)), k=2))
        child = one | {c: other[c] for c in classes[low:high]}
        for _ in range(rng.randint(0, MUTATIONS)):
            child = space.spread(child, rng.choice(classes), rng.randint(0, 12))
        population.append((space.seconds(child), number, child))
        population.remove(max(rng.sample(population, TOURNAMENT)))
    return min(population)[0]


def annealed(space: Space, budget: int) -> float:
    rng, start = space.rng, next(space.starts())
    here = best = (space.seconds(start), start)
    without = 0
    for i in range(1, budget):
        degree = HOT * (COLD / HOT) ** (i / budget) * best[0]
        choice = space.spread(here[1], rng.choice(space.classes), rng.choice((0, 0, 1, 2, 4, 8)))
        seconds = space.seconds(choice)
        if seconds < here[0] or rng.random() < math.exp(min(0.0, (here[0] - seconds) / degree)):
            here = seconds, choice
        without = 0 if here[0] < best[0] else without + 1
        best = min(best, here, key=lambda pair: pair[0])
        if without > PATIENCE:
            here, without = best, 0
    return best[0]


ADVERSARIES: dict[str, Callable[[Space, int], float]] = {"random": at_random, "evolution": evolved,
                                                         "annealing": annealed}  # fmt: skip


def planned_with_count(case: Case) -> tuple[Planned, int]:
    """The planner's search, and how many whole plans it evaluated, those of the experts' rows included."""
    count, original = 0, search.evaluate

    def counted(*args, **options):
        nonlocal count
        count += 1
        return original(*args, **options)

    search.evaluate = counted
    try:
        model, inputs = models.build(case.model, batch=case.batch, seq=case.seq)
        asked = {"hardware": "h100", "precision": "bf16", "name": case.model}
        if case.memory is not None:
            free = entry.search(model, case.mesh, inputs, baselines=False, **asked)
            reserve = free.problem.reserve_bytes  # which no plan can do without
            asked["memory"] = reserve + (free.plan.peak_bytes - reserve) * case.memory
            count = 0
        return entry.search(model, case.mesh, inputs, **asked), count
    finally:
        search.evaluate = original


def run(case: Case, times: int, most: int, seed: int) -> float:
    """Prints a row of a case, and returns the largest gain."""
    planned, count = planned_with_count(case)
    plan, cells, largest = planned.plan, [], -math.inf
    budget = min(most, times * count)
    start = time.process_time()
    for name, adversary in ADVERSARIES.items():
        space = Space(planned, random.Random(f"{seed} {case} {name}"))
        fastest = min([adversary(space, budget), *space.played[1:]])
        assert plan.bound <= min(space.played) * (1 + 1e-9), (case, name, plan.bound, min(space.played))
        gain = 1 - fastest / plan.step_seconds
        largest = max(largest, gain)
        cells.append(f"{gain:9.2%}" if math.isfinite(gain) else f"{'none':>9}")
    print(f"{str(case):46} {plan.step_seconds * 1e3:9.3f} {plan.gap:6.2%} {count:6} {budget:8,} {' '.join(cells)} "
          f"{time.process_time() - start:6.0f}", flush=True)  # fmt: skip
    return largest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="only the cases whose text has one of them")
    parser.add_argument("--times", type=int, default=1000, help="the planner's evaluations (default 1000)")
    parser.add_argument("--most", type=int, default=20_000, help="evaluations of one adversary (default 20,000)")
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    quiet()
    names = " ".join(f"{name:>9}" for name in ADVERSARIES)
    print(f"{'case':46} {'step ms':>9} {'gap':>6} {'evals':>6} {'theirs':>8} {names} {'CPU s':>6}")
    cases = [c for c in CASES if not a.words or any(word in str(c) for word in a.words)]
    gains = [run(case, a.times, a.most, a.seed) for case in cases]
    print(f"largest gain {max(gains):.2%} of {len(cases)} cases; every played plan takes the bound or more")
    return int(max(gains) > 0.01)


if __name__ == "__main__":
    sys.exit(main())
