"""The objective of whole plans by change: seconds and bytes of a plan are sums over ops and tensors, so a plan that is
like the last one costs what has changed. Each term is that of evaluate() itself, remembered by the strategies that it
depends on.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from autopar.planner.objective.evaluate import _serve, unreduced_bytes
from autopar.planner.objective.loads import Load
from autopar.planner.problem.multipliers import PHASES, spans_of
from autopar.planner.problem.problem import Problem
from autopar.planner.solver.solver import Solver


class AdditiveCosts:
    """Terms of a problem's plans: one a class of ops, one for tensors with producers and consumers of equal classes."""

    def __init__(self, problem: Problem, solver: Solver):
        self.problem, self.pricer, self.prices = problem, solver.pricer, solver.free
        self.streams = self.pricer.prices.streams
        self.shape = (len(PHASES), 2, 2, self.streams)  # phase, every pass or once, waited or hidden, stream
        self.width = int(np.prod(self.shape)) + 2  # and seconds of the optimizer, bytes
        copies, vertices = problem.copies(problem.half), problem.vertices
        self.members: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for v, times in zip(vertices, copies):
            self.members[v.cls].append((v.index, times))
        alike: dict[tuple, list] = {}
        for (producer, output), uses in problem.uses_of.items():
            key = (vertices[producer].cls, output, *((vertices[u.consumer].cls, u.slot, u.phase) for u in uses))
            found = alike.setdefault(key, [uses, 0, 0])
            found[1] += copies[producer]
            found[2] += copies[uses[0].consumer]
        self.tensors = list(alike.values())
        self.deciders = [(c,) for c in self.members]
        self.deciders += [
            tuple(dict.fromkeys((vertices[uses[0].producer].cls, *(vertices[u.consumer].cls for u in uses))))
            for uses, _, _ in self.tensors
        ]
        self.terms_of: dict[int, list[int]] = defaultdict(list)
        for term, classes in enumerate(self.deciders):
            for c in classes:
                self.terms_of[c].append(term)
        self.known: list[dict[tuple[int, ...], np.ndarray]] = [{} for _ in self.deciders]
        self.table = np.zeros((len(self.deciders), self.width))
        self.last: dict[int, int] = {}

    def of(self, choice: dict[int, int]) -> tuple[float, float]:
        """Return the seconds of a choice by class as `Evaluation.seconds` has them, and its bytes, nothing computed
        again."""
        changed = [c for c, k in choice.items() if self.last.get(c) != k]
        for term in {term for c in changed for term in self.terms_of[c]}:
            key = tuple([choice[c] for c in self.deciders[term]])
            if key not in self.known[term]:
                self.known[term][key] = self._term(term, choice)
            self.table[term] = self.known[term][key]
        self.last = choice
        total = self.table.sum(0)
        loads = total[:-2].reshape(self.shape)
        seconds = total[-2]
        for phase, share, is_once in spans_of(self.pricer.micro_batches):
            load = loads[PHASES.index(phase)]
            load = load[0] + load[1] if is_once else load[0]
            seconds += share * Load(*load).seconds(self.prices.overlap)
        return float(seconds), float(total[-1])

    def _term(self, term: int, choice: dict[int, int]) -> np.ndarray:
        row = np.zeros(self.width)
        loads = row[:-2].reshape(self.shape)
        if term < len(self.members):
            (c,) = self.deciders[term]
            options, k = self.problem.classes[c], choice[c]
            for index, times in self.members[c]:
                v = self.problem.vertices[index]
                seconds = float(options.seconds[k]) * times
                if v.kind == "op":
                    loads[PHASES.index("backward" if v.phase == "backward" else "forward"), 0, 0, 0] += seconds
                else:
                    row[-2] += seconds
                row[-1] += float(options.resident_bytes[k] + options.gradient_bytes[k]) * times
            return row
        uses, copies, consumers = self.tensors[term - len(self.members)]
        chosen = {i: choice[self.problem.vertices[i].cls] for i in {uses[0].producer, *(u.consumer for u in uses)}}
        served = _serve(self.problem, chosen, self.pricer, self.prices, None, uses, copies)
        for t in served.transfers:
            is_once = t.times < self.pricer.micro_batches
            load = loads[PHASES.index(t.phase), int(is_once), int(t.is_hidden)]
            for stream, share in enumerate(t.split):
                load[stream] += share and t.seconds * t.copies * share * (self.pricer.micro_batches if is_once else 1)
        row[-1] += sum(bytes_ for _, bytes_ in served.saved)
        if self.pricer.reduces_once:
            producer, output = uses[0].producer, uses[0].output
            made = self.problem.choices(producer).strategies[chosen[producer]].outputs[output]
            row[-1] += unreduced_bytes(self.problem, chosen, self.pricer, uses, made) * consumers
        return row
