"""Three searches that know nothing of bounds try to beat the planner, given the same prices and the same clock.

    OMP_NUM_THREADS=1 python benchmarks/adversary.py [WORD ...] [--times 1000] [--cpu-seconds 60] [--seed 0]

For each case the planner plans, and its evaluations of whole plans are counted. Then each adversary may evaluate
`--times` as many, but no longer than `--cpu-seconds`, which the table says: it chooses a strategy for every class of
ops, with the layouts of neighbours made to agree or not, what does not fit computes as much again as it must, and what
may be faster is played. A plan costs what has changed since the last one (additive_costs.py), and with nothing computed
again it takes the least: what is too slow even so is evaluated no further. All played plans of a case, the planner's
own too, must take the planner's bound or more.

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
from autopar.planner.solver import search
from autopar.planner.spmd.planned import Planned
from benchmarks.additive_costs import AdditiveCosts

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
    """The plans of a finished search, and the clock. `played`: seconds of all plans that were played. It may be asked
    for so many evaluations, in so many seconds."""

    def __init__(self, planned: Planned, rng: random.Random, evaluations: int, cpu_seconds: float):
        self.most, self.cpu_seconds, self.start, self.spent = evaluations, cpu_seconds, time.process_time(), 0.0
        self.fitting: dict[tuple[int, ...], list[int]] = {}
        self.costs = AdditiveCosts(planned.problem, planned.solver)
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

    @property
    def progress(self) -> float:
        """Return the share of the evaluations or of the seconds that is spent. The clock is looked at now and then."""
        if self.evaluations % 32 == 0:
            self.spent = (time.process_time() - self.start) / self.cpu_seconds
        return max(self.evaluations / self.most, self.spent)

    def seconds(self, choice: dict[int, int], wanted: float = math.inf) -> float:
        """Return the seconds of a choice by class: played, if they can be less than any so far; what they are at least
        if that is not below `wanted`; infinite if it does not fit."""
        self.evaluations += 1
        least, bytes_ = self.costs.of(choice)
        if not least < wanted:
            return least
        whole: Evaluation | None = None
        if not self._surely_fits(bytes_):
            whole = self._fitted({v.index: choice[v.cls] for v in self.vertices})
            least = math.inf if whole is None else whole.seconds
        if not least < min(self.played):
            return least
        e = whole or self._evaluated({v.index: choice[v.cls] for v in self.vertices})
        assert whole or math.isclose(e.seconds, least, rel_tol=1e-9), (e.seconds, least)
        self.played.append(played_seconds(self.problem, e, self.solver.pricer))
        return self.played[-1]

    def _evaluated(self, choice: dict[int, int]) -> Evaluation:
        return evaluate(self.problem, choice, self.solver.pricer, self.solver.free)

    def _surely_fits(self, charged_bytes: float) -> bool:
        """Return whether a plan fits whatever passes by, which is less than what is left."""
        return charged_bytes + self.problem.reserve_bytes < 0.9 * self.solver.limit_bytes

    def _fitted(self, choice: dict[int, int]) -> Evaluation | None:
        solver = self.solver
        e = self._evaluated(choice)
        if not math.isfinite(e.seconds):
            return None
        if self._surely_fits(e.charged_bytes):
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
                fitting = self._fitting(here, choice[here], other, output, slot, is_consumer)
                if fitting:
                    choice[other] = int(rng.choice(fitting))
                    waiting.append(other)
                    changes -= 1
        return choice

    def _fitting(self, here: int, strategy: int, other: int, output: int, slot: int, is_consumer: bool) -> list[int]:
        """Return the strategies of a neighbour that read, or make, a tensor in the layout that a strategy has it in."""
        key = (here, strategy, other, output, slot, is_consumer)
        if key not in self.fitting:
            pair = (here, other) if is_consumer else (other, here)
            made = self.problem.classes[pair[0]].output_layouts(output)
            wanted = self.problem.classes[pair[1]].layouts(slot)
            mine, theirs = (made, wanted) if is_consumer else (wanted, made)
            self.fitting[key] = [int(k) for k in self.allowed[other] if theirs[k] == mine[strategy]]
        return self.fitting[key]

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


def at_random(space: Space) -> float:
    best = math.inf
    while space.progress < 1:
        best = min(best, space.seconds(space.any_plan(), best))
    return best


def evolved(space: Space) -> float:
    rng, classes = space.rng, space.classes
    first = [*space.starts()][1:] + [space.any_plan() for _ in range(POPULATION)]
    population = [(space.seconds(choice), i, choice) for i, choice in enumerate(first)]
    while space.progress < 1:
        one, other = (min(rng.sample(population, TOURNAMENT))[2] for _ in range(2))
        low, high = sorted(rng.choices(range(len(classes)), k=2))
        child = one | {c: other[c] for c in classes[low:high]}
        for _ in range(rng.randint(0, MUTATIONS)):
            child = space.spread(child, rng.choice(classes), rng.randint(0, 12))
        population.append((space.seconds(child, max(population)[0]), space.evaluations, child))
        population.remove(max(rng.sample(population, TOURNAMENT)))
    return min(population)[0]


def annealed(space: Space) -> float:
    rng, start = space.rng, next(space.starts())
    here = best = (space.seconds(start), start)
    without = 0
    while (progress := space.progress) < 1:
        degree = HOT * (COLD / HOT) ** progress * best[0]
        choice = space.spread(here[1], rng.choice(space.classes), rng.choice((0, 0, 1, 2, 4, 8)))
        accepted = here[0] - degree * math.log(1 - rng.random())
        seconds = space.seconds(choice, accepted)
        if seconds < accepted:
            here = seconds, choice
        without = 0 if here[0] < best[0] else without + 1
        best = min(best, here, key=lambda pair: pair[0])
        if without > PATIENCE:
            here, without = best, 0
    return best[0]


ADVERSARIES: dict[str, Callable[[Space], float]] = {"random": at_random, "evolution": evolved, "annealing": annealed}


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


def run(case: Case, times: int, cpu_seconds: float, seed: int) -> float:
    """Prints a row of a case, and returns the largest gain."""
    planned, count = planned_with_count(case)
    plan, cells, gains, spent = planned.plan, [], [], []
    start = time.process_time()
    for name, adversary in ADVERSARIES.items():
        space = Space(planned, random.Random(f"{seed} {case} {name}"), times * count, cpu_seconds)
        fastest = min([adversary(space), *space.played[1:]])
        assert plan.bound <= min(space.played) * (1 + 1e-9), (case, name, plan.bound, min(space.played))
        gains.append(1 - fastest / plan.step_seconds)
        spent.append(space.evaluations)
        cells.append(f"{gains[-1]:9.2%}" if math.isfinite(gains[-1]) else f"{'none':>9}")
    print(f"{str(case):46} {plan.step_seconds * 1e3:9.3f} {plan.gap:6.2%} {count:6} {min(spent):9,} "
          f"{min(spent) / count:7,.0f} {' '.join(cells)} {time.process_time() - start:6.0f}", flush=True)  # fmt: skip
    return max(gains)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="only the cases whose text has one of them")
    parser.add_argument("--times", type=int, default=1000, help="the planner's evaluations (default 1000)")
    parser.add_argument("--cpu-seconds", type=float, default=60.0, help="of one adversary and case (default 60)")
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    quiet()
    names = " ".join(f"{name:>9}" for name in ADVERSARIES)
    print(f"{'case':46} {'step ms':>9} {'gap':>6} {'evals':>6} {'theirs':>9} {'times':>7} {names} {'CPU s':>6}")
    cases = [c for c in CASES if not a.words or any(word in str(c) for word in a.words)]
    gains = [run(case, a.times, a.cpu_seconds, a.seed) for case in cases]
    print(f"largest gain {max(gains):.2%} of {len(cases)} cases; every played plan takes the bound or more")
    return int(max(gains) > 0.01)


if __name__ == "__main__":
    sys.exit(main())
