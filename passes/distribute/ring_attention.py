"""Ring attention on one device: blocks of keys and values travel from neighbour to neighbour while the device computes.

Where an attention has its queries and its keys cut over the same axes, each device works on one block of keys after the
other (autopar/ops/ring.py says which). The block of the next step is sent before the present one is computed with, and
waited for behind it, so two blocks are held, never all keys. Outputs of blocks join by their log-sum-exps. The backward
goes round once more, from the joint output and log-sum-exp: gradients of the queries add up here, those of a block
travel with it in the type of the log-sum-exp and end at its owner.

Where a causal attention is cut in zigzag, outputs of the two halves of the queries join by themselves, as one of them
has nothing to do with some blocks.

A mask that is added to the scores is cut along the queries; each step takes its columns of it, and gives their
gradient if that is wanted, which stays here. Where it closes all keys of a query by a lowest number, blocks join by
their numbers of keys (autopar/ops/attention_bias.py); beside a causal mask it closes none. Sinks join behind the last.
Weights that may be dropped have their places by the queries of the device and the keys of the step, each one range: in
zigzag there are two of both, and no ring of it drops. The same goes for a window: a step tells the op how far its first
query is from its first key. Blocks that a window closes are sent, as to a causal mask they are open, and cost nothing.

Blocks travel by all-to-alls of rows, of which there is one a block, padded to the longest block. All devices of a group
call the same ones, also those that neither send nor receive: each output depends on the same exchanges on all of them,
so that whatever removes what nobody needs removes it everywhere.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from ..._torch import op_name
from ...ir.layout import ZIGZAG, dim_ranges, local_offset
from ...ir.mesh import Mesh
from ...ops import ATTENTION, autopar
from ...ops.attention_forms import lse_dtype
from ...ops.ring import Ring
from ...plans.sharding import NodeSharding
from ...rules.layers import is_added, ring_axes
from ...rules.localize import heads_read, weights_from
from ...rules.reading import bound, tensors_by_name
from .emit import Builder
from .neighbours import Neighbours
from .ring_mask import COLUMNS, ROWS, MaskGradient, with_zeros

aten = torch.ops.aten
KEYS = 2  # the dim of queries and of keys in q, k and v
DROPS = ("state", "p", "stream", "strides", "micro_batch_step")  # arguments of dropout that all steps have


class RingAttention:
    """Adds the steps of ring attention to one device's graph."""

    def __init__(self, builder: Builder, mesh: Mesh, coordinate: Mapping[str, int], rank: int):
        self.builder, self.mesh, self.coordinate, self.rank = builder, mesh, coordinate, rank

    def goes_round(self, node: fx.Node, sharding: NodeSharding) -> bool:
        """Return whether an op is attention whose keys are cut with its queries over more than one device."""
        return node.target in ATTENTION and any(self.mesh.size(a) > 1 for a in ring_axes(node, sharding.inputs))

    def __call__(self, node: fx.Node, sharding: NodeSharding, args: Sequence) -> list[fx.Node]:
        """Return the local outputs of an attention, forward or backward. `args`: its arguments, tensors local."""
        axes = tuple(a for a in ring_axes(node, sharding.inputs) if self.mesh.size(a) > 1)
        names, given = list(tensors_by_name(node)), bound(node)
        self.builder.meta = {**self.builder.meta, "part_of": node.name}
        whole = given["k"].meta["val"].shape
        layout = sharding.inputs[names.index("k")]
        group = self.mesh.group(axes, self.rank)
        places = [{**self.coordinate, **{a: self.mesh.coordinate(r)[a] for a in axes}} for r in group]
        blocks = [dim_ranges(whole[KEYS], layout.dims[KEYS], layout.parts[KEYS], self.mesh, at) for at in places]
        at = node, sharding.inputs, self.mesh, self.coordinate, names.index("q")
        heads = heads_read(*at)
        row = local_offset(given["q"].meta["val"].shape, sharding.inputs[names.index("q")], *at[2:4], KEYS)
        ring = Ring(len(group), given["causal"], layout.parts[KEYS] == ZIGZAG)
        local = dict(zip(given, args))
        documents = [local.get(name) for name in ("documents", "key_documents")]
        drops = {**{name: local.get(name, given[name]) for name in DROPS}, **weights_from(*at, row)}
        drops = drops if given["state"] is not None else {}
        steps = _Steps(self.builder, node, axes, group.index(self.rank), ring, blocks, heads, documents, drops, row)
        if node.target is autopar.attention.default:
            return steps.forward(*args[:6], sinks=local.get("sinks"))
        return steps.backward(*args[:9], is_exact=bool(given["of_block"]))


Block = list[fx.Node]  # keys and values, or their gradients


@dataclass(frozen=True)
class _Steps:
    """One attention's way round. `blocks`: the ranges of every device's keys; `heads`: which heads of them its
    queries read, if not all (autopar/ops/attention_heads.py); `documents`: of the device's queries and of all keys;
    `drops`: arguments of the dropout of the weights of the device's queries and all keys, if there is one; `row`: the
    number of the device's first query."""

    builder: Builder
    node: fx.Node
    axes: tuple[str, ...]
    place: int
    ring: Ring
    blocks: list[list[tuple[int, int]]]
    heads: Mapping[str, Any]
    documents: Sequence[fx.Node | None]
    drops: Mapping[str, Any]
    row: int

    def forward(self, q, k, v, mask, causal: bool, scale: float | None, *, sinks: fx.Node | None) -> list[fx.Node]:
        """Return output and log-sum-exp."""
        ring, steps = self.ring, range(self.ring.size)
        works = {i: ring.open_halves(self.place, i)[0] for i in steps if ring.block(self.place, i) is not None}
        last = {half: max(step for step, halves in works.items() if half in halves) for half in ring.halves}
        is_one = len(ring.halves) == 1
        keys: Block | None = [k, v]
        joined: dict[int, list[fx.Node]] = {}  # by half of the queries
        unused: list[fx.Node] = []
        highest = self.call(aten.amax.default, mask, [-1], True) if is_added(mask) and not causal else None
        for step in steps:
            following = self._start_keys(keys, (k, v), step)
            if keys is not None:
                (here,), opened, block = self._open(step, mask, [q], keys)
                name = self._name(is_one and step == last[0] == 0)
                arguments = here, *opened, block, causal and step == 0, scale
                result = self._pair(autopar.attention.default, *arguments, name=name, **self._constants(step))
                if highest is not None:
                    count = opened[0].meta["val"].shape[KEYS]
                    result[1] = self.call(autopar.block_lse.default, result[1], highest, block, count)
                for half in works[step]:
                    own = result if len(works[step]) == 1 else [self._half(x, (half,)) for x in result]
                    if half in joined:
                        name = self._name(is_one and step == last[half])
                        arguments = *joined[half], *own, step == last[half]
                        own = self._pair(autopar.join_attention.default, *arguments, name=name)
                    joined[half] = own
            keys, marks = self._received_keys(following, (k, v), step)
            unused += marks if keys is None else []
        out, lse = joined[0] if is_one else self._whole([joined[half] for half in ring.halves])
        if highest is not None:
            lse = self.call(autopar.whole_lse.default, lse, highest)
        if sinks is not None:
            out, lse = self._pair(autopar.join_sinks.default, out, lse, sinks, name=None)
        return [self._after(out, unused), lse]

    def backward(
        self, grad, q, k, v, out, lse, mask, causal: bool, scale: float | None, *, is_exact: bool
    ) -> list[fx.Node]:
        """Return the gradients of q, k and v, and of the mask if the op gives it. `is_exact`: of the log-sum-exp."""
        wide = lse_dtype(q.meta["val"].dtype)
        keys: Block | None = [k, v]
        dmask = MaskGradient(self.call, mask) if self.node.target is autopar.attention_bias_bw.default else None
        dq: Block = []
        own: Block = []
        started = None
        of_keys: list[fx.Node] = []
        of_gradients: list[fx.Node] = []
        unused: list[fx.Node] = []
        for step in range(self.ring.size):
            following = self._start_keys(keys, (k, v), step)
            parts: Block | None = None
            if keys is not None:
                rows, opened, block = self._open(step, mask, [grad, q, out, lse], keys)
                arguments = *rows[:2], *opened, *rows[2:], block, causal and step == 0, scale
                of_block: dict[str, Any] = {"of_block": True} if is_exact or is_added(mask) else {}
                made = self.call(self.node.target, *arguments, **self._constants(step), **of_block)
                found = [self._in(wide, self.call(operator.getitem, made, i)) for i in range(3)]
                if dmask is not None:
                    self._add_to(dmask, self.call(operator.getitem, made, 3), step)
                halves, open_keys = self.ring.open_halves(self.place, step)
                here = self._with_zeros(found[0], halves)
                parts = [self._with_zeros(x, open_keys) for x in found[1:]]
                dq = self._sums(dq, [here]) if dq else [here]
            passed, own, marks = self._received_gradients(started, own, (k, v), step - 1)
            of_gradients += marks
            if passed is not None and parts is not None:
                parts = self._sums(passed, parts)
            if step:
                started = self._start_gradients(parts, (k, v), step)
            else:
                own = parts or own
            keys, marks = self._received_keys(following, (k, v), step)
            of_keys += marks
            unused += marks if keys is None else []
        _, own, marks = self._received_gradients(started, own, (k, v), self.ring.size - 1)
        outputs = [self._in(x.meta["val"].dtype, d) for x, d in zip((q, k, v), (*dq, *own))]
        all_marks = of_keys + of_gradients + marks
        of_mask = [] if dmask is None else [dmask.whole(itertools.chain(*self.blocks))]
        return [self._after(outputs[0], unused), *(self._after(x, all_marks) for x in outputs[1:]), *of_mask]

    def call(self, target, *args, name: str | None = None, **constants: Any) -> fx.Node:
        """Append an op."""
        return self.builder.call(target, *args, name=name or f"{self.node.name}_{op_name(target)}", **constants)

    def _name(self, is_whole: bool) -> str | None:
        """Return the name of the op itself for what gives its outputs."""
        return self.node.name if is_whole else None

    def _pair(self, target, *args, name: str | None, **constants: Any) -> list[fx.Node]:
        made = self.call(target, *args, name=name, **constants)
        return [self.call(operator.getitem, made, i) for i in range(2)]

    def _in(self, dtype: torch.dtype, x: fx.Node) -> fx.Node:
        return (
            x
            if x.meta["val"].dtype == dtype
            else self.builder.call(aten._to_copy.default, x, dtype=dtype, name=f"{self.node.name}_cast")
        )

    def _sums(self, some: Block, more: Block) -> Block:
        return [self.call(aten.add.Tensor, a, b) for a, b in zip(some, more)]

    def _open(self, step: int, mask: fx.Node | None, rows: Block, keys: Block) -> tuple[Block, Block, fx.Node | None]:
        """Return what the causal mask leaves open in a step: of what has the device's queries in dim 2, of keys and
        values, and of another mask."""
        halves, of_keys = self.ring.open_halves(self.place, step)
        if mask is not None and mask.meta["val"].shape[-1] > 1:
            mask = self._half(self._of_block(mask, step), of_keys, -1)
        if mask is not None and mask.meta["val"].shape[-2] > 1:
            mask = self._half(mask, halves, -2)
        return [self._half(x, halves) for x in rows], [self._half(x, of_keys) for x in keys], mask

    def _constants(self, step: int) -> dict[str, Any]:
        """Return which heads of keys are read in a step, the documents of queries and keys, and what is dropped."""
        documents, of_all_keys = self.documents
        constants = {**self.heads, **self._capped, **self._within(step), **self._dropped(step)}
        if documents is None or of_all_keys is None:
            return constants
        halves, of_keys = self.ring.open_halves(self.place, step)
        documents = self._half(documents, halves, -1)
        return {**constants, "documents": documents,
                "key_documents": self._half(self._of_block(of_all_keys, step), of_keys, -1)}  # fmt: skip

    @property
    def _capped(self) -> dict[str, Any]:
        softcap = bound(self.node)["softcap"]
        return {"softcap": softcap} if softcap else {}

    def _within(self, step: int) -> dict[str, Any]:
        """Return a window, and the number of the first query as keys of a step count; behind all of them if they are
        before it."""
        window = bound(self.node)["window"]
        return {"first": self.row - self._first_key(step), "window": window} if window else {}

    def _dropped(self, step: int) -> dict[str, Any]:
        if not self.drops:
            return {}
        return {**self.drops, "start": self.drops["start"] + self._first_key(step) * self.drops["strides"][-1]}

    def _first_key(self, step: int) -> int:
        ((first, _),) = self.blocks[(self.place - step) % self.ring.size]
        return first

    def _of_block(self, x: fx.Node, step: int) -> fx.Node:
        """Return what a tensor with all keys in the last dim has of the block of a step."""
        found = [
            self.call(aten.slice.Tensor, x, -1, *ends) for ends in self.blocks[(self.place - step) % self.ring.size]
        ]
        return found[0] if len(found) == 1 else self.call(aten.cat.default, found, -1)

    def _half(self, x: fx.Node, halves: tuple[int, ...], dim: int = KEYS) -> fx.Node:
        """Return some of the halves of a block: both or one."""
        if halves == self.ring.halves:
            return x
        length = x.meta["val"].shape[dim] // 2
        return self.call(aten.slice.Tensor, x, dim, halves[0] * length, (halves[0] + 1) * length)

    def _with_zeros(self, x: fx.Node, halves: tuple[int, ...], dim: int = ROWS) -> fx.Node:
        """Return gradients of a block, given those of some of its halves."""
        return x if halves == self.ring.halves else with_zeros(self.call, x, halves == (0,), dim)

    def _add_to(self, dmask: MaskGradient, part: fx.Node, step: int) -> None:
        """Add the gradient of the part of a mask that is open in a step."""
        halves, of_keys = self.ring.open_halves(self.place, step)
        rows, columns = dmask.mask.meta["val"].shape[-2:]
        part = self._with_zeros(part, halves, ROWS) if rows > 1 else part
        part = self._with_zeros(part, of_keys, COLUMNS) if columns > 1 else part
        dmask.add(part, self.blocks[(self.place - step) % self.ring.size])

    def _whole(self, pairs: list[list[fx.Node]]) -> list[fx.Node]:
        """Return output and log-sum-exp of a block, given those of its halves; stored as (b, s, h, d)."""
        outs = [self.call(aten.transpose.int, out, 1, KEYS) for out, _ in pairs]
        out = self.call(aten.transpose.int, self.call(aten.cat.default, outs, 1), 1, KEYS)
        return [out, self.call(aten.cat.default, [lse for _, lse in pairs], KEYS)]

    def _after(self, x: fx.Node, marks: list[fx.Node]) -> fx.Node:
        return self.call(autopar.after.default, x, marks) if marks else x

    # messages

    def _start_keys(self, keys: Block | None, like, step: int) -> fx.Node | None:
        """Start to send the block of a step on; None behind the last step."""
        if step + 1 == self.ring.size:
            return None
        to, source = self.ring.keys_to(self.place, step), self.ring.keys_from(self.place, step)
        return self._start(keys, like, to, [] if source is None else [source], "keys")

    def _received_keys(self, started: fx.Node | None, like, step: int) -> tuple[Block | None, list[fx.Node]]:
        """Wait for the block of the next step; return it, None if none comes, and a mark of the exchange."""
        if started is None:
            return None, []
        arrived, mark = self._arrived(started)
        source = self.ring.keys_from(self.place, step)
        if source is None:
            return None, [mark]
        return self._unpacked(arrived, 0, like, source, step), [mark]

    def _start_gradients(self, parts: Block | None, like, step: int) -> fx.Node:
        """Start to send a block's gradients on behind the step that added to them."""
        to, sources = self.ring.gradients_to(self.place, step), self.ring.gradients_from(self.place, step)
        return self._start(parts, like, to, sources, "gradients", lse_dtype(like[0].meta["val"].dtype))

    def _received_gradients(self, started: fx.Node | None, own, like, step: int):
        """Wait for what was sent behind a step; return the gradients that came of the block that is worked on now, None
        if none did, those of the own block with what came home, and a mark of the exchange."""
        if started is None:
            return None, own, []
        arrived, mark = self._arrived(started)
        passed = None
        for row, source in enumerate(self.ring.gradients_from(self.place, step)):
            found = self._unpacked(arrived, row, like, source, step)
            if self.ring.block(source, step) == self.place:
                own = self._sums(own, found)
            else:
                passed = found
        return passed, own, [mark]

    def _start(
        self, parts: Block | None, like, to: int | None, sources: list[int], what: str, dtype: torch.dtype | None = None
    ) -> fx.Node:
        """Start an all-to-all that sends a block as a row to one device, or to none, and takes one from each of
        `sources`. `like`: keys and values; `dtype`: that of the message, if it is not theirs."""
        if parts is not None and to is not None:
            message = self._packed(parts)
        else:
            message = self.call(aten.new_empty.default, like[0], [0, sum(self._counts(like))])
            message = self._in(dtype or like[0].meta["val"].dtype, message)
        return self.neighbours.start(message, to, sources, f"{self.node.name}_{what}_start")

    def _arrived(self, started: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Wait for an exchange; return what came and a mark of it, which holds no memory."""
        arrived = self.neighbours.arrived(started, f"{self.node.name}_wait_tensor")
        return arrived, self.call(aten.new_empty.default, arrived, [0])

    @cached_property
    def neighbours(self) -> Neighbours:
        """Return what sends messages."""
        return Neighbours(self.builder, self.axes, self.ring.size, self.place, "all_to_all", self.node.name)

    @cached_property
    def longest(self) -> int:
        """Return the keys of the longest block, to which messages are padded."""
        return max(map(_length, self.blocks))

    def _counts(self, like: Sequence[fx.Node]) -> list[int]:
        """Return the elements of keys and of values in a message."""
        return [math.prod(self._padded(x)) for x in like]

    def _padded(self, x: fx.Node) -> list[int]:
        b, h, _, d = x.meta["val"].shape
        return [b, h, self.longest, d]

    def _packed(self, parts: Block) -> fx.Node:
        """Return keys and values, or their gradients, as one row."""
        flat = []
        for x in parts:
            missing = self.longest - x.meta["val"].shape[KEYS]
            x = self.call(aten.constant_pad_nd.default, x, [0, 0, 0, missing], 0) if missing else x
            flat.append(self.call(aten.reshape.default, x, [-1]))
        row = self.call(aten.cat.default, flat)
        return self.call(aten.reshape.default, row, [1, -1])

    def _unpacked(self, arrived: fx.Node, row: int, like: Sequence[fx.Node], source: int, step: int) -> Block:
        """Return keys and values, or their gradients, of the block that a device had in a step, from the row in which
        it sent them."""
        message = self.call(aten.select.int, arrived, 0, row)
        length = _length(self.blocks[(source - step) % self.ring.size])
        found, start = [], 0
        for x, count in zip(like, self._counts(like)):
            part = self.call(aten.slice.Tensor, message, 0, start, start + count)
            part = self.call(aten.reshape.default, part, self._padded(x))
            found.append(part if length == self.longest else self.call(aten.slice.Tensor, part, KEYS, 0, length))
            start += count
        return found


def _length(ranges: list[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in ranges)
