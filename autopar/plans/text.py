"""The text of a plan: stable, sorted, diffable. One function a section; units are in autopar/utils/format.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..utils.format import byte_column, byte_unit, column, ms, number, percent, size, table
from .attentions import attention_lines
from .axes import axis_lines
from .entries import Alternative, Region
from .file import MEMORY_KINDS
from .loops import loop_lines
from .pipeline_text import pipeline_lines
from .routing import routing_lines
from .tiled import ATTENTION
from .wording import wording

if TYPE_CHECKING:
    from .plan import Plan
    from .tiled import TiledRegion

MOST_KINDS = 6  # that a line names
CLOSED = 0.2  # of the model's FLOPs, from which on a plan says how many masks close


def plan_text(plan: Plan) -> str:
    """Return all of a plan, in sections: result, pipeline, modules, attentions, collectives, loops, outputs, memory,
    recomputation, offload, alternatives, meshes, batches, warnings."""
    sections = (_result, pipeline_lines, _modules, _attentions, _collectives, loop_lines, _outputs,
                _memory, recomputed_lines, tiled_lines, offloaded_lines, _alternatives, _meshes, _batches,
                _warnings)  # fmt: skip
    return "\n\n".join("\n".join(lines) for section in sections if (lines := section(plan))) + "\n"


def summary(plan: Plan) -> str:
    """Return the result alone: four lines, and more on axes, micro-batches and trained parameters where there is
    something to say."""
    return "\n".join(_result(plan))


def _result(plan: Plan) -> list[str]:
    devices, words = f"{plan.mesh.devices} device{'s' if plan.mesh.devices > 1 else ''}", wording(plan)
    return [
        f"plan of {plan.model} on mesh {plan.mesh} ({devices}, {plan.hardware}), {plan.precision_text}, "
        f"{plan.optimizer_text}, strategy {plan.strategy}, run {plan.execution_text}",
        f"step {ms(plan.step_seconds)} = {parts_of(plan)}; {words.bound(plan)} (gap {plan.gap:.2%})",
        words.progress(plan),
        f"peak {size(plan.peak_bytes)} a device, {percent(plan.peak_bytes, plan.memory_limit_bytes)} of "
        f"{size(plan.memory_limit_bytes)}",
        *([str(plan.program)] if plan.program.choices else []),
        *utilization_lines(plan),
        *words.unsharded(plan),
        *axis_lines(plan),
        *_packed(plan),
        *routing_lines(plan),
        *words.batches(plan),
        *speed_lines(plan),
        *_trained(plan),
        *([f"FP8, as the planner chose: {plan.fp8}"] if plan.fp8 else []),
    ]


def utilization_lines(plan: Plan) -> list[str]:
    """Return a line on the share of the devices' peak that the model's FLOPs make up, and whether that has been reached
    on such devices; none if the plan does not know."""
    f = plan.flops
    if not plan.utilization:
        return []
    reached, computed = plan.utilization * f.peak_per_second / 1e12, plan.utilization * (1 - f.closed / f.model)
    notes = [f", {percent(computed, 1.0)} without what causal masks close"] if f.closed > CLOSED * f.model else []
    if 0 < f.published < (computed if notes else plan.utilization):
        notes.append(f", above the {percent(f.published, 1.0)} that is published of {plan.hardware}: expect less")
    return [
        f"MFU {percent(plan.utilization, 1.0)}: {number(reached)} of {number(f.peak_per_second / 1e12)} TFLOP/s in "
        f"{f.dtype} a device{''.join(notes)}"
    ]


def speed_lines(plan: Plan) -> list[str]:
    """Return a line on the tokens a second, if the batch was free to choose."""
    found = [b for b in plan.batches if b.samples == plan.samples]
    return [
        f"{b.tokens_per_second:,.0f} {_unit(plan)} a second, the most of the batches tried: {b.samples}" for b in found
    ]


def _unit(plan: Plan) -> str:
    return "tokens" if any(b.tokens != b.samples for b in plan.batches) else "samples"


def parts_of(plan: Plan) -> str:
    """Return what the step's seconds are made of, as text."""
    text = " + ".join(f"{name} {ms(seconds)}" for name, seconds in _parts(plan).items() if seconds) or "nothing"
    return text + (f" - {ms(hidden)} of it hidden" if (hidden := hidden_seconds(plan)) else "")


def hidden_seconds(plan: Plan) -> float:
    """Return what the step's parts take more than the step, because they run beside each other; 0 for what is mere
    rounding."""
    hidden = sum(_parts(plan).values()) - plan.step_seconds
    return hidden if hidden > 1e-6 * plan.step_seconds else 0.0


def _parts(plan: Plan) -> dict[str, float]:
    return {
        "compute": plan.compute_seconds,
        "communication": plan.communication_seconds,
        "recomputation": plan.recompute_seconds,
        "optimizer": plan.update_seconds,
        "offload": plan.offloaded.seconds,
        "copies of activations": plan.saved_on_host.seconds if plan.saved_on_host else 0.0,
        "waiting": waiting_seconds(plan),
    }


def waiting_seconds(plan: Plan) -> float:
    """Return what the mean rank waits in a step: nothing without stages, nor where it is mere rounding."""
    busy = plan.compute_seconds + plan.recompute_seconds + plan.exposed_seconds + plan.offloaded.seconds
    busy += plan.update_seconds + (plan.saved_on_host.exposed_seconds if plan.saved_on_host else 0.0)
    waits = plan.step_seconds - busy
    return waits if waits > 1e-6 * plan.step_seconds else 0.0


def _packed(plan: Plan) -> list[str]:
    if not plan.packed:
        return []
    readers = "an attention reads" if plan.packed == 1 else f"{plan.packed} attentions read"
    return [
        f"documents packed into rows: {readers} their numbers instead of a mask of all pairs; priced as if a row were "
        "one document"
    ]


def _trained(plan: Plan) -> list[str]:
    trained, all_ = plan.trained_elements, plan.parameter_elements
    return [f"trains {trained:,} of {all_:,} parameters, {percent(trained, all_)}"] if trained < all_ else []


def _modules(plan: Plan) -> list[str]:
    regions = in_tree_order(plan.regions)
    if not regions:
        return []
    unit, bytes_ = byte_column([r.bytes_ for r in regions])
    seconds = [r.compute_seconds for r in regions] + [r.communication_seconds for r in regions]
    milliseconds = column([s * 1e3 for s in seconds])  # one number of decimals for both columns
    rows = zip(
        [r.name if r.copies == 1 else f"{r.name} (x{r.copies})" for r in regions],
        [r.weights or "-" for r in regions],
        [r.activations or "-" for r in regions],
        [" ".join(f"{kind}:{count}" for kind, count in r.collectives.items()) or "-" for r in regions],
        milliseconds[: len(regions)],
        milliseconds[len(regions) :],
        bytes_,
    )
    header = ["module", "weights", "activations", "collectives", "compute ms", "comm ms", unit]
    return table(header, list(rows), left=4)


def in_tree_order(regions: Sequence[Region]) -> list[Region]:
    """Return modules as they first appear, each followed by what is inside of it; what belongs to no module comes
    last."""
    first: dict[tuple[str, ...], int] = {}  # of every module, and of every module around one
    for position, region in enumerate(regions):
        names = region.name.split(".")
        for depth in range(1, len(names) + 1):
            first.setdefault(tuple(names[:depth]), position)

    def order(region: Region) -> tuple[bool, list[int]]:
        names = region.name.split(".")
        return region.name.startswith("("), [first[tuple(names[:depth])] for depth in range(1, len(names) + 1)]

    return sorted(regions, key=order)


def _attentions(plan: Plan) -> list[str]:
    return attention_lines(plan.attentions)


def _collectives(plan: Plan) -> list[str]:
    if not plan.collectives:
        return []
    unit, sent = byte_column([c.wire_bytes for c in plan.collectives])
    rows = zip(
        [f"{c.phase} {c.kind}" for c in plan.collectives],
        [",".join(c.axes) for c in plan.collectives],
        [str(c.count) for c in plan.collectives],
        sent,
        column([c.seconds * 1e3 for c in plan.collectives]),
    )
    lines = table([wording(plan).collectives, "axes", "count", f"{unit} sent by a device", "ms"], list(rows), left=2)
    order = plan.mesh.names.index
    used = {(c.kind, tuple(sorted(c.axes, key=order))) for c in plan.collectives if c.phase != "optimizer"}
    return lines + [str(steps) for key, steps in plan.sharding.hierarchy.items() if key in used]


def _outputs(plan: Plan) -> list[str]:
    unmade = [
        f"outputs beside the loss are not kept, all micro-batches' would take {size(plan.unmade_bytes)} a device: "
        "reading one runs the forwards again"
    ]
    return _gathered_outputs(plan) + (unmade if plan.unmade_bytes else [])


def _gathered_outputs(plan: Plan) -> list[str]:
    if not plan.outputs:
        return []
    unit, sent = byte_column([o.wire_bytes for o in plan.outputs])
    rows = zip(
        [f"{o.name} {o.shape}" for o in plan.outputs],
        [o.layout for o in plan.outputs],
        sent,
        column([o.seconds * 1e3 for o in plan.outputs]),
    )
    return table(["outputs", "layout", f"{unit} sent by a device if read", "ms"], list(rows), left=2)


def _memory(plan: Plan) -> list[str]:
    header, rows = memory_table(plan)
    return table([wording(plan).memory, *header], rows)


def memory_table(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """Return (header without the first column, rows): by kind of memory the most ever, and what of it is there at the
    peak."""
    kinds = [k for k in MEMORY_KINDS if k in plan.memory]
    at_peak = [*(plan.at_peak.get(k, 0.0) for k in kinds), plan.peak_bytes]
    reserve = plan.at_peak.get(MEMORY_KINDS[-1], 0.0)  # next to which a small model would round to nothing
    unit, cells = byte_column([*(plan.memory[k] for k in kinds), *at_peak], plan.peak_bytes - reserve)
    return [f"most {unit}", "at the peak", "of the limit"], [
        [kind, most, now, percent(bytes_, plan.memory_limit_bytes)]
        for kind, most, now, bytes_ in zip(
            [*kinds, "in all"], [*cells[: len(kinds)], "-"], cells[len(kinds) :], at_peak
        )
    ]


def in_order(memory: dict[str, float]) -> dict[str, float]:
    """Return the kinds of memory in the order that they are printed in."""
    known = [k for k in MEMORY_KINDS if k in memory] + sorted(set(memory) - set(MEMORY_KINDS))
    return {k: memory[k] for k in known}


def recomputed_lines(plan: Plan) -> list[str]:
    """Return lines on the blocks that the backward recomputes, in part or whole."""
    lines = []
    kinds = ", ".join(plan.recomputed_kinds[:MOST_KINDS]) + (", ..." if len(plan.recomputed_kinds) > MOST_KINDS else "")
    for what, blocks in ((f"{kinds} of ", plan.recomputed_selectively), ("", plan.recomputed)):
        if blocks:
            few = ", ".join(blocks[:4]) + (" ..." if len(blocks) > 4 else "")
            lines.append(
                f"recomputed in the backward: {what}{len(blocks)} block{'s' if len(blocks) > 1 else ''}: {few}"
            )
    return lines


def tiled_lines(plan: Plan) -> list[str]:
    """Return a line on each last layer and loss in blocks, without logits, one on the MLPs in pieces, and one on
    attentions in pieces of their queries."""
    losses = [
        f"loss of {t.layer or t.node} in blocks: {size(t.bytes_)} of logits a device are never whole, nor their "
        f"gradient; the backward makes them again, {ms(t.seconds)} more of compute"
        for t in plan.tiled
        if t.is_loss
    ]
    rows, queries = [t for t in plan.tiled if t.is_of_rows], [t for t in plan.tiled if t.kind]
    return losses + [_pieces_line(what, some) for what, some in (("rows", rows), ("queries", queries)) if some]


def _pieces_line(what: str, regions: Sequence[TiledRegion]) -> str:
    """Return the line on regions of one kind in pieces."""
    names = list(dict.fromkeys(re.sub(r"\d+", "*", t.layer or t.node) for t in regions))
    pieces, largest = max(t.pieces for t in regions), max(t.bytes_ for t in regions)
    many = f"{', '.join(names[:4])}{' ...' if len(names) > 4 else ''} (x{len(regions)})"
    line = f"{what} of {many} in {pieces} piece{'s' if pieces > 1 else ''}"
    if all(t.kind == ATTENTION for t in regions):
        return f"{line}: what attention allocates, and sums of keys' gradients, are there for a piece at a time"
    return (
        f"{line}: {size(largest)} of activations a device inside of each are there for a piece at a time; the backward "
        f"makes them again, {ms(sum(t.seconds for t in regions))} more of compute"
    )


def offloaded_lines(plan: Plan) -> list[str]:
    """Return a line on the parameters that the plan keeps on the host, and one on the activations that wait there."""
    o, saved = plan.offloaded, plan.saved_on_host
    line = (
        f"on the host: {o.parameters} parameter{'s' if o.parameters > 1 else ''} with gradients and optimizer state, "
        f"{size(o.host_bytes)} a device; {ms(o.copy_seconds)} a step to copy, {ms(o.optimizer_seconds)} for the "
        f"optimizer there"
    )
    lines = [line] if o.parameters else []
    if saved is not None:
        many = len(saved.values)
        hidden = percent(saved.seconds - saved.exposed_seconds, saved.seconds)
        lines.append(
            f"on the host between forward and backward: {many} activation{'s' if many > 1 else ''}, "
            f"{size(saved.bytes_)} a device; {ms(saved.seconds)} a step to copy them there and back, {hidden} hidden"
        )
    return lines


def _alternatives(plan: Plan) -> list[str]:
    if not plan.alternatives:
        return []
    header, rows = alternatives_table(plan)
    return table(["costed by the same model", *header], rows) + without_price(plan)


def without_price(plan: Plan) -> list[str]:
    """Return a line for each alternative that has no price, which says why."""
    return [f"{a.label}: {a.note.removeprefix(a.name + ' ')}" for a in plan.alternatives if a.step_seconds is None]


def costed(plan: Plan) -> list[Alternative]:
    """Return the plan and the alternatives that have a price."""
    this = Alternative(
        "this plan",
        plan.step_seconds,
        plan.communication_seconds,
        plan.peak_bytes,
        True,
        micro_batches=plan.micro_batches,
    )
    return [this, *(a for a in plan.alternatives if a.step_seconds is not None)]


def alternatives_table(plan: Plan) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return (header without the first column, a row for each of `costed`); bytes are in the unit that suits the plan's
    own."""
    shown = costed(plan)
    unit, scale = byte_unit(plan.peak_bytes)
    rows = zip(
        [a.label for a in shown],
        column([None if a.step_seconds is None else a.step_seconds * 1e3 for a in shown]),
        column([(a.communication_seconds or 0.0) * 1e3 for a in shown]),
        column([None if a.peak_bytes is None else a.peak_bytes / scale for a in shown]),
        [_against(a, plan) for a in shown],
        *([hows] if any(hows := [_how(a, plan) for a in shown]) else []),
    )
    return ["step ms", "comm ms", unit, "time", *([""] if any(hows) else [])], list(rows)


def _how(a: Alternative, plan: Plan) -> str:
    """Say what makes an alternative fit."""
    blocks = f"{a.recomputed_blocks} block{'s' if a.recomputed_blocks > 1 else ''} recomputed"
    said = {
        a.schedule: a.schedule,
        f"{a.micro_batches} micro-batches": a.micro_batches != plan.micro_batches,
        blocks: a.recomputed_blocks,
        "optimizer on the host": a.offload == "optimizer",
    }
    return ", ".join(text for text, is_so in said.items() if is_so and a.fits)


def _meshes(plan: Plan) -> list[str]:
    if not plan.meshes:
        return []
    return table(*meshes_table(plan))


def meshes_table(plan: Plan) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return (header, rows) of the meshes that were tried, best first."""
    unit, bytes_ = byte_column([m.peak_bytes for m in plan.meshes])
    rows = zip(
        [m.mesh for m in plan.meshes],
        column([m.bound * 1e3 for m in plan.meshes]),
        column([None if m.step_seconds is None else m.step_seconds * 1e3 for m in plan.meshes]),
        bytes_,
        ["-" if m.gap is None else f"{m.gap:.2%}" for m in plan.meshes],
        [m.note for m in plan.meshes],
    )
    return ["meshes tried", "at least ms", "step ms", unit, "gap", ""], list(rows)


def _batches(plan: Plan) -> list[str]:
    if not plan.batches:
        return []
    unit, bytes_ = byte_column([b.peak_bytes for b in plan.batches])
    rows = zip(
        [str(b.samples) for b in plan.batches],
        column([None if b.step_seconds is None else b.step_seconds * 1e3 for b in plan.batches]),
        bytes_,
        [f"{b.tokens_per_second:,.0f}" if b.step_seconds else "does not fit" for b in plan.batches],
    )
    return table(["batches tried", "step ms", unit, f"{_unit(plan)} a second"], list(rows))


def _against(a: Alternative, plan: Plan) -> str:
    if not a.fits or a.step_seconds is None:
        return "does not fit"
    return f"{a.step_seconds / plan.step_seconds:.2f}x" if plan.step_seconds else "-"


def _warnings(plan: Plan) -> list[str]:
    return [f"warning: {w}" for w in plan.warnings]
