"""An evaluated plan of a compact graph, written out for every block of the whole model: what timelines and traces are
made of. Or for the few blocks of the compact graph alone, each once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace

from ...ir.graph import output_node
from ...rules.loss_regions import LossRegion
from ...rules.row_regions import RowRegion
from ..problem.problem import Problem
from ..problem.tiled import regions_named
from ..problem.vertices import STATE, vertices_of
from .beside import Beside
from .checkpoint_blocks import recomputed_vertices, taking
from .checkpoint_min_cut import FULL, SELECTIVE, Key, Recomputation
from .evaluate import Evaluation
from .host_values import saved_on_device, saved_on_host, written_out


def whole_of(problem: Problem, evaluation: Evaluation) -> tuple[Problem, Evaluation]:
    """Return the problem of the whole graph and the same plan of it, both as they are if no blocks were left out."""
    if problem.compact is None:
        return problem, evaluation
    writer = _Writer(problem, saved_on_device(evaluation))
    whole, e = writer.write()
    return whole, saved_on_host(e, list(written_out(evaluation.on_host, writer.match))) if evaluation.on_host else e


def few_of(problem: Problem, evaluation: Evaluation) -> tuple[Problem, Evaluation]:
    """Return a problem of the compact graph's few blocks, each once, and the same plan of it, both as they are if no
    blocks were left out. What is computed again must be so in all copies of a block (see `recomputes_alike`)."""
    if problem.compact is None:
        return problem, evaluation
    copies = problem.copies(evaluation.first)
    few = replace(problem, whole=problem.graph, compact=None)

    base = _without_recomputation(evaluation)
    transfers = [replace(t, copies=1) for t in evaluation.transfers]
    saved = {key: bytes_ / copies[key[0]] for key, bytes_ in base.saved.items()}
    base = replace(base, saved=saved, transfers=transfers, first=0)
    steps = [
        replace(
            step,
            copies=1,
            moved=tuple(replace(t, copies=1) for t in step.moved),
            freed=tuple((key, bytes_ / step.copies) for key, bytes_ in step.freed),
            needed=tuple((key, bytes_ / step.copies) for key, bytes_ in step.needed),
        )
        for levels in evaluation.recomputed.values()
        for step, _ in levels.values()
    ]
    return few, taking(base, [(step, 1) for step in steps]) if steps else base


def recomputes_alike(evaluation: Evaluation) -> bool:
    """Return whether all blocks compute the same again, as one level says, or nothing."""
    counts = [pair for levels in evaluation.recomputed.values() for pair in levels.values()]
    return all(count == step.copies for step, count in counts) and _levels(evaluation) in (set(), {SELECTIVE}, {FULL})


def _levels(evaluation: Evaluation) -> set[str]:
    return {level for levels in evaluation.recomputed.values() for level in levels}


def _without_recomputation(evaluation: Evaluation) -> Evaluation:
    """Return the plan as it was before anything was computed again in all copies of its blocks."""
    saved, retained = dict(evaluation.saved), set(evaluation.retained)
    for step in (step for levels in evaluation.recomputed.values() for step, _ in levels.values()):
        for key, bytes_ in step.freed:
            saved[key] = saved.get(key, 0.0) + bytes_
        for key, bytes_ in step.needed:
            saved[key] -= bytes_
            retained.discard(key)
    saved = {key: bytes_ for key, bytes_ in saved.items() if bytes_ > 0.5}
    return replace(
        evaluation, saved=saved, retained=retained, recomputed={}, recompute_seconds=0.0, transient_bytes=0.0
    )


def _tiled(small: Problem, first: int) -> tuple[LossRegion | RowRegion, ...]:
    """Return the regions in pieces of the whole graph, given those of the compact graph; for `first` see
    `Problem.copies`."""
    nodes = {node for region in small.tiled for node in small.whole_nodes(region.node, first)}
    return regions_named(small.whole, nodes, any(region.alone for region in small.tiled_queries))


class _Writer:
    def __init__(self, small: Problem, evaluation: Evaluation):
        self.small, self.evaluation = small, evaluation
        if evaluation.first not in small.written:
            small.written[evaluation.first] = self._problem()
        self.problem, self.unrolled = small.written[evaluation.first]
        self.reads = {  # by block and vertex, a vertex of the block that reads it, and as which of its inputs
            (v.block, p): (v.index, i) for v in small.vertices if v.kind == "op" for i, (p, _) in enumerate(v.inputs)
        }

    def _problem(self) -> tuple[Problem, dict[int, list[int]]]:
        """Return the problem of the whole graph and, by vertex of the small graph, those of the whole graph in order of
        the blocks."""
        small, evaluation = self.small, self.evaluation
        vertices, uses = vertices_of(small.whole)
        by_node = {v.node: v.index for v in vertices if v.kind != "output"}
        given = {(v.signature[1], v.node): v.index for v in vertices if v.kind == "output"}
        outputs = {v.name: v.index for v in vertices if v.kind == "output"}
        unrolled: dict[int, list[int]] = {}
        for v in small.vertices:
            if v.kind == "output" and v.block is None:
                unrolled[v.index] = [outputs[v.name]]
            else:
                nodes = small.whole_nodes(v.node, evaluation.first)
                unrolled[v.index] = [given[v.signature[1], n] if v.kind == "output" else by_node[n] for n in nodes]
            for copy in unrolled[v.index]:
                vertices[copy].cls = v.cls
        problem = replace(
            small,
            vertices=vertices,
            uses=uses,
            graph=small.whole,
            compact=None,
            tensor_bytes={(t, o): small.tensor_bytes[v, o] for v, o in small.tensor_bytes for t in unrolled[v]},
            rule_of={t: rule for v, rule in small.rule_of.items() for t in unrolled[v]},
            tiled=_tiled(small, evaluation.first),
            output_uses=uses[len(uses) - len(output_node(small.whole).args[0]) :],
        )
        problem.uses = [*uses, *problem.read_again()]
        return problem, unrolled

    def write(self) -> tuple[Problem, Evaluation]:
        """Write the plan out, and return it with the problem of the whole graph."""
        e, recomputed = self.evaluation, dict(self._recomputed())
        saved, retained = self._before_recomputation()
        for levels in recomputed.values():
            for step, _ in levels.values():  # a later step may drop what an earlier one needs
                for key, _ in step.freed:
                    saved.pop(key, None)
                    retained.discard(key)
                saved |= dict(step.needed)
                retained |= {key for key, _ in step.needed}
        choice = {t: k for v, k in e.choice.items() for t in self.unrolled[v]}
        transfers = [one for t in e.transfers for one in self._transfers(t, choice)]
        saved = {key: bytes_ for key, bytes_ in saved.items() if bytes_ > 0.5}
        return self.problem, replace(
            e,
            transfers=transfers,
            saved=saved,
            retained=retained,
            choice=choice,
            first=0,
            recomputed=recomputed,
            beside=tuple(self._beside(recomputed_vertices(replace(e, recomputed=recomputed)))),
            turns=frozenset(t for v in e.turns for t in self.unrolled[v]),
        )

    def _before_recomputation(self) -> tuple[dict[Key, float], set[Key]]:
        """Return what all copies save and keep alike, before some of them drop a part of it."""
        saved, retained = Counter(self.evaluation.saved), set(self.evaluation.retained)
        for levels in self.evaluation.recomputed.values():
            for step, count in levels.values():
                for held, sign in ((step.freed, 1), (step.needed, -1)):
                    for key, bytes_ in held:
                        saved[key] += sign * bytes_ * count / step.copies
                retained -= {key for key, _ in step.needed}
        whole = {
            (t, output, layout): bytes_ / len(self.unrolled[v])
            for (v, output, layout), bytes_ in saved.items()
            for t in self.unrolled[v]
        }
        return whole, {(t, output, layout) for v, output, layout in retained for t in self.unrolled[v]}

    def _transfers(self, transfer, choice: dict[int, int]) -> Iterator:
        for copy in self.unrolled[transfer.producer]:
            readers = []
            for use in self.problem.uses_of[copy, transfer.output]:
                strategy = self.problem.choices(use.consumer).strategies[choice[use.consumer]]
                wanted = strategy.outputs[0] if use.slot == STATE else strategy.inputs[use.slot]
                if wanted == transfer.target and use.phase == transfer.phase:
                    readers.append(use.consumer)
            yield replace(transfer, producer=copy, consumers=tuple(readers), copies=1)

    def _beside(self, recomputed: Collection[int]) -> Iterator[Beside]:
        """Iterate over the exchanges of all copies of a block that have something beside them."""
        for one in self.evaluation.beside:
            for copy, vertex in enumerate(self.unrolled[one.vertex]):
                if one.recomputed and vertex not in recomputed:
                    continue
                ops, products = (tuple(self.unrolled[v][copy] for v in some) for some in (one.ops, one.products))
                yield replace(one, vertex=vertex, ops=ops, products=products, copies=1)

    def _recomputed(self) -> Iterator[tuple[str, dict]]:
        for block, levels in self.evaluation.recomputed.items():
            most = max(count for _, count in levels.values())
            for i, name in enumerate(names_of(self.small, block, self.evaluation.first)[:most]):
                yield (
                    name,
                    {level: (self._one(step, name, i), 1) for level, (step, count) in levels.items() if i < count},
                )

    def match(self, v: int, name: str, copy: int) -> int:
        """Return what a copy of a block has, or reads, in place of a vertex."""
        block = self.small.compact.small_names.number(name) if name else None
        if block in (None, self.small.vertices[v].block) or (block, v) not in self.reads:
            return self.unrolled[v][min(copy, len(self.unrolled[v]) - 1)]
        reader, position = self.reads[block, v]
        return self.problem.vertices[self.unrolled[reader][copy]].inputs[position][0]

    def _one(self, step: Recomputation, name: str, copy: int) -> Recomputation:
        def match(v: int) -> int:
            return self.match(v, step.block, copy)

        def held(values) -> tuple[tuple[Key, float], ...]:
            return tuple(((match(v), o, layout), bytes_ / step.copies) for (v, o, layout), bytes_ in values)

        moved = [
            replace(t, producer=match(t.producer), consumers=tuple(map(match, t.consumers)), copies=1)
            for t in step.moved
        ]
        return replace(
            step,
            block=name,
            copies=1,
            recomputed=frozenset(map(match, step.recomputed)),
            freed=held(step.freed),
            needed=held(step.needed),
            moved=tuple(moved),
        )


def names_of(problem: Problem, block: str, first: int) -> list[str]:
    """Return the names of the blocks of the whole graph that a block of the planned graph stands for; for `first` see
    `Problem.copies`."""
    return [block] if problem.compact is None else problem.compact.modules(block, first)
