"""A graph as text, one line a node, stable and diffable: global shapes, layouts where they are decided, and the user's
line."""

from __future__ import annotations

from torch import Tensor, fx

from ..frontend.user_lines import line_of_node
from ..ir.graph import values_of
from ..ir.layout import Layout
from ..plans.sharding import Sharding


def graph_text(module: fx.GraphModule, sharding: Sharding | None = None) -> str:
    """Return `name: op(arguments) -> (global shape) dtype layout  # module source`, one line a node.

    Layouts are those of `sharding`, or of the nodes themselves if the graph is one rank's."""
    return "\n".join(_line(node, sharding) for node in module.graph.nodes) + "\n"


def _line(node: fx.Node, sharding: Sharding | None) -> str:
    words = [f"{node.name}: {_call(node)}"]
    shapes, layouts = _shapes(node), _layouts(node, sharding)
    if shapes:
        words.append(f"-> {shapes}")
    if layouts:
        words.append(" | ".join(map(str, layouts)))
    origin = " ".join(filter(None, (node.meta.get("module", ""), node.meta.get("source") or line_of_node(node))))
    return " ".join(words) + (f"  # {origin}" if origin else "")


def _call(node: fx.Node) -> str:
    if node.op in ("placeholder", "get_attr"):
        role = node.meta.get("role")
        return f"{role.kind} {role.name}" if role is not None else f"{node.op} {node.target}"
    arguments = [repr(a) for a in node.args] + [f"{k}={v!r}" for k, v in node.kwargs.items()]
    if node.op == "output":
        return f"return {', '.join(arguments)}"
    name = str(node.target) if hasattr(node.target, "namespace") else getattr(node.target, "__name__", str(node.target))
    return f"{name.removesuffix('.default')}({', '.join(arguments)})"


def _shapes(node: fx.Node) -> str:
    """Return global shapes and dtypes as text; local ones inside of a redistribution, where no global value stands."""
    value = node.meta.get("global", node.meta.get("val"))
    values = value if isinstance(value, (tuple, list)) else [value]
    text = " ".join(f"{tuple(v.shape)} {str(v.dtype).removeprefix('torch.')}" for v in values if isinstance(v, Tensor))
    is_local = "tensor" in node.meta and "global" not in node.meta
    return f"local {text}" if is_local else text


def _layouts(node: fx.Node, sharding: Sharding | None) -> tuple[Layout, ...]:
    layouts = node.meta.get("layout")
    if layouts is not None:
        return (layouts,) if isinstance(layouts, Layout) else tuple(layouts)
    if sharding is None or not values_of(node):
        return ()
    if node.name in sharding.leaves:
        return (sharding.leaves[node.name],)
    decision = sharding.nodes.get(node.name)
    return decision.outputs if decision is not None else ()
