"""Say what one plan decides otherwise than another: differing lines alone, equal blocks of a module list as one
line."""

from __future__ import annotations

import re
from collections import defaultdict

from ..utils.format import byte_column, ms, percent, size
from .file import MEMORY_KINDS
from .pipeline_text import stages_text
from .plan import Plan
from .text import in_tree_order, waiting_seconds


def diff_text(a: Plan, b: Plan) -> str:
    """Return lines of `what: before -> after`, in sections; the text is empty if nothing differs."""
    sections = {
        "made for": _pairs(_made_for(a), _made_for(b)),
        "pipeline": _pairs(_pipeline(a), _pipeline(b)),
        "costs": _pairs(_costs(a), _costs(b)),
        "memory of a device": _memory(a, b),
        "layouts of parameters and inputs": _folded(a.layouts, b.layouts),
        "layouts of activations": _pairs(_activations(a), _activations(b)) + _ops(a, b),
        "recomputed in the backward": _folded(_recomputed(a), _recomputed(b)),
        "collectives": sorted(
            _pairs(_collectives(a), _collectives(b)), key=lambda line: (not line.startswith("forward"), line)
        ),
    }
    return "\n".join(
        "\n".join([name, *(f"  {line}" for line in lines)]) + "\n" for name, lines in sections.items() if lines
    )


def _made_for(plan: Plan) -> dict[str, str]:
    names = (
        "model", "mesh", "hardware", "execution", "precision", "reduce_dtype", "optimizer", "state_dtype", "strategy",
        "micro_batches", "reduces_once", "expert_capacity", "hot_experts",
    )  # fmt: skip
    graph = {"graph": plan.fingerprint[:12], "memory limit": size(plan.memory_limit_bytes)}
    return {name: str(getattr(plan, name)) for name in names} | graph


def _recomputed(plan: Plan) -> dict[str, str]:
    return dict.fromkeys(plan.recomputed_selectively, "in part") | dict.fromkeys(plan.recomputed, "all")


def _costs(plan: Plan) -> dict[str, str]:
    seconds = {
        "step": plan.step_seconds, "compute": plan.compute_seconds,
        "communication": plan.communication_seconds, "exposed": plan.exposed_seconds,
        "recomputation": plan.recompute_seconds, "optimizer": plan.update_seconds,
        "offload": plan.offloaded.seconds,
        "bound": plan.bound,
    }  # fmt: skip
    if plan.saved_on_host:
        seconds["copies of activations"] = plan.saved_on_host.seconds
    waits = waiting_seconds(plan)
    return {name: ms(value) for name, value in seconds.items()} | (
        {"waiting of the mean rank": ms(waits)} if waits else {}
    )


def _pipeline(plan: Plan) -> dict[str, str]:
    """Return the schedule, and for each stage where it runs, what it holds and how long a micro-batch takes there."""
    p = plan.pipeline
    if not p.costs:
        return {}
    found = {
        "schedule": p.schedule, "micro-batches": str(p.micro_batches),
        "stages": f"{p.stages_per_rank} on each of {p.ranks} ranks", "bubble": percent(p.played().bubble, 1.0),
        "slowest stage": f"{p.balance:.2f} times the mean",
    }  # fmt: skip
    for i, (c, rank) in enumerate(zip(p.costs, p.orders.rank_of_stage)):
        backward = c.input_seconds + c.weight_seconds
        found[f"stage {i}"] = f"{c.name} on rank {rank}, F {ms(c.forward_seconds)}, B {ms(backward)}"
    return found | {f"sharding of {stages_text(s)}": _layouts_text(s.layouts) for s in plan.shardings}


def _layouts_text(layouts: dict[str, str]) -> str:
    return ", ".join(f"{what} {layout}" for what, layout in layouts.items())


def _memory(a: Plan, b: Plan) -> list[str]:
    kinds = [*MEMORY_KINDS, "in all"]
    before, after = ({**p.memory, "in all": p.peak_bytes} for p in (a, b))
    unit, cells = byte_column([x.get(kind, 0.0) for kind in kinds for x in (before, after)])
    pairs = zip(kinds, cells[::2], cells[1::2])
    return [f"{kind}: {old} -> {new} {unit}" for kind, old, new in pairs if old != new]


def _activations(plan: Plan) -> dict[str, str]:
    regions = [r for r in in_tree_order(plan.regions) if r.activations]
    return {r.name if r.copies == 1 else f"{r.name} (x{r.copies})": r.activations for r in regions}


def _ops(a: Plan, b: Plan) -> list[str]:
    """Return a line that says how many ops are cut otherwise: there are too many to list."""
    before, after = a.sharding.nodes, b.sharding.nodes
    changed = sum(before.get(name) != after.get(name) for name in {*before, *after})
    return [f"{changed} of {len({*before, *after})} ops are sharded otherwise"] if changed else []


def _collectives(plan: Plan) -> dict[str, str]:
    return {
        f"{c.phase} {c.kind} {','.join(c.axes)}": f"{c.count}, {size(c.wire_bytes)} sent, {ms(c.seconds)}"
        for c in plan.collectives
    }


def _pairs(a: dict[str, str], b: dict[str, str]) -> list[str]:
    return [f"{k}: {a.get(k, 'none')} -> {b.get(k, 'none')}" for k in dict.fromkeys([*a, *b]) if a.get(k) != b.get(k)]


def _folded(a: dict[str, str], b: dict[str, str]) -> list[str]:
    """Return differences by name, where names that differ in their numbers alone and change alike are one line:
    `h.*.mlp (x12)`."""
    found: dict[tuple[str, str], int] = defaultdict(int)
    for name in dict.fromkeys([*a, *b]):
        if a.get(name) != b.get(name):
            row = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
            found[row, f"{a.get(name, 'none')} -> {b.get(name, 'none')}"] += 1
    return [f"{name}{f' (x{count})' if count > 1 else ''}: {change}" for (name, change), count in found.items()]
