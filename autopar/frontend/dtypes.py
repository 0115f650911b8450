"""Check that a traced forward computes with types that its ops take.

torch's shape functions are more lenient than its kernels: a linear layer of fp64 inputs and fp32 weights can be traced
but not run. So every kind of op for which the two differ is run once on two elements a dim of the types in the graph,
and once of the types that it is made for: if only the second works, the types are wrong, and torch's own words say how.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from .._torch import schema_names
from ..errors import CaptureError
from .user_lines import line_of_node

aten = torch.ops.aten
INDICES = {"target": torch.int64}  # arguments that are no floating numbers, and their usual type
# ops with arguments that have to fit tensors of two elements a dim
STRICT: dict[object, dict[str, object]] = {
    aten.linear.default: {}, aten.matmul.default: {}, aten.mm.default: {}, aten.bmm.default: {}, aten.addmm.default: {},
    aten.baddbmm.default: {}, aten.mv.default: {}, aten.dot.default: {},
    aten.layer_norm.default: {"normalized_shape": 2}, aten.rms_norm.default: {"normalized_shape": 2},
    aten.batch_norm.default: {}, aten.group_norm.default: {"num_groups": 1}, aten.instance_norm.default: {},
    aten.cross_entropy_loss.default: {"ignore_index": -100}, aten.nll_loss_nd.default: {"ignore_index": -100},
}  # fmt: skip


def check_types(graph: fx.Graph) -> None:
    """Raise CaptureError with the first op of a forward graph that cannot run on the types that it is given."""
    known: dict[tuple, str | None] = {}
    for node in graph.nodes:
        if node.target in STRICT:
            values, key = _values(node), _key(node)
            if key not in known:
                known[key] = _refusal(node, values)
            if known[key]:
                types = ", ".join(
                    f"{name} {value.dtype}".replace("torch.", "")
                    for name, value in values.items()
                    if isinstance(value, torch.Tensor)
                )
                raise CaptureError(
                    f"the model itself cannot run on these types: {known[key]} ({types})",
                    node=node.name,
                    source=line_of_node(node) or None,
                    fix="pass inputs of the types that model(**example_inputs) runs on",
                )


def _values(node: fx.Node) -> dict[str, object]:
    """Return the arguments of an op by name, as fake tensors and constants."""
    given = dict(zip(schema_names(node.target), node.args)) | dict(node.kwargs)
    return {name: value.meta.get("val") if isinstance(value, fx.Node) else value for name, value in given.items()}


def _key(node: fx.Node) -> tuple:
    return node.target, *((name, v.dtype, v.dim()) if isinstance(v, torch.Tensor) else (name, str(v))
                          for name, v in _values(node).items())  # fmt: skip


def _refusal(node: fx.Node, values: dict[str, object]) -> str | None:
    """Return what torch says of the types, None if they are right or cannot be judged."""
    said = _said(node, values, lambda name, dtype: dtype)
    if said is None or "not implemented for" in said:  # another device may have the kernel that this one lacks
        return None
    return said if _said(node, values, lambda name, dtype: INDICES.get(name, torch.float32)) is None else None


def _said(node: fx.Node, values: dict[str, object], type_of: Callable[[str, torch.dtype], torch.dtype]) -> str | None:
    """Return torch's words if an op cannot run on small tensors of the types that `type_of` gives, None if it can."""
    small = {
        name: torch.ones((2,) * v.dim(), dtype=type_of(name, v.dtype), device="cpu")
        if isinstance(v, torch.Tensor)
        else v
        for name, v in values.items()
    }
    for name, value in STRICT[node.target].items():
        if name in small:
            small[name] = [value] * len(small[name]) if isinstance(small[name], (list, tuple)) else value
    try:
        with torch.no_grad():
            node.target(**small)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        return str(error).splitlines()[0]
    return None
