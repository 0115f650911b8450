"""Plans next to each other: one column a plan, the same lines for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..utils.format import byte_column, column, table
from .file import MEMORY_KINDS
from .plan import Plan
from .text import waiting_seconds
from .wording import BOUND_ROWS, wording


def side_by_side(plans: Sequence[Plan], names: Sequence[str]) -> str:
    """Return a table of what the plans are made for, their costs, memory by kind and collectives, one column a plan
    under its name of `names`."""
    sections = [_made_for(plans), _costs(plans), _memory(plans), _collectives(plans)]
    titles = ["", "ms", _memory_unit(plans), f"collectives: count, {_wire_unit(plans)} sent"]
    rows = [[title, *cells] for title, cells in sections[0]]
    for title, section in zip(titles[1:], sections[1:]):
        if section:
            rows += [[""] * (len(plans) + 1), [title, *[""] * len(plans)]]
            rows += [[f"  {label}", *cells] for label, cells in section]
    return "\n".join(table(["plan", *names], rows)) + "\n"


MOST_STAGES = 16  # that are listed
Rows = list[tuple[str, list[str]]]


def _made_for(plans: Sequence[Plan]) -> Rows:
    what: dict[str, Callable[[Plan], str]] = {
        "model": lambda p: p.model, "mesh": lambda p: str(p.mesh).replace(",", " "), "hardware": lambda p: p.hardware,
        "precision": lambda p: p.precision, "optimizer": lambda p: p.optimizer_text, "strategy": lambda p: p.strategy,
        "recomputed blocks": _recomputed,
    }  # fmt: skip
    if any(p.micro_batches > 1 for p in plans):
        what["micro-batches"] = lambda p: str(p.micro_batches)
    what |= {label: partial(_figure, label=label) for p in plans for label in wording(p).figures}
    most = max(len(p.pipeline.costs) for p in plans)
    what |= {f"stage {i}": partial(_stage, i=i) for i in range(min(most, MOST_STAGES))}
    return [(label, list(map(read, plans))) for label, read in what.items()]


def _figure(plan: Plan, label: str) -> str:
    read = wording(plan).figures.get(label)
    return read(plan.pipeline) if read else "-"


def _stage(plan: Plan, i: int) -> str:
    """Return what a stage holds, on which rank, and the number of its sharding if there are several."""
    if i >= len(plan.pipeline.costs):
        return "-"
    own = [k for k, one in enumerate(plan.shardings) if i in one.stages]
    sharding = f", sharding {own[0]}" if own else ""
    return f"{plan.pipeline.costs[i].name}, rank {plan.pipeline.orders.rank_of_stage[i]}{sharding}"


def _recomputed(plan: Plan) -> str:
    """Return how many blocks compute all again, and how many of them some, as "12 and 68 in part"."""
    some = f"{len(plan.recomputed_selectively)} in part" if plan.recomputed_selectively else ""
    return " and ".join(filter(None, (str(len(plan.recomputed) or ""), some))) or "-"


def _costs(plans: Sequence[Plan]) -> Rows:
    seconds = {
        "step": [p.step_seconds for p in plans],
        "compute": [p.compute_seconds for p in plans],
        "communication": [p.communication_seconds for p in plans],
        "of it exposed": [p.exposed_seconds for p in plans],
        "recomputation": [p.recompute_seconds for p in plans],
        "optimizer": [p.update_seconds for p in plans],
        "offload": [p.offloaded.seconds for p in plans],
        "copies of activations": [p.saved_on_host.seconds if p.saved_on_host else 0.0 for p in plans],
        "waiting of the mean rank": [waiting_seconds(p) for p in plans],
        **{row: [p.bound if row == wording(p).bound_row else 0.0 for p in plans] for row in BOUND_ROWS},
    }
    return _aligned(seconds, lambda values: column([1e3 * v for v in values]), len(plans))


def _memory_unit(plans: Sequence[Plan]) -> str:
    return f"{byte_column([p.peak_bytes for p in plans])[0]} of a device"


def _memory(plans: Sequence[Plan]) -> Rows:
    kinds = {
        kind: [p.memory.get(kind, 0.0) for p in plans] for kind in MEMORY_KINDS if any(kind in p.memory for p in plans)
    }
    kinds["in all"] = [p.peak_bytes for p in plans]
    return _aligned(kinds, lambda values: byte_column(values)[1], len(plans))


def _wire_unit(plans: Sequence[Plan]) -> str:
    return byte_column([c.wire_bytes for p in plans for c in p.collectives])[0]


def _collectives(plans: Sequence[Plan]) -> Rows:
    found = [{f"{c.phase} {c.kind} {','.join(c.axes)}": c for c in p.collectives} for p in plans]
    labels = dict.fromkeys(
        sorted({label for f in found for label in f}, key=lambda x: (not x.startswith("forward"), x))
    )
    cells = byte_column([f[label].wire_bytes if label in f else 0.0 for label in labels for f in found])[1]
    sent = iter(cells)
    return [
        (label, [f"{f[label].count}, {cell}" if label in f else "-" for f, cell in zip(found, sent)])
        for label in labels
    ]


def _aligned(values: dict[str, list[float]], show: Callable[[list[float]], list[str]], width: int) -> Rows:
    """Return rows of numbers with one number of decimals for all; those that are nothing everywhere are left out."""
    shown = {label: row for label, row in values.items() if any(row)}
    cells = show([v for row in shown.values() for v in row])
    return [(label, cells[i * width : (i + 1) * width]) for i, label in enumerate(shown)]
