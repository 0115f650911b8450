"""Describe a finished search as a Plan: costs, memory by kind, collectives, layouts, and the decisions that the
lowering reads."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import fx

from ...cost.exchange import exchange_axes, exchange_bytes, exchange_seconds
from ...cost.expert_copies import copies_of
from ...cost.orthogonalize import ELEMENT_BYTES
from ...cost.ring import ring_of
from ...errors import AutoparError
from ...hardware.schema import Hardware
from ...ir.graph import PARTNERS, fingerprint, op_base_name, output_node
from ...ops import autopar
from ...plans.entries import Alternative, Collective, ExpertCopies
from ...plans.pipeline import Pipeline
from ...plans.plan import Plan
from ...plans.sharding import NodeSharding, Sharding
from ..objective.beside_exchange import exchanges_of
from ..objective.checkpoint_blocks import recomputed_vertices
from ..objective.checkpoint_min_cut import FULL
from ..objective.evaluate import Evaluation, Transfer
from ..objective.loops import loops_of
from ..objective.module_table import regions_of
from ..objective.pricer import Pricer
from ..problem import tiled
from ..problem.offload import offloaded, update_seconds
from ..problem.problem import Problem
from ..problem.vertices import STATE
from ..solver.search import Outcome
from .accumulation import of_step, samples_of
from .attention_schemes import schemes_of
from .attention_text import is_packed
from .model_flops import flops_of_step
from .outputs import held_bytes, kept_bytes, outputs_in, with_outputs
from .routing import copies_in, routing_of
from .side_by_side import pairs_of
from .values_on_host import described, exposed_seconds

if TYPE_CHECKING:
    from .planned import Planned, StagedRow


def describe_plan(planned: Planned) -> Plan:
    """Describe the result of a search as a Plan."""
    options, chosen, pricer = planned.options, planned.chosen, planned.pricer
    problem, e = planned.whole
    micro_batches, micro = options.micro_batches, planned.micro
    samples = micro.samples if micro else micro_batches * samples_of(problem)
    is_even = micro is None or micro.smaller is None
    order = micro.order if micro else Pipeline.schedule
    pipeline = Pipeline(schedule=order, micro_batches=micro_batches, samples=0 if is_even else samples)
    pipeline = replace(pipeline, pairs=pairs_of(problem, e, pricer, sum(pipeline.shares)))
    rows = tuple(_alternative(name, one, pipeline, planned) for name, one in planned.others.items())
    rows += tuple(map(_staged_alternative, planned.staged_rows))
    sharding = _sharding(problem, e, pricer)
    copies = copies_in(problem, e, pricer)
    plan = Plan(
        model=planned.model,
        mesh=problem.mesh,
        hardware=options.hardware.name,
        precision=options.precision,
        optimizer=options.optimizer,
        strategy=chosen.restriction.name,
        memory_limit_bytes=planned.solver.limit_bytes,
        step_seconds=chosen.seconds,
        compute_seconds=e.compute_seconds,
        communication_seconds=e.communication_seconds,
        recompute_seconds=e.recompute_seconds,
        exposed_seconds=max(0.0, chosen.exposed_seconds - exposed_seconds(chosen)),
        beside_seconds=e.beside_seconds,
        bound=max(0.0, min(chosen.bound_seconds, chosen.searched_seconds)),
        gap=chosen.gap,
        program=chosen.program,
        peak_bytes=planned.live_bytes.peak_bytes,
        memory=planned.live_bytes.most,
        at_peak=planned.live_bytes.at_peak,
        collectives=collectives_of(problem, e, options.hardware, pricer.micro_batches) + _of_update(problem, e),
        regions=regions_of(problem, e),
        alternatives=rows,
        recomputed=_recomputed(e, True),
        recomputed_selectively=_recomputed(e, False),
        recomputed_kinds=_recomputed_kinds(problem, e),
        warnings=planned.warnings + _without_copies(0 if options.may_copy_none else options.hot, copies),
        layouts=_layouts(problem, e),
        sharding=sharding,
        reduce_scatter=options.hardware.reduce_scatter_lowering,
        bucket_bytes=float(pricer.bucket_bytes),
        fingerprint=fingerprint(planned.captured.graph),
        planning_seconds=planned.seconds,
        parameter_elements=_elements(problem, False),
        trained_elements=_elements(problem, True),
        pipeline=pipeline,
        samples=samples,
        overlaps=options.hardware.overlap_gain > 0,
        meshes=planned.meshes,
        batches=planned.batches,
        offloaded=offloaded(problem, e),
        saved_on_host=described(problem, e, chosen),
        update_seconds=update_seconds(problem, e),
        reduce_dtype=options.reduce_dtype,
        tiled=tiled.described(problem, e, options.hardware),
        packed=_packed(problem, e),
        attentions=schemes_of(problem, e, pricer.micro_batches),
        routing=routing_of(problem, e, pricer, options.within is not None),
        flops=flops_of_step(problem.graph, sum(pipeline.shares), options.hardware),
        state_dtype=options.state_dtype,
        expert_capacity=options.expert_capacity,
        hot_experts=problem.skew.hot if copies else 0,
        expert_copies=copies,
        execution=options.execution,
        outputs=outputs_in(sharding, problem, pricer, planned.captured),
    )
    plan = of_step(plan, e, pricer.tail.seconds)
    return with_outputs(plan, held_bytes(problem, e, pricer, sum(pipeline.shares)), planned.captured)


def _without_copies(hot: int, copies: ExpertCopies | None) -> tuple[str, ...]:
    """Return what is said where experts are to be copied and no rows are sent to them."""
    if not hot or copies is not None:
        return ()
    return (f"no rows are sent to experts here, so that none is copied in their place (hot_experts={hot})",)


def _alternative(name: str, other: Outcome | AutoparError, pipeline: Pipeline, planned: Planned) -> Alternative:
    """Return what is told of a recipe, in seconds of a step; `pipeline`: the plan's own micro-batches."""
    if isinstance(other, AutoparError):
        return Alternative(name, None, None, None, False, other.message)
    e, micro_batches = other.evaluation, other.pricer.micro_batches
    times = sum(pipeline.shares) if micro_batches == pipeline.micro_batches else micro_batches  # of the largest
    blocks = len(_recomputed(e, True)) + len(_recomputed(e, False))
    held = held_bytes(other.pricer.problem, e, other.pricer, times)
    kept = kept_bytes(held, planned.solver.limit_bytes - e.bytes_, planned.captured)
    return Alternative(
        name,
        times * other.seconds + other.pricer.tail.seconds,
        times * e.communication_seconds,
        e.bytes_ + kept,
        other.fits,
        micro_batches=micro_batches,
        recomputed_blocks=blocks,
        offload=other.pricer.problem.offload.level,
    )


def _staged_alternative(row: StagedRow) -> Alternative:
    """Return what is told of a recipe in stages."""
    if isinstance(row.planned, AutoparError):
        told = Alternative(row.strategy, None, None, None, False, row.planned.message)
    else:
        plan = row.planned.plan
        told = Alternative(
            row.strategy,
            plan.step_seconds,
            plan.communication_seconds,
            plan.peak_bytes,
            plan.peak_bytes <= plan.memory_limit_bytes,
            recomputed_blocks=len(plan.recomputed) + len(plan.recomputed_selectively),
        )
    return replace(told, micro_batches=row.micro_batches, mesh=str(row.mesh), schedule=row.schedule)


def _recomputed(e: Evaluation, wholly: bool) -> tuple[str, ...]:
    """Return the names of the blocks of which all values (`wholly`) are computed again, or else only some."""
    return tuple(block for block, levels in e.recomputed.items() if (FULL in levels) == wholly)


def _recomputed_nodes(problem: Problem, e: Evaluation) -> list[fx.Node]:
    """Return the ops that run again in the backward."""
    vertices = [problem.vertices[v] for v in recomputed_vertices(e)]
    return [node for v in vertices for node in (v.node, *v.casts.values())]


def _recomputed_kinds(problem: Problem, e: Evaluation) -> tuple[str, ...]:
    """Return the kinds of the ops that run again in blocks of which only some do, the most frequent first."""
    wholly = set(_recomputed(e, True))
    kinds = Counter(
        op_base_name(problem.vertices[v].node) for v, block in recomputed_vertices(e).items() if block not in wholly
    )
    return tuple(kind for kind, _ in sorted(kinds.items(), key=lambda pair: (-pair[1], pair[0])))


def _packed(problem: Problem, e: Evaluation) -> int:
    """Count the attentions of a forward that tell documents apart."""
    nodes = zip((v.node for v in problem.vertices), problem.copies(e.first))
    return sum(copies for node, copies in nodes if is_packed(node) and node.target is autopar.attention.default)


def _elements(problem: Problem, trained: bool) -> int:
    """Count the elements of all parameters, or of those that train; of a quantized weight those that it has when it is
    dequantized."""
    leaves = [n for n in problem.graph.nodes if n.op == "placeholder"]
    found = {n for n in leaves if n.meta["role"].kind == "parameter" and isinstance(n.meta["val"], torch.Tensor)}
    if trained:
        return sum(n.meta["val"].numel() for n in found if n.meta["role"].trainable)
    packed = {n.args[0]: n for n in problem.graph.nodes if n.target is autopar.dequantize.default}
    parts = {part for n in packed.values() for part in n.all_input_nodes}
    return sum(n.meta["val"].numel() for n in {*(found - parts), *packed.values()})


def collectives_of(problem: Problem, e: Evaluation, hardware: Hardware, micro_batches: int) -> tuple[Collective, ...]:
    """Return the collectives of a step; their seconds are of an average pass."""
    found = _Added()
    for v, copies in zip(problem.vertices, problem.copies(e.first)):
        strategy, phase = problem.choices(v.index).strategies[e.choice[v.index]], v.node.meta.get("phase", "")
        times = copies * micro_batches
        if axes := exchange_axes(v.node, strategy, problem.mesh):
            bytes_ = exchange_bytes(v.node, strategy, problem.mesh)
            seconds = exchange_seconds(v.node, strategy, problem.mesh, hardware)
            found.add("all_to_all", axes, phase, times, times * bytes_, copies * seconds)
        if made := copies_of(v.node, strategy, problem.mesh, problem.skew.hot):
            seconds = problem.copy_cost.all_reduce_seconds(made) if problem.copy_cost else 0.0
            found.add("all_reduce", made.axes, phase, times, times * made.sent_bytes(problem.mesh), copies * seconds)
        if ring := ring_of(v.node, strategy, problem.mesh):
            seconds = ring.sent_seconds(problem.mesh, hardware)
            found.add("all_to_all", ring.axes, phase, times * ring.messages, times * ring.sent_bytes, copies * seconds)
    return found.with_transfers(problem, e).collectives


def collectives_of_transfers(
    problem: Problem, e: Evaluation, times: Callable[[Transfer], int]
) -> tuple[Collective, ...]:
    """Return the collectives of the transfers of a step alone, each so many times."""
    return _Added().with_transfers(problem, e, times).collectives


class _Added:
    """Collectives that are added up by kind, axes and phase."""

    def __init__(self) -> None:
        self.count: Counter[tuple] = Counter()
        self.wire, self.seconds = defaultdict[tuple, float](float), defaultdict[tuple, float](float)

    def add(self, kind: str, axes: tuple[str, ...], phase: str, count: int, bytes_: float, seconds: float) -> None:
        """Add as many collectives of one kind, with all their bytes, and their seconds in an average pass."""
        key = (kind, axes, phase)
        self.count[key] += count
        self.wire[key] += bytes_
        self.seconds[key] += seconds

    def with_transfers(
        self, problem: Problem, e: Evaluation, times: Callable[[Transfer], int] = lambda transfer: 1
    ) -> _Added:
        """Add the collectives of all transfers of a step, each so many times."""
        for transfer in e.every_transfer:
            many = times(transfer)
            for step, seconds in transfer.step_seconds if many else ():
                if step.move.kind != "slice":
                    kind, calls = transfer.called_as(step, problem.mesh)
                    count, bytes_ = transfer.times * many, step.wire_fraction * transfer.bytes_ * transfer.times * many
                    self.add(kind, step.move.axes, transfer.phase, count * calls, bytes_, seconds * many)
        return self

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Return the collectives, those of the forward first."""
        in_order = sorted(self.count, key=lambda key: (key[2] != "forward", key))
        return tuple(Collective(*key, self.count[key], self.wire[key], self.seconds[key]) for key in in_order)


def _of_update(problem: Problem, e: Evaluation) -> tuple[Collective, ...]:
    """Return the collectives of the optimizer's step, whose seconds are part of the plan's `update_seconds`."""
    cost = problem.orthogonalize
    if cost is None:
        return ()
    found: dict[tuple[str, tuple[str, ...]], Collective] = {}
    for v, copies in zip(problem.vertices, problem.copies(e.first)):
        if v.kind != "parameter" or not v.is_matrix:
            continue
        layout = problem.choices(v.index).strategies[e.choice[v.index]].outputs[0]
        bytes_ = ELEMENT_BYTES * v.node.meta["val"].numel()
        for step in cost.gather(layout).steps:
            kind, axes = step.move.kind, step.move.axes
            seconds = cost.prices.at_once.pair(step.before, step.after, bytes_) / cost.micro_batches
            known = found.get((kind, axes), Collective(kind, axes, "optimizer", 0, 0.0, 0.0))
            found[kind, axes] = replace(
                known,
                count=known.count + copies,
                wire_bytes=known.wire_bytes + step.wire_fraction * bytes_ * copies,
                seconds=known.seconds + seconds * copies,
            )
    return tuple(found[key] for key in sorted(found))


def _layouts(problem: Problem, e: Evaluation) -> dict[str, str]:
    return {
        v.node.meta["role"].name: problem.choices(v.index).strategies[e.choice[v.index]].outputs[0].text()
        for v in problem.vertices
        if v.kind in ("parameter", "input")
    }


def _sharding(problem: Problem, e: Evaluation, pricer: Pricer) -> Sharding:
    """Return the decisions that the lowering reads."""

    def strategy(index: int):
        return problem.choices(index).strategies[e.choice[index]]

    nodes, leaves = {}, {}
    for v in problem.vertices:
        s = strategy(v.index)
        if v.kind == "op":
            nodes[v.node.name] = NodeSharding(s.inputs, s.outputs, s.choice)
        elif v.kind != "output":
            leaves[v.node.name] = s.outputs[0]
        for output, cast in v.casts.items():
            nodes[cast.name] = NodeSharding((s.outputs[output],), (s.outputs[output],), ())
    tensors = {(v, output): problem.vertices[v].tensor(output) for v, output, _ in e.retained}
    retained = {(tensors[v, output][0].name, tensors[v, output][1], layout) for v, output, layout in e.retained}
    redistribute = pricer.redistribute
    return Sharding(
        problem.mesh,
        redistribute.links,
        redistribute.memory_bytes_per_second,
        nodes,
        leaves,
        _outputs(problem, strategy),
        frozenset(retained),
        frozenset(node.name for node in _recomputed_nodes(problem, e)),
        frozenset(v.name for v in problem.vertices if strategy(v.index).on_host),
        pricer.prices.hierarchy,
        loops_of(problem, e),
        exchanges_of(problem, e),
    )


def _outputs(problem: Problem, strategy) -> tuple:
    """Return the layout of every output of the graph."""
    layouts = {}
    for use in problem.output_uses:
        s, v = strategy(use.consumer), problem.vertices[use.consumer]
        if use.slot == STATE:
            layouts[v.kind, v.node.meta["role"].name] = s.outputs[0]
        else:
            layouts[v.name] = s.inputs[use.slot]
    roles = output_node(problem.graph).meta["roles"]
    own = [layouts.get(f"{r.kind}:{r.name}") for r in roles]
    partners = [
        next((layouts[k, r.name] for k in PARTNERS.get(r.kind, ()) if (k, r.name) in layouts), None) for r in roles
    ]
    return tuple(mine or theirs for mine, theirs in zip(own, partners))
