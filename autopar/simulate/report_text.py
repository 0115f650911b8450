"""The text of a verification: what was compared, how far apart it is, and where it first differs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..plans.wording import wording
from ..utils.format import size, table
from .tolerances import CAPTURED, TOLERANCE

if TYPE_CHECKING:
    from .compare import VerifyReport


def verify_text(report: VerifyReport) -> str:
    """Return a table of relative errors, the traffic, and on the last line `match` or what differs first."""
    plan, names = report.plan, _names(report)
    loss = "" if report.loss is None else f", loss {report.loss:.6g}"
    schedule = wording(plan).schedule(plan)
    lines = [
        f"one step of {plan.model} simulated on mesh {plan.mesh}, strategy {plan.strategy}{schedule}, against eager "
        f"torch{loss}",
        "",
        *(_errors(report, names) if report.wide is None else _mixed_errors(report, names)),
        "",
        *_traffic(report),
        "",
    ]
    if report.match:
        return "\n".join([*lines, "match"]) + "\n"
    return "\n".join([*lines, *_divergence(report), f"no match: {_beyond(report)}"]) + "\n"


def _names(report: VerifyReport) -> dict[str, str]:
    """Return what an error is of, by its key in `report.errors`."""
    first = {"loss": "loss" if report.loss is not None else "outputs"}
    gradients = {name: f"gradient of {name}" for name in report.gradient_errors}
    return first | gradients | {name: f"new value of {name}" for name in report.buffer_errors}


def _errors(report: VerifyReport, names: dict[str, str]) -> list[str]:
    rows = [[names[key], _error(e), _mark(e, report.tolerance(key))] for key, e in report.errors.items()]
    return table(["compared", "relative error", ""], rows)


def _mixed_errors(report: VerifyReport, names: dict[str, str]) -> list[str]:
    """Return the table with what one device itself loses by rounding, and the errors of the step in the wider type."""
    exact, rows = report.wide, []
    for key, error in report.errors.items():
        bad = _mark(error, report.tolerance(key)) or _mark(exact.errors[key], exact.tolerance(key))
        rows.append([names[key], _error(error), _error(report.rounding[key]), _error(exact.errors[key]), bad])
    mine, wide = report.precision, exact.precision
    return table(["compared", f"error in {mine}", f"of one device to {wide}", f"error in {wide}", ""], rows)


def _beyond(report: VerifyReport) -> str:
    if report.wide is not None and not report.wide.match:
        return f"in {report.wide.precision}, {_beyond(report.wide)}"
    seen = report.capture_errors
    if seen and not max(seen.values()) <= CAPTURED:
        worst = max(seen, key=seen.__getitem__)
        what = "loss" if worst == "loss" else f"gradient of {worst}"
        graph = f"the captured graph{_after_passes(report)}"
        return f"{graph} is not the model: {what} is off by {seen[worst]:.1e} on one device, without rounding"
    return f"errors above {TOLERANCE[report.precision]:.0e}" + (
        " and what rounding explains" if report.rounding else ""
    )


def _after_passes(report: VerifyReport) -> str:
    return f", changed by {', '.join(report.passes)}," if report.passes else ""


def _error(error: float) -> str:
    return "0" if error == 0 else f"{error:.1e}"


def _mark(error: float, tolerance: float) -> str:
    return "" if error <= tolerance else "<-"


def _traffic(report: VerifyReport) -> list[str]:
    least, most = min(report.sent_bytes), max(report.sent_bytes)
    sent = size(most) if least == most else f"{size(least)} to {size(most)}"
    calls = " ".join(f"{kind}[{','.join(axes)}]:{n}" for (kind, axes), n in sorted(report.collectives.items()))
    words, sends = wording(report.plan), report.sends
    between = f"sent between stages, values of {report.plan.micro_batches} micro-batches: "
    return [
        f"{words.sent}: {sent}, predicted {size(report.predicted_bytes)}",
        f"{words.called}: {calls or 'none'}",
        *([f"{between}{sends['forward']} forward, {sends['backward']} back"] if sends else []),
    ]


def _divergence(report: VerifyReport) -> list[str]:
    at = report.diverging
    if isinstance(at, str):
        return [at]
    if at is None and not max(report.capture_errors.values(), default=0.0) <= CAPTURED:
        return ["every op has the value of the unsharded graph, which is not that of eager torch"]
    if at is None:
        return [
            "every op has the value that it has on one device: collectives behind the last ones make the difference"
        ]
    where = " ".join(filter(None, (at.module, at.source)))
    return [
        f"first node that differs: {at.node} ({at.layout}), relative error "
        f"{at.error:.1e}{', ' + where if where else ''}"
    ]
