"""Cut the rows of a micro-batch into chunks of their tokens, which run one after the other as micro-batches do.

A chunk is a shard of the sequence over time. What ops do token by token cuts along (passes/pipeline/batch_axis.py); a
causal attention reads the keys and values that the chunks before have kept, and later chunks add to the gradient of its
own (autopar/ops/kept_keys.py), so backwards run in reverse order (TeraPipe, arXiv 2102.07988; Seq1F1B, arXiv
2406.03488). What follows from the inputs alone, such as positions and shifted labels, is known before
(passes/pipeline/known_first.py). Anything else that mixes tokens is refused here, with the op.

The graph of a chunk is that of all: its attention reads as many earlier keys as on average, so that its FLOPs are those
of a mean chunk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import fx

from ..._torch import schema_names
from ...cost.compute import FREE
from ...errors import MicroBatchError
from ...frontend.export import Captured
from ...ir.graph import Role, call, describe, leaf_name, operand, output_node, tensor_of
from ...ir.layout import Layout
from ...ops import ATTENTION, autopar
from ...ops.kept_keys import TOKENS
from ...plans.sharding import NodeSharding
from ...rules.reading import bound
from .batch_axis import AXIS, BatchAxis, NeedsAllSamples, axis_from, partial_of
from .compact import compact_of, few_of
from .known_first import KEYS as OF_LEAF_KEYS
from .known_first import known_first, of_no_input
from .micro_batch import SAME, FewBlocks, MicroBatched
from .one_part import one_part

FIX = "leave sequence_chunks out, or use 1"
KEYS = ("k", "v")
OF_KEYS = ("mask", "key_documents")  # arguments of an attention that say something of each key, in their last dim


@dataclass(frozen=True)
class Chunks:
    """`count` chunks of so many `tokens` each. `known`: the graph that makes leaves of a row (passes/pipeline/
    known_first.py). By name of a leaf: `cut`, (dim, how many times the tokens of a row are in it) of one that is cut;
    `growing`: the dim of one that says something of keys, of which a chunk reads those up to its own last; `again`: the
    leaf that has the same values. `alike`: those that are the same for all rows. `joins`: by the position of an output,
    as in MicroBatched. `draws`: whether ops draw random numbers."""

    count: int
    tokens: int
    known: fx.GraphModule
    cut: Mapping[str, tuple[int, int]]
    growing: Mapping[str, int]
    again: Mapping[str, str]
    alike: frozenset[str]
    joins: Mapping[str, str | int]
    draws: bool


def chunk_of(captured: Captured, count: int) -> tuple[Captured, Chunks]:
    """Return the joint graph of one of `count` chunks of the rows of a captured graph, without its few blocks, and what
    makes its leaves. Raises MicroBatchError, with the op, if rows cannot be computed chunk by chunk."""
    with contextlib.suppress(MicroBatchError):  # a mask of numbers may be made of all tokens
        return _chunk_of(captured, count, numbers=False)
    return _chunk_of(captured, count, numbers=True)


def _chunk_of(captured: Captured, count: int, numbers: bool) -> tuple[Captured, Chunks]:
    """Return the same; `numbers`: whether those that follow from the inputs are made for whole rows, too."""
    known, rest = known_first(captured.graph_module, numbers)
    try:
        again = _apart(rest.graph)
        tokens, given = _with_kept_keys(rest.graph, count)
        seeds = {tensor_of(operand(node)): (TOKENS, 1) for node in given if node.target is autopar.with_earlier.default}
        seeds |= {(node, 0): (TOKENS, 1) for node in given if node.target is autopar.of_own.default}
        axis = axis_from(rest.graph, count, seeds, given)
        growing = _growing(rest.graph, tokens)
        local = one_part(rest, axis, count, 1, settle=lambda local: _at_mean(local.graph, tokens // count, count))
    except MicroBatchError as error:
        why = error.message
        if isinstance(error, NeedsAllSamples):
            why = f"{error.op} computes with all of them at once"
        raise MicroBatchError(
            f"a row cannot be computed in {count} chunks of its tokens: {why}",
            node=error.node,
            source=error.source,
            fix=FIX,
        ) from error
    leaves = {n.name for n in local.graph.find_nodes(op="placeholder")}
    cut = {
        name: (dim, layout.parts[dim])
        for name, layout in axis.leaves.items()
        if name in leaves and (dim := layout.dim_of(AXIS)) is not None
    }
    draws = any(n.meta["role"].kind == "random" for n in local.graph.find_nodes(op="placeholder"))
    chunks = Chunks(
        count, tokens // count, known, cut, growing, again, of_no_input(known.graph), _joins(rest.graph, axis), draws
    )
    return replace(captured, graph_module=local, compact=None), chunks


def in_chunks(micro: MicroBatched, count: int, few: Sequence[FewBlocks] = ()) -> MicroBatched:
    """Return a batch, cut into micro-batches of whole rows, with each of these cut into `count` chunks of its tokens.
    `few`: what `few_in_chunks` gave for each size of micro-batches, if it was asked before. Raises MicroBatchError if
    that cannot be."""
    if count == 1:
        return micro
    if micro.tail is not None:
        raise MicroBatchError("what all samples are needed for is computed of whole rows", fix=FIX)
    sizes = [micro.captured, *([micro.smaller] if micro.smaller is not None else [])]
    found = [chunk_of(one, count) for one in sizes]
    if micro.micro_batches > 1 and found[0][1].draws:
        raise MicroBatchError(
            "random numbers of chunks are drawn by their number alone, so rows are one micro-batch",
            fix=f"use micro_batches={count}, so that a micro-batch is one chunk of all rows, or {FIX}",
        )
    each = [_with_few(mine, one, small) for (mine, _), one, small in zip_longest(found, sizes, few)]
    return MicroBatched(
        each[0],
        micro.micro_batches * count,
        {name: SAME for name in micro.joins},
        smaller=each[1] if len(each) > 1 else None,
        samples=micro.samples,
        chunks=tuple(chunks for _, chunks in found),
        rows=micro,
    )


def few_in_chunks(few: FewBlocks, count: int) -> FewBlocks:
    """Return what the planner reads of `in_chunks`, of the few blocks of a deep model alone. Raises as that does."""
    old = few.captured.compact
    if count == 1:
        return few
    if old is None:
        return FewBlocks(chunk_of(few.captured, count)[0])
    small, _ = chunk_of(replace(few.captured, graph_module=old.graph_module), count)
    return FewBlocks(replace(small, compact=few_of(old, small.graph_module)))


def _with_few(local: Captured, rows: Captured, few: FewBlocks | None) -> Captured:
    """Return the graph of a chunk with its few blocks, if those of its rows are known."""
    if few is None or rows.compact is None:
        return local
    return replace(local, compact=compact_of(rows.compact, few.captured.graph_module, local.graph_module))


def _with_kept_keys(graph: fx.Graph, count: int) -> tuple[int, dict[fx.Node, NodeSharding]]:
    """Let all attentions read kept keys and give what is added up of their gradients, in place; return the tokens of a
    row, and the layouts of what is new."""
    given: dict[fx.Node, NodeSharding] = {}
    kept: dict[fx.Node, fx.Node] = {}
    attentions = [node for node in graph.nodes if node.target in ATTENTION]
    if not attentions:
        raise MicroBatchError("it has no causal attention, so nothing says which dims are tokens")
    lengths = {_tokens(node) for node in attentions}
    if len(lengths) > 1 or next(iter(lengths)) % count:
        several = " and ".join(map(str, sorted(lengths)))
        raise MicroBatchError(
            f"its attentions have {several} tokens, which {count} does not divide"
            if len(lengths) == 1
            else f"its attentions have {several} tokens"
        )
    (tokens,) = lengths
    for node in attentions:
        for name in KEYS:
            _read_kept(node, name, kept, given)
        if node.target is not autopar.attention.default:
            for item in [user for user in node.users if user.args[1] in (1, 2)]:
                with graph.inserting_after(item):
                    own = call(item, autopar.of_own.default, item, tokens)
                own.meta["val"] = item.meta["val"]
                item.replace_all_uses_with(own, delete_user_cb=lambda user, own=own: user is not own)
                given[own] = NodeSharding((partial_of(item),), (_of_tokens(item),))
    return tokens, given


def _apart(graph: fx.Graph) -> dict[str, str]:
    """Give what attentions read of keys a leaf of its own, in place, where queries read the same; return the names of
    the new leaves, with those of the others."""
    again: dict[str, str] = {}
    made: dict[fx.Node, fx.Node] = {}
    for node in [node for node in graph.nodes if node.target in ATTENTION]:
        leaf = bound(node)["key_documents"]
        if leaf is None or leaf.op != "placeholder":
            continue
        if leaf not in made:
            role = Role("input", f"{leaf.meta['role'].name}{OF_LEAF_KEYS}")
            with graph.inserting_after(leaf):
                made[leaf] = graph.placeholder(leaf_name(role))
            made[leaf].meta = {**leaf.meta, "role": role}
            again[made[leaf].name] = leaf.name
        position = schema_names(node.target).index("key_documents")
        if position < len(node.args):
            node.update_arg(position, made[leaf])
        else:
            node.update_kwarg("key_documents", made[leaf])
    return again


def _tokens(node: fx.Node) -> int:
    """Return the tokens of an attention's row. Raise MicroBatchError for one whose queries read later keys, or keys of
    something else."""
    arguments = bound(node)
    queries, keys = (arguments[name].meta["val"].shape[TOKENS] for name in "qk")
    if arguments["causal"] and not arguments["first"] and queries == keys:
        return queries
    raise MicroBatchError(
        f"{node.name} is an attention whose queries may read the keys of later tokens",
        node=describe(node),
        source=node.meta.get("source") or None,
    )


def _read_kept(node: fx.Node, name: str, kept: dict[fx.Node, fx.Node], given: dict[fx.Node, NodeSharding]) -> None:
    """Let an attention read what is kept of its keys or values. A backward may make views of them again."""
    own = bound(node)[name]
    if own not in kept and node.target is not autopar.attention.default:
        kept[own] = next((new for known, new in kept.items() if _is_same(own, known)), own)
    if own not in kept or kept[own] is own:
        if node.target is not autopar.attention.default:
            raise MicroBatchError(f"{node.name} reads other keys than its forward", node=describe(node))
        with node.graph.inserting_before(node):
            kept[own] = new = call(node, autopar.with_earlier.default, own, 0)
        new.meta["val"] = own.meta["val"]
        given[new] = NodeSharding((_of_tokens(own),), (Layout.replicated(4),))
    node.replace_input_with(own, kept[own])


def _is_same(a: object, b: object) -> bool:
    """Return whether two arguments are the same, or the same views of the same tensor."""
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or a is b:
        return a == b
    if a.target is not b.target or a.target not in FREE:
        return False
    pairs = zip_longest((*a.args, *a.kwargs.items()), (*b.args, *b.kwargs.items()))
    return all(_is_same(mine, other) for mine, other in pairs)


def _of_tokens(value: fx.Node) -> Layout:
    return Layout(tuple((AXIS,) if dim == TOKENS else () for dim in range(value.meta["val"].dim())), ())


def _growing(graph: fx.Graph, tokens: int) -> dict[str, int]:
    """Return the dim of leaves that say something of keys."""
    found: dict[str, int] = {}
    for node in graph.nodes:
        for name, value in bound(node).items() if node.target in ATTENTION else ():
            if name in OF_KEYS and isinstance(value, fx.Node) and value.meta["val"].shape[-1] == tokens > 1:
                if value.op != "placeholder" or any(user.target not in ATTENTION for user in value.users):
                    raise MicroBatchError(
                        f"what {node.name} adds to its scores follows from more than the inputs",
                        node=describe(node),
                        source=node.meta.get("source") or None,
                    )
                found[value.name] = value.meta["val"].dim() - 1
    return found


def _joins(graph: fx.Graph, axis: BatchAxis) -> dict[str, str | int]:
    """Return how the outputs of chunks become those of a row."""
    joins: dict[str, str | int] = {}
    for role, layout in zip(output_node(graph).meta["roles"], axis.outputs):
        if role.kind == "output":
            joins[role.name] = "sum" if layout is not None and layout.partial else "same"
            if layout is not None and (dim := layout.dim_of(AXIS)) is not None:
                joins[role.name] = dim
    return joins


def _at_mean(graph: fx.Graph, tokens: int, count: int) -> None:
    """Let the attentions of a chunk of so many tokens read as many earlier keys as those of `count` chunks do on
    average, in place."""
    earlier = tokens * (count - 1) // 2
    for node in graph.nodes:
        if node.target is autopar.with_earlier.default:
            node.update_arg(1, earlier)
            node.meta["val"] = _rows(node.meta["val"], earlier + tokens)
        elif node.target in ATTENTION:
            position = schema_names(node.target).index("first")
            if position < len(node.args):
                node.update_arg(position, earlier)
            else:
                node.update_kwarg("first", earlier)
            if node.target is not autopar.attention.default:
                node.meta["val"] = tuple(
                    _rows(value, earlier + tokens) if i in (1, 2) else value for i, value in enumerate(node.meta["val"])
                )
                for item in node.users:
                    item.meta["val"] = node.meta["val"][item.args[1]]


def _rows(value: torch.Tensor, tokens: int) -> torch.Tensor:
    b, h, _, d = value.shape
    return value.new_empty(b, tokens, h, d).transpose(1, 2)
