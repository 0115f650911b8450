"""An evaluated plan of a compact graph, written out for every block of the whole model: what timelines and traces are made of. Or
for the few blocks of the compact graph alone, each once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from ..graph import output_node
from .evaluate import Evaluation, uses_by_tensor
from .problem import Problem
from .remake import Key, Recomputation
from .vertices import STATE, vertices_of


def whole_of(problem: Problem, evaluation: Evaluation) -> tuple[Problem, Evaluation]:
    """The problem of the whole graph and the same plan of it; both as they are if no blocks were left out."""
    if problem.compact is None:
        return problem, evaluation
    problem.split(evaluation.first)
    return _Writer(problem, evaluation).write()


def few_of(problem: Problem, evaluation: Evaluation) -> tuple[Problem, Evaluation]:
    """A model of the compact graph's few blocks, each once, and the same plan of it; both as they are if no blocks were left out.
    All copies of a block compute the same again (see `is_even`)."""
    if problem.compact is None:
        return problem, evaluation
    problem.split(evaluation.first)
    copies = [v.copies for v in problem.vertices]
    few = replace(problem, vertices=[replace(v, copies=1, block=None) for v in problem.vertices], whole=problem.graph, compact=None)
    saved = {key: bytes_ / copies[key[0]] for key, bytes_ in evaluation.saved.items()}
    again = {b: {level: (_one_copy(step), 1) for level, (step, _) in own.items()} for b, own in evaluation.recomputed.items()}
    transfers = [replace(t, copies=1) for t in evaluation.transfers]
    return few, replace(evaluation, saved=saved, transfers=transfers, recomputed=again, first=0)


def is_even(evaluation: Evaluation) -> bool:
    """Whether all copies of a block compute the same again."""
    return all(count == step.copies for levels in evaluation.recomputed.values() for step, count in levels.values())


def _one_copy(step: Recomputation) -> Recomputation:
    freed, needed = (tuple((key, bytes_ / step.copies) for key, bytes_ in held) for held in (step.freed, step.needed))
    return replace(step, copies=1, freed=freed, needed=needed, moved=tuple(replace(t, copies=1) for t in step.moved))


class _Writer:
    def __init__(self, small: Problem, evaluation: Evaluation):
        self.small, self.evaluation = small, evaluation
        vertices, uses = vertices_of(small.whole)
        by_node = {v.node: v.index for v in vertices if v.kind != "output"}
        outputs = {v.name: v.index for v in vertices if v.kind == "output"}
        self.twins: dict[int, list[int]] = {}  # by vertex of the small graph, those of the whole graph in order of the blocks
        for v in small.vertices:
            self.twins[v.index] = [outputs[v.name]] if v.kind == "output" else [by_node[n] for n in small.whole_nodes(v.node)]
            for twin in self.twins[v.index]:
                vertices[twin].cls = v.cls
        self.problem = replace(
            small, vertices=vertices, uses=uses, graph=small.whole, compact=None, uses_of=None, first=0,
            tensor_bytes={(t, o): small.tensor_bytes[v, o] for v, o in small.tensor_bytes for t in self.twins[v]},
            rule_of={t: rule for v, rule in small.rule_of.items() for t in self.twins[v]},
            output_uses=uses[len(uses) - len(output_node(small.whole).args[0]) :],
        )  # fmt: skip

    def write(self) -> tuple[Problem, Evaluation]:
        e, spans = self.evaluation, self._spans()
        choice = {t: k for v, k in e.choice.items() for t in self.twins[v]}
        saved, kept = {}, set()
        for (v, output, layout), bytes_ in e.saved.items():
            some = self.twins[v][spans[v, output, layout]]
            saved |= {(t, output, layout): bytes_ / len(some) for t in some}
        for v, output, layout in e.kept:
            kept |= {(t, output, layout) for t in self.twins[v][spans[v, output, layout]]}
        transfers = [one for t in e.transfers for one in self._transfers(t, choice)]
        whole = replace(
            e, transfers=transfers, saved=saved, kept=kept, choice=choice, first=0, recomputed=dict(self._recomputed())
        )
        return self.problem, whole

    def _spans(self) -> dict[Key, slice]:
        """Which of its copies save a value: not the first ones where recomputed blocks drop it, those alone where they need it."""
        spans: dict[Key, slice] = defaultdict(lambda: slice(None))
        for levels in self.evaluation.recomputed.values():
            for step, count in levels.values():  # a later step may drop what an earlier one needs
                spans |= {key: slice(0, count) for key, _ in step.needed}
                spans |= {key: slice(count, spans[key].stop) for key, _ in step.freed}
        return spans

    def _transfers(self, transfer, choice: dict[int, int]) -> Iterator:
        for twin in self.twins[transfer.producer]:
            readers = []
            for use in uses_by_tensor(self.problem)[twin, transfer.output]:
                strategy = self.problem.choices(use.consumer).strategies[choice[use.consumer]]
                wanted = strategy.outputs[0] if use.slot == STATE else strategy.inputs[use.slot]
                if wanted == transfer.target and use.phase == transfer.phase:
                    readers.append(use.consumer)
            yield replace(transfer, producer=twin, consumers=tuple(readers), copies=1)

    def _recomputed(self) -> Iterator[tuple[str, dict]]:
        for block, levels in self.evaluation.recomputed.items():
            most = max(count for _, count in levels.values())
            for i, name in enumerate(names_of(self.small, block)[:most]):
                yield name, {level: (self._one(step, name, i), 1) for level, (step, count) in levels.items() if i < count}

    def _one(self, step: Recomputation, name: str, copy: int) -> Recomputation:
        def twin(v: int) -> int:
            return self.twins[v][min(copy, len(self.twins[v]) - 1)]

        def held(values) -> tuple[tuple[Key, float], ...]:
            return tuple(((twin(v), o, layout), bytes_ / step.copies) for (v, o, layout), bytes_ in values)

        moved = [replace(t, producer=twin(t.producer), consumers=tuple(map(twin, t.consumers)), copies=1) for t in step.moved]
        return replace(
            step, block=name, copies=1, again=frozenset(map(twin, step.again)), freed=held(step.freed), needed=held(step.needed),
            moved=tuple(moved),
        )  # fmt: skip


def names_of(problem: Problem, block: str) -> list[str]:
    """Names of the blocks of the whole graph that a block of the planned graph stands for."""
    tower, _, number = block.rpartition(".")
    if problem.compact is None or tower != problem.compact.tower:
        return [block]
    return [f"{tower}.{n}" for n in problem.compact.stands_for(int(number), problem.first)]
