"""The text of a plan: stable, sorted, diffable; GiB and ms appear only here."""

from __future__ import annotations

from ..plan import Plan

GIB = 2**30


def table(header: list[str], rows: list[list[str]], left: int = 1) -> list[str]:
    """Lines of a table whose first `left` columns are aligned left, the others right."""
    cells = [header, *rows]
    widths = [max(len(row[c]) for row in cells) for c in range(len(header))]

    def line(row: list[str]) -> str:
        return "  ".join(x.ljust(w) if c < left else x.rjust(w) for c, (x, w) in enumerate(zip(row, widths))).rstrip()

    return [line(header), *(line(row) for row in rows)]


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if seconds < 0.1 else f"{seconds * 1e3:.1f}"


def gib(bytes_: float) -> str:
    return f"{bytes_ / GIB:.2f}" if bytes_ >= GIB / 10 else f"{bytes_ / GIB:.4f}"


def size(bytes_: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if bytes_ >= scale:
            return f"{bytes_ / scale:.2f} {unit}"
    return f"{bytes_:.0f} B"


def plan_text(plan: Plan) -> str:
    """All of a plan, in sections: result, modules, collectives, memory, alternatives, warnings."""
    lines = [
        f"plan of {plan.model} on mesh {plan.mesh} ({plan.mesh.devices} devices, {plan.hardware}), {plan.precision}, "
        f"{plan.optimizer}, strategy {plan.strategy}",
        f"step {ms(plan.step_seconds)} ms = compute {ms(plan.compute_seconds)} + communication "
        f"{ms(plan.communication_seconds)} + recompute {ms(plan.recompute_seconds)}; "
        f"no plan is faster than {ms(plan.bound)} ms (gap {plan.gap:.2%})",
        f"peak {size(plan.peak_bytes)} a device of {size(plan.memory_limit_bytes)}",
        "",
    ]
    rows = []
    for r in plan.regions:
        name = r.name if r.copies == 1 else f"{r.name} (x{r.copies})"
        collectives = " ".join(f"{kind}:{count}" for kind, count in r.collectives.items())
        rows.append([name, r.weights or "-", r.activations or "-", str(r.ops), ms(r.compute_seconds),
                     ms(r.communication_seconds), gib(r.bytes_), collectives])  # fmt: skip
    header = ["module", "weights", "activations", "ops", "compute ms", "comm ms", "GiB", "collectives"]
    lines += [*table(header, rows, left=3), ""]
    if plan.collectives:
        rows = [
            [f"{c.phase} {c.kind}", ",".join(c.axes), str(c.count), size(c.wire_bytes), ms(c.seconds)]
            for c in plan.collectives
        ]
        lines += [*table(["collectives", "axes", "count", "sent by a device", "ms"], rows, left=2), ""]
    rows = [[name, gib(bytes_)] for name, bytes_ in plan.memory.items()]
    lines += [*table(["memory of a device", "GiB"], [*rows, ["in all", gib(plan.peak_bytes)]]), ""]
    if plan.recomputed:
        lines += [f"recomputed in the backward: {len(plan.recomputed)} blocks: {_few(plan.recomputed)}", ""]
    if plan.alternatives:
        rows = [["this plan", ms(plan.step_seconds), ms(plan.communication_seconds), gib(plan.peak_bytes), ""]]
        for a in plan.alternatives:
            if a.step_seconds is None:
                rows.append([a.name, "-", "-", "-", a.note])
                continue
            note = "" if a.fits else "does not fit"
            ratio = a.step_seconds / plan.step_seconds
            rows.append(
                [
                    a.name,
                    ms(a.step_seconds),
                    ms(a.communication_seconds),
                    gib(a.peak_bytes),
                    f"{ratio:.2f}x {note}".strip(),
                ]
            )
        lines += [*table(["costed by the same model", "step ms", "comm ms", "GiB", "against this plan"], rows), ""]
    lines += [f"warning: {w}" for w in plan.warnings]
    return "\n".join(lines).rstrip() + "\n"


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")
