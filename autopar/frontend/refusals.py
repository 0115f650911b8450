"""Explain what a model does that no joint graph can hold: why, at which of the user's lines, and what to write instead.

Some of it can be seen in the forward graph, as control flow over values and gradients that are sparse; the transforms
of torch.func are noted when the model enters one, since what torch says when it cannot trace them names neither them
nor the line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx

from .. import _torch
from .._torch import schema_names
from ..errors import CaptureError
from .user_lines import line_now, line_of_node

aten = torch.ops.aten
BRANCHES = (
    "cond",
    "while_loop",
    "scan",
    "associative_scan",
    "map_impl",
    "map",
)  # higher-order ops with graphs of their own
SPARSE = {
    aten.embedding.default: "sparse",
    aten.embedding_bag.default: "sparse",
    aten.embedding_bag.padding_idx: "sparse",
}
DERIVATIVES = ("torch.func.grad", "torch.func.jvp")

Noted = dict[str, str]  # the user's line by the name of a transform


@contextmanager
def noted() -> Iterator[Noted]:
    """Inside, the transforms of torch.func that the model enters are noted, each with the user's line."""
    found: Noted = {}
    with _torch.transforms(lambda name: found.setdefault(name, line_now())):
        yield found


def refuse(graph: fx.Graph, entered: Noted) -> None:
    """Raise CaptureError for a forward graph that runs, but not as the model does."""
    if name := next((name for name in DERIVATIVES if name in entered), None):
        raise of_transform(name, entered[name])
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.__name__ in BRANCHES:
            raise _of_branches(node.target.__name__, node.name, line_of_node(node) or None)
        if node.target in SPARSE and _argument(node, SPARSE[node.target]):
            raise CaptureError(
                "an embedding with sparse=True has a sparse gradient, and parameters of a compiled model have dense "
                "ones",
                node=node.name,
                source=line_of_node(node) or None,
                fix="leave out sparse=True, and train with an optimizer of dense gradients (AdamW for SparseAdam)",
            )


def _of_branches(name: str, node: str | None = None, source: str | None = None) -> CaptureError:
    return CaptureError(
        f"torch.{name} runs one of several graphs, as the values of a tensor say: they are not planned",
        node=node,
        source=source,
        fix="compute both branches and choose with torch.where; write a loop with a number of steps that is known",
    )


def explained(
    error: Exception, entered: Noted, graph: fx.Graph | None = None, of_user: str | None = None
) -> CaptureError | None:
    """Return the reason behind an error of torch's own tracing, None if it is not known. `graph` is the forward's, if
    there is one already; `of_user` is the user's line that the error came from."""
    if entered:
        name = min(entered, key=lambda name: name not in DERIVATIVES)
        return of_transform(name, entered[name])
    if _torch.is_of_higher_order_op(error):
        return _of_branches("cond", source=of_user)
    masked = (
        [n for n in graph.nodes if _writes_by_mask(n)] if graph is not None and _torch.is_data_dependent(error) else []
    )
    if not masked:
        return None
    return CaptureError(
        "tensors are written where a mask is True, one value for each such place: how many there are depends on the "
        "mask's values",
        node=masked[0].name,
        source=line_of_node(masked[0]) or None,
        fix="torch.where(mask, value, x), with a value for every place",
    )


def of_transform(name: str, source: str | None) -> CaptureError:
    """Return the error that refuses a transform of torch.func."""
    if name in DERIVATIVES:
        reason, fix = (
            "takes a derivative inside of the forward",
            "compute derivatives outside of the model, or write them as ops",
        )
    else:
        reason, fix = (
            "hides a dim of the batch from the ops inside",
            "write the batch as a dim that the ops broadcast over",
        )
    return CaptureError(f"{name} {reason}, and cannot be traced with gradients", source=source, fix=fix)


def _argument(node: fx.Node, name: str) -> object:
    at = schema_names(node.target).index(name)
    return node.kwargs.get(name, node.args[at] if at < len(node.args) else False)


def _writes_by_mask(node: fx.Node) -> bool:
    if node.target not in (aten.index_put.default, aten.index_put_.default):
        return False
    indices = [i.meta["val"].dtype for i in node.args[1] if isinstance(i, fx.Node)]
    return torch.bool in indices or torch.uint8 in indices
