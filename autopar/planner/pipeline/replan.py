"""Plans for further calls of a model that a pipeline runs: other shapes, eval, no_grad. Parameters stay on their
stages."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from ...errors import MicroBatchError, StageError
from ...frontend.export import Captured
from ...ir.graph import fingerprint, is_op
from ...ir.stage_placement import StagePlacement
from ...passes.pipeline.micro_batch import MicroBatched, micro_batch
from ...passes.pipeline.sequence_chunks import in_chunks
from ...passes.pipeline.stages import cut
from ...passes.pipeline.tail import check_waits
from ...plans.pipeline import Pipeline
from ...plans.plan import Plan
from ..spmd.batch import options_of_one, samples_of
from ..spmd.plan import make_plan, search
from ..spmd.plan_options import PlanOptions


def with_owners(captured: Captured, plan: Plan) -> Plan:
    """Return a plan that says which parameters and buffers its stages read."""
    micro = _in_micro_batches(captured, plan.pipeline)
    owners = tuple(tuple(sorted(stage.leaves)) for stage in cut(micro.captured.graph_module, plan.pipeline.cuts))
    return replace(plan, pipeline=replace(plan.pipeline, owners=owners))


def plan_same_stages(captured: Captured, first: Plan, options: PlanOptions, model: str) -> Plan:
    """Return a plan for another capture of the model of `first`, with its stages and as many micro-batches, if it can
    be cut so. `options` fix the parameters' layouts. Raise StageError if a stage of the call reads parameters that it
    does not have."""
    pipeline, chunks = first.pipeline, first.pipeline.row_chunks
    count = min(first.micro_batches // chunks, samples_of(captured.signature))
    micro = _micro_batched(captured, replace(pipeline, micro_batches=count * chunks))
    if micro is None and chunks > 1:  # rows of other lengths, which the chunks do not divide
        pipeline = replace(pipeline, row_chunks=1)
        micro = _micro_batched(captured, replace(pipeline, micro_batches=count))
    if pipeline.is_staged:
        micro = micro or micro_batch(captured, 1)
        count, overlay = micro.micro_batches, micro.overlay
        options = replace(options, within=first.mesh, micro_batches=count, overlay=overlay)
    elif micro is None or count == 1:
        return make_plan(captured, first.mesh, options, model)
    else:
        options, pipeline = options_of_one(micro, options), replace(pipeline, schedule=micro.order)
    inputs = {n.name for n in captured.graph.nodes if n.op == "placeholder" and n.meta["role"].kind == "input"}
    fixed = {name: layout for name, layout in options.fixed.items() if name not in inputs}
    options = replace(options, fixed=fixed)
    planned = search(micro.captured, first.sharding.mesh, options, model)
    cuts = _same_cuts(micro.captured.graph, pipeline) or cuts_of(micro.captured.graph, pipeline.owners)
    samples = micro.samples if micro.smaller is not None else 0
    pipeline = replace(pipeline, row_chunks=micro.chunks_of_row)
    pipeline = replace(pipeline, micro_batches=micro.micro_batches, cuts=cuts, costs=(), owners=(), samples=samples)
    plan = replace(
        planned.plan,
        mesh=first.mesh,
        pipeline=pipeline,
        fingerprint=fingerprint(captured.graph),
        samples=samples_of(captured.signature),
    )
    plan = with_owners(captured, plan)
    for stage, (theirs, mine) in enumerate(zip(first.pipeline.owners, plan.pipeline.owners)):
        if moved := sorted({*mine} - {*theirs}):
            raise StageError(
                f"this call reads {', '.join(moved[:4])} in stage {stage}, which does not have them",
                fix="compile with example_inputs of the call that reads most, or use a mesh without pp for this one",
            )
    return plan


def _micro_batched(captured: Captured, pipeline: Pipeline) -> MicroBatched | None:
    """Return a call cut into the micro-batches of a pipeline, None if that cannot run it part by part."""
    with contextlib.suppress(MicroBatchError, StageError):
        micro = _in_micro_batches(captured, pipeline)
        if pipeline.is_staged:
            check_waits(micro.tail, pipeline.orders)
        return micro
    return None


def _in_micro_batches(captured: Captured, pipeline: Pipeline) -> MicroBatched:
    rows = micro_batch(captured, pipeline.micro_batches // pipeline.row_chunks)
    return in_chunks(rows, pipeline.row_chunks)


def _same_cuts(graph: fx.Graph, pipeline: Pipeline) -> tuple[str, ...]:
    """Return the cuts of a pipeline, if a graph has them too and each stage then reads what it has; else none. Other
    sizes leave ops their names, and between two of them may lie what must not be parted, such as rows of experts."""
    try:
        placement = StagePlacement(graph, pipeline.cuts)
    except StageError:
        return ()
    stages = {name: placement.parameters[leaf] for name, leaf in placement.leaves.items()}
    is_there = all(
        name in own for s, own in enumerate(pipeline.owners) for name, mask in stages.items() if mask >> s & 1
    )
    return pipeline.cuts if is_there else ()


def cuts_of(graph: fx.Graph, owners: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return for each stage but the first the first forward op that reads a parameter or buffer of it that no stage
    before it has. Raise StageError if there is none for a stage."""
    placement = StagePlacement(graph, ())
    earliest: dict[str, int] = {}
    for stage, names in enumerate(owners):
        for name in names:
            earliest.setdefault(name, stage)
    cuts: list[str] = []
    for node in placement.nodes:
        if not is_op(node) or node.meta["phase"] != "forward" or node in placement.free:
            continue
        roots = {root for a in node.all_input_nodes for root in placement.roots.get(a, ())}
        roles = [r.meta["role"] for r in roots if r.op == "placeholder"]
        read = [earliest.get(role.name, 0) for role in roles if role.kind in ("parameter", "buffer")]
        while read and max(read) > len(cuts):
            cuts.append(node.name)
    if len(cuts) + 1 != len(owners) or len(set(cuts)) != len(cuts):
        raise StageError(
            f"this call has no op for {len(owners) - len(set(cuts)) - 1} of the {len(owners)} stages",
            fix="compile with example_inputs of the call that does most",
        )
    return tuple(cuts)
