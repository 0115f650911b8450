"""Find what may be computed for some queries of an attention at a time, with its backward.

    forward     source -> linear, reshape, rotary embedding -> attention          out and log-sum-exp leave it
    backward    gradient -> linear_dx, reshape -> attention_bw -> rotary backward -> linear_dx, linear_dw

Keys and values are read whole; their gradients add up over pieces of the queries, as those of weights do. A region goes
from the attention up to the first product on the way of its queries, and as far as nothing else reads what is between:
at the least it is the attention alone. A joint graph is searched, or one device's, in which a redistribution of a
tensor inside is another reader.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import fx

from ..ir.graph import is_op, operand, tensor_arguments, tensor_of
from ..ops import autopar
from .query_wise import SUM, dim_of, rows_of
from .reading import bound
from .row_regions import RowRegion
from .row_wise import PRODUCTS

SEQUENCE = 2  # the dim of queries in tensors of an attention
MOST_NODES = 64  # of one phase
WHOLE = ("k", "v", "key_documents")  # arguments of an attention of which queries read all
Dims = Mapping[fx.Node, int]


@dataclass(frozen=True)
class QueryRegion(RowRegion):
    """The ops of a region in the graph's order. `forward` ends with the attention, `source` is what most of it is made
    of, or its queries, `gradient` what the backward starts from. `attention_bw`: the op in the backward; `dims`: by
    tensor inside or cut, the dim that has the queries; `added`: what adds up over them. Of one `alone` the attention is
    all."""

    attention_bw: fx.Node = field(kw_only=True)
    dims: Dims = field(kw_only=True, compare=False)
    added: tuple[fx.Node, ...] = field(kw_only=True)
    alone: bool = field(kw_only=True)

    @property
    def sums(self) -> tuple[fx.Node, ...]:
        """Return what of the backward adds up over queries: gradients of weights, keys and values."""
        return self.added

    @cached_property
    def given(self) -> tuple[fx.Node, ...]:
        """Return the tensors that leave the forward, the attention's results."""
        return tuple(sorted(self.node.users, key=lambda user: tensor_of(user)[1]))

    @cached_property
    def whole(self) -> tuple[fx.Node, ...]:
        """Return what each piece reads all of: weights, keys and values."""
        return self.read((*self.forward, *self.backward))[1]

    def read(self, nodes: Collection[fx.Node]) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
        """Return what some ops of a region read of others by place, and what they read whole: documents may be both."""
        rows: dict[fx.Node, None] = {}
        whole: dict[fx.Node, None] = {}
        for node in filter(is_op, nodes):
            by_place = self.dims if node not in (self.node, self.attention_bw) else attention_rows(node)
            named = bound(node) if node in (self.node, self.attention_bw) else {}
            for name, argument in named.items() or enumerate(tensor_arguments(node)):
                if isinstance(argument, fx.Node) and argument not in nodes:
                    is_cut = argument in by_place and name not in WHOLE
                    (rows if is_cut else whole)[argument] = None
        return tuple(rows), tuple(whole)

    @property
    def queries(self) -> int:
        """Return the length of the sequence of queries."""
        return int(operand(self.node).meta["val"].shape[SEQUENCE])


def query_regions(graph: fx.Graph, alone: bool = False) -> tuple[QueryRegion, ...]:
    """Return the regions of a graph in order of their attentions; `alone`: with nothing but the attention."""
    forwards = [n for n in graph.nodes if n.target is autopar.attention.default and n.meta.get("phase") == "forward"]
    if not forwards:
        return ()
    position = {node: i for i, node in enumerate(graph.nodes)}
    backwards = {_key(operand(n, 5)): n for n in graph.nodes if n.target is autopar.attention_bw.default}
    found = []
    for node in forwards:
        lse = next((user for user in node.users if user.args[1] == 1), None)
        backward = None if lse is None else backwards.get(_key(lse))
        if backward is not None and (alone or operand(backward, 1) is operand(node)):
            found.append(_Region(node, backward, position, 0 if alone else MOST_NODES).region())
    return tuple(found)


def attention_rows(node: fx.Node) -> dict[fx.Node, int]:
    """Return the tensors that an attention, or its backward, reads of its queries alone, with their dims of places."""
    given, queries = bound(node), operand(node, int("grad" in bound(node))).meta["val"].shape[SEQUENCE]
    found = {given[name]: SEQUENCE for name in ("grad", "q", "out", "lse") if name in given}
    for name, of_places in (("mask", -2), ("documents", -1)):
        tensor = given.get(name)
        if tensor is not None and tensor.meta["val"].dim() >= -of_places:
            shape = tensor.meta["val"].shape
            if shape[of_places] == queries > 1:
                found[tensor] = len(shape) + of_places
    return found


def _key(node: fx.Node) -> str:
    """Return the name of the tensor that a node holds, in whatever layout."""
    return str(node.meta.get("tensor", node.name))


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Iterate over what is made of a tensor: in the place of an op with several results these."""
    for user in node.users:
        if is_op(user) and not isinstance(user.meta.get("val"), torch.Tensor):
            yield from user.users or (user,)
        else:
            yield user


class _Region:
    """Grows the region of one attention. `dims`: by tensor that is inside, or read by place, its dim of places."""

    def __init__(self, node: fx.Node, backward: fx.Node, position: Mapping[fx.Node, int], most: int):
        self.node, self.backward, self.position, self.most = node, backward, position, most
        self.dims: dict[fx.Node, int] = {}

    def region(self) -> QueryRegion:
        """Return the largest region of which nothing inside is read elsewhere."""
        barred: set[fx.Node] = set()
        while True:
            self.dims = attention_rows(self.node) | attention_rows(self.backward)
            forward = self._before(operand(self.node), "forward", barred)
            backward, added = self._behind(forward)
            outside = {
                node for node in forward if any(u not in forward and u not in backward for u in self._users(node))
            }
            if not outside:
                return self._made(forward, backward, added)
            barred |= outside

    def _users(self, node: fx.Node) -> Iterator[fx.Node]:
        own = {self.node, self.backward}
        return (u for user in node.users if user not in own for u in ([user] if is_tensor(user) else user.users))

    def _before(self, end: fx.Node, phase: str, barred: Collection[fx.Node]) -> set[fx.Node]:
        """Return what an attention's argument is made of, up to the first product, and nothing else reads."""
        found: set[fx.Node] = set()
        waiting = [end]
        while waiting and len(found) < self.most:
            node = max(waiting, key=self.position.__getitem__)
            waiting.remove(node)
            if node in found or node in barred or node.meta.get("phase") != phase:
                continue
            op, _ = tensor_of(node)
            results = [node] if op is node else list(op.users)
            readers = {u for result in results for u in self._users(result) if u.meta.get("phase") == phase}
            rows = rows_of(node, self.dims[node])
            if rows is None or not readers <= found or self._clash(rows):
                continue
            found.update(results)
            self.dims |= rows | dict.fromkeys(results, self.dims[node])
            if node.target not in PRODUCTS:
                waiting += rows
        return found

    def _clash(self, rows: Dims) -> bool:
        """Return whether a tensor is read along another dim already."""
        return any(self.dims.get(tensor, dim) != dim for tensor, dim in rows.items())

    def _behind(self, forward: set[fx.Node]) -> tuple[set[fx.Node], list[fx.Node]]:
        """Return the backward: what makes the gradient, and what is made of that of the queries, and of the forward's
        tensors; and which of it adds up over places."""
        inside = self._before(operand(self.backward), "backward", ())
        added = [user for user in self.backward.users if user.args[1] != 0]
        waiting = [user for user in self.backward.users if user.args[1] == 0]
        inside |= set(waiting)
        self.dims |= dict.fromkeys(waiting, SEQUENCE)
        while waiting and len(inside) < self.most:
            node = min(waiting, key=self.position.__getitem__)
            waiting.remove(node)
            for reader in _readers(node):
                if reader in inside or reader in added or not self._is_own(reader, inside):
                    continue
                rows = self._known(reader)
                dim = dim_of(reader, rows)
                if dim is None or not self._reads(reader, dim, rows):
                    continue
                if dim == SUM:
                    added.append(reader)
                    self.dims |= rows
                    continue
                inside.add(reader)
                self.dims[reader] = dim
                if reader.target not in PRODUCTS:
                    waiting.append(reader)
        return inside, added

    def _is_own(self, reader: fx.Node, inside: Collection[fx.Node]) -> bool:
        """Return whether all that an op of the backward reads is inside, or there before the attention's backward."""
        if reader.meta.get("phase") != "backward":
            return False
        return all(a in inside or self._is_there(a) for a in tensor_arguments(tensor_of(reader)[0]))

    def _is_there(self, node: fx.Node) -> bool:
        """Return whether a tensor depends on nothing that an attention's backward gives."""
        seen, stack = set[fx.Node](), [node]
        while stack:
            one = stack.pop()
            if one is self.backward:
                return False
            if one not in seen and self.position[one] > self.position[self.backward]:
                seen.add(one)
                stack.extend(one.all_input_nodes)
        return True

    def _known(self, reader: fx.Node) -> dict[fx.Node, int]:
        """Return the dims of places of what an op reads; both of a weight's gradient have one."""
        read = tensor_arguments(tensor_of(reader)[0])
        rows = {a: self.dims[a] for a in read if a in self.dims}
        if reader.target is autopar.linear_dw.default and len(set(rows.values())) == 1:
            rows = dict.fromkeys(read, next(iter(rows.values())))
        return rows

    def _reads(self, reader: fx.Node, dim: int, rows: dict[fx.Node, int]) -> bool:
        """Note the tensors that an op reads by place; return whether it reads them all so, as far as it must."""
        if dim == SUM:
            return not self._clash(rows)
        read = rows_of(reader, dim)
        if read is None or self._clash(read):
            return False
        self.dims |= read
        return True

    def _made(self, forward: set[fx.Node], backward: set[fx.Node], added: Sequence[fx.Node]) -> QueryRegion:
        read = [a for node in forward for a in rows_of(node, self.dims[node]) or () if a not in forward]
        source = max(read, key=lambda a: a.meta["val"].numel(), default=operand(self.node))
        gradient = operand(self.backward)
        while gradient in backward:
            gradient = next(iter(rows_of(gradient, self.dims[gradient]) or ()))
        return QueryRegion(
            source,
            (*self._in_order(forward), self.node),
            gradient,
            self._in_order({*backward, *added, self.backward}),
            attention_bw=self.backward,
            dims=self.dims,
            added=tuple(sorted(added, key=self.position.__getitem__)),
            alone=self.most == 0,
        )

    def _in_order(self, nodes: Collection[fx.Node]) -> tuple[fx.Node, ...]:
        """Return tensors, and the ops with several results that make some of them, in the graph's order."""
        return tuple(sorted({*nodes, *(tensor_of(node)[0] for node in nodes)}, key=self.position.__getitem__))


def is_tensor(node: fx.Node) -> bool:
    """Return whether a node holds one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor) or not is_op(node)
