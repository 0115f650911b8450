"""The text of a verification: what was compared, how far apart it is, and where it first differs."""

from __future__ import annotations

from ..simulated import VerifyReport
from .units import size, table


def verify_text(report: VerifyReport) -> str:
    """A table of relative errors, the traffic, and on the last line `match` or what differs first."""
    plan, rows = report.plan, []
    rows.append(["loss" if report.loss is not None else "outputs", _error(report.loss_error)])
    rows += [[f"gradient of {name}", _error(e)] for name, e in report.gradient_errors.items()]
    rows += [[f"new value of {name}", _error(e)] for name, e in report.buffer_errors.items()]
    loss = "" if report.loss is None else f", loss {report.loss:.6g}"
    lines = [
        f"one step of {plan.model} simulated on mesh {plan.mesh}, strategy {plan.strategy}, against eager torch{loss}",
        "",
        *table(["compared", "relative error", ""], [[name, error, _mark(error, report.tolerance)] for name, error in rows]),
        "",
        *_traffic(report),
        "",
    ]
    if report.match:
        return "\n".join([*lines, "match"]) + "\n"
    return "\n".join([*lines, *_divergence(report), f"no match: errors above {report.tolerance:.0e}"]) + "\n"


def _error(error: float) -> str:
    return "0" if error == 0 else f"{error:.1e}"


def _mark(error: str, tolerance: float) -> str:
    return "" if float(error) <= tolerance else "<-"


def _traffic(report: VerifyReport) -> list[str]:
    least, most = min(report.sent_bytes), max(report.sent_bytes)
    sent = size(most) if least == most else f"{size(least)} to {size(most)}"
    calls = " ".join(f"{kind}[{','.join(axes)}]:{n}" for (kind, axes), n in sorted(report.collectives.items()))
    return [
        f"sent by a rank: {sent}, predicted {size(report.predicted_bytes)}",
        f"collectives of rank 0: {calls or 'none'}",
    ]


def _divergence(report: VerifyReport) -> list[str]:
    at = report.diverging
    if at is None:
        return ["every node of the graph has the value of the unsharded graph, which is not that of eager torch"]
    where = " ".join(filter(None, (at.module, at.source)))
    return [f"first node that differs: {at.node} ({at.layout}), relative error {at.error:.1e}{', ' + where if where else ''}"]
