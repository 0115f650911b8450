"""The error that a rank raises for what keeps ranks from going on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import fx

from ..errors import AutoparError, CollectiveTimeout, DesyncError, RankFailure
from ..ir.graph import describe
from .causes import Cause, Progress, named


def error_of(
    cause: Cause, here: Progress, rank: int, node: fx.Node | None, otherwise: str, folder: Path | None
) -> AutoparError:
    """Return the error of a rank, which is `here` in the collective of `node` if it is in a graph. `otherwise`: what
    else helps against a late rank; `folder`: where records are."""
    fields: dict[str, Any] = {}
    seen = f"; autopar doctor {folder} says what each rank did" if folder is not None else ""
    if node is not None:
        fields |= dict(node=_in_module(node), source=node.meta.get("source") or None)
    where, ranks = f"{here.what}, step {here.step}" if here.step else here.what, tuple(cause.ranks)
    if cause.kind in ("apart", "unlike"):
        how = "wait for each other" if cause.kind == "apart" else "did not call the same"
        return DesyncError(
            f"ranks {how}: {cause.what}",
            ranks=ranks,
            **fields,
            fix="call the model, backward, the optimizer, no_sync, clip_grad_norm_ and save_checkpoint on every rank "
            "alike, also where a rank skips a batch" + seen,
        )
    fields |= dict(step=here.step, collective=here.what)
    if cause.kind in ("late", "behind"):
        return CollectiveTimeout(
            f"{named(ranks)} did not arrive in time at {where}: {cause.what}",
            ranks=ranks,
            **fields,
            fix=f"see what holds that rank up; AUTOPAR_TIMEOUT_S=seconds waits longer{otherwise}{seen}",
        )
    first = ranks[0] if ranks else None
    fix = f"see the output of rank {first}; start again from a checkpoint" if ranks else "see the error above"
    what = f"{cause.what}, while rank {rank} was at {where}"
    return RankFailure(what, rank=first, fix=fix + seen, **fields)


def _in_module(node: fx.Node) -> str:
    module = node.meta.get("module")
    return f"{describe(node)}{f', in {module}' if module else ''}"
