"""Say of an attention which keys its queries attend to."""

from __future__ import annotations

from torch import fx

from ...ops import ATTENTION
from ...rules.reading import bound


def is_packed(node: fx.Node) -> bool:
    """Return whether a node is an attention among documents that are packed into rows."""
    return node.target in ATTENTION and bound(node)["documents"] is not None


def attention_text(node: fx.Node) -> str:
    """Return what an attention leaves out of all pairs of queries and keys, "" if a node is none."""
    if node.target not in ATTENTION:
        return ""
    given = bound(node)
    kinds = ["keys up to the query's own"] if given["causal"] else []
    if window := given["window"]:
        kinds.append(f"of these the last {window}" if given["causal"] else f"keys less than {window} places away")
    kinds += ["keys of the query's document"] if is_packed(node) else []
    if given["mask"] is not None:
        kinds.append(f"what a mask {tuple(given['mask'].meta['val'].shape)} says")
    return ", ".join(kinds) or "all keys"
