"""Let the chunks of a row write their keys and values into tensors that are kept, and add up gradients in others.

    kept = with_earlier(keys, 1024)      ->  kept = keep_rows(k_kept, keys)
    attention(q, kept, ..., first=1024)  ->  attention(q, kept, ..., first=FROM_END-512)
    own  = of_own(gradient, 512)         ->  own  = add_rows(g_own, gradient, 512)

`k_kept`: all keys up to the last of a chunk, of which 512 are its own.
The backward reads what is kept in place of what its forward saved, so keys are held once for all chunks of a row, and
never computed again (autopar/ops/kept_keys.py).
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, fx

from ..._torch import schema_names
from ...ir.graph import Role, leaf_name, operand
from ...ops import ATTENTION, autopar
from ...ops.attention import FROM_END
from ...ops.kept_keys import TOKENS, sums_dtype
from .partition import phase_of


def keep_keys(local: fx.GraphModule, chunks: int) -> fx.GraphModule:
    """Rewrite a local joint graph in place, of one of so many chunks of a row."""
    graph = local.graph
    for node in list(graph.nodes):
        if node.target is autopar.with_earlier.default:
            _keep(node, chunks)
        elif node.target is autopar.of_own.default:
            _add(node, chunks)
    graph.lint()
    local.recompile()
    return local


def _keep(node: fx.Node, chunks: int) -> None:
    """Put what a row keeps in the place of one attention's keys or values."""
    own, earlier = operand(node), cast(int, node.args[1])
    tokens = own.meta["val"].shape[TOKENS]
    leaf = _leaf(node, Role("kept", node.name), tokens * chunks, own.meta["val"])
    for reader in list(node.users):
        if reader.target in ATTENTION:
            _count_from_end(reader, earlier + tokens)
        if phase_of(reader) == "backward":
            reader.replace_input_with(node, leaf)
    with node.graph.inserting_before(node):
        kept = node.graph.create_node("call_function", autopar.keep_rows.default, (leaf, own), {}, f"{node.name}_rows")
    kept.meta = {**node.meta}
    node.replace_all_uses_with(kept)
    node.graph.erase_node(node)


def _add(node: fx.Node, chunks: int) -> None:
    """Add the gradient of keys or values to that of the row."""
    gradient, tokens = operand(node), cast(int, node.args[1])
    value = gradient.meta["val"]
    leaf = _leaf(node, Role("kept_sum", node.name), tokens * chunks, value.to(sums_dtype(value.dtype)))
    with node.graph.inserting_before(node):
        own = node.graph.create_node(
            "call_function", autopar.add_rows.default, (leaf, gradient, tokens), {}, f"{node.name}_rows"
        )
    own.meta = {**node.meta}
    node.replace_all_uses_with(own)
    node.graph.erase_node(node)


def _leaf(node: fx.Node, role: Role, tokens: int, like: Tensor) -> fx.Node:
    """Add the placeholder of what a row keeps, of all its tokens."""
    first = next(n for n in node.graph.nodes if n.op != "placeholder")
    with node.graph.inserting_before(first):
        leaf = node.graph.placeholder(leaf_name(role))
    b, h, _, d = like.shape
    leaf.meta = {"role": role, "phase": node.meta["phase"], "val": like.new_empty(b, tokens, h, d).transpose(1, 2)}
    leaf.meta |= {key: node.meta[key] for key in ("layout", "module", "source") if key in node.meta}
    return leaf


def _count_from_end(node: fx.Node, keys: int) -> None:
    """Let an attention count its first query from the end of its keys, however many there are."""
    position, arguments = schema_names(node.target).index("first"), node.args  # who cut the row has set it
    first: object = arguments[position] if position < len(arguments) else node.kwargs["first"]
    assert isinstance(first, int)
    if first >= 0 and position < len(arguments):
        node.update_arg(position, FROM_END + first - keys)
    elif first >= 0:
        node.update_kwarg("first", FROM_END + first - keys)
