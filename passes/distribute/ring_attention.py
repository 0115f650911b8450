"""Ring attention on one device: blocks of keys and values travel from neighbour to neighbour while the device computes.

Where an attention has its queries and its keys cut over the same axes, each device works on one block of keys after the
other (autopar/ops/ring.py says which). The block of the next step is sent before the present one is computed with, and
waited for behind it, so two blocks are held, never all keys. Outputs of blocks join by their log-sum-exps. The backward
goes round once more, from the joint output and log-sum-exp: gradients of the queries add up here, those of a block travel
with it in the type of the log-sum-exp and end at its owner.

Blocks travel by all-to-alls of rows, of which there is one a block, padded to the longest block. All devices of a group
call the same ones, also those that neither send nor receive: each output depends on the same exchanges on all of them,
so that whatever removes what nobody needs removes it everywhere.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from ..._torch import c10d, op_name
from ...ir.graph import bytes_of
from ...ir.layout import local_offset, local_shape
from ...ir.mesh import Mesh
from ...ops import autopar
from ...ops.attention_forms import lse_dtype
from ...ops.ring import Ring
from ...plans.sharding import NodeSharding
from ...rules.layers import ring_axes
from ...rules.reading import bound, tensors_by_name
from .emit import Builder, Collective

aten = torch.ops.aten
ATTENTION = (autopar.attention.default, autopar.attention_bw.default)
KEYS = 2  # the dim of queries and of keys in q, k and v


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
        blocks = [
            (local_offset(whole, layout, self.mesh, at, KEYS), local_shape(whole, layout, self.mesh, at)[KEYS])
            for at in places
        ]
        steps = _Steps(self.builder, node, axes, group.index(self.rank), Ring(len(group), given["causal"]), blocks)
        if node.target is autopar.attention.default:
            return steps.forward(*args[:6])
        return steps.backward(*args[:9])


@dataclass(frozen=True)
class _Steps:
    """One attention's way round. `blocks`: start and length of every device's keys."""

    builder: Builder
    node: fx.Node
    axes: tuple[str, ...]
    place: int
    ring: Ring
    blocks: list[tuple[int, int]]

    def forward(self, q, k, v, mask, causal: bool, scale: float | None) -> list[fx.Node]:
        """Return output and log-sum-exp."""
        own = sum(self.ring.block(self.place, step) is not None for step in range(self.ring.size))
        keys, joined, unused = [k, v], None, []
        for step in range(self.ring.size):
            following = self._start_keys(keys, (k, v), step)
            block = self.ring.block(self.place, step)
            if block is not None:
                arguments = (q, *keys, self._mask(mask, block), causal and step == 0, scale)
                name = self.node.name if own == 1 else f"{self.node.name}_of_{step}"
                result = self._pair(self.call(autopar.attention.default, *arguments, name=name))
                if joined is not None:
                    name = self.node.name if step == own - 1 else f"{self.node.name}_to_{step}"
                    arguments = (*joined, *result, step == own - 1)
                    result = self._pair(self.call(autopar.join_attention.default, *arguments, name=name))
                joined = result
            keys, marks = self._received_keys(following, (k, v), step)
            unused += marks if keys is None else []
        return [self._after(joined[0], unused), joined[1]]

    def backward(self, grad, q, k, v, out, lse, mask, causal: bool, scale: float | None) -> list[fx.Node]:
        """Return the gradients of q, k and v."""
        wide = lse_dtype(q.meta["val"].dtype)
        keys, dq, own = [k, v], None, None
        of_keys, unused, of_gradients = [], [], []
        started = None
        for step in range(self.ring.size):
            following = self._start_keys(keys, (k, v), step)
            block, parts = self.ring.block(self.place, step), None
            if block is not None:
                arguments = (grad, q, *keys, out, lse, self._mask(mask, block), causal and step == 0, scale)
                made = self.call(autopar.attention_bw.default, *arguments, name=f"{self.node.name}_of_{step}")
                d, *parts = [self._in(wide, self.call(operator.getitem, made, i)) for i in range(3)]
                dq = d if dq is None else self.call(aten.add.Tensor, dq, d)
            passed, own, marks = self._received_gradients(started, own, (k, v), step - 1)
            of_gradients += marks
            if passed is not None:
                parts = self._sums(passed, parts)
            if step == 0:
                own = parts
            else:
                started = self._start_gradients(parts, (k, v), step)
            keys, marks = self._received_keys(following, (k, v), step)
            of_keys += marks
            unused += marks if keys is None else []
        _, own, marks = self._received_gradients(started, own, (k, v), self.ring.size - 1)
        of_gradients += marks
        outputs = [self._in(x.meta["val"].dtype, d) for x, d in zip((q, k, v), (dq, *own))]
        return [self._after(outputs[0], unused), *(self._after(x, of_keys + of_gradients) for x in outputs[1:])]

    def call(self, target, *args, name: str | None = None) -> fx.Node:
        """Append an op."""
        return self.builder.call(target, *args, name=name or f"{self.node.name}_{op_name(target)}")

    def _pair(self, node: fx.Node) -> list[fx.Node]:
        return [self.call(operator.getitem, node, i) for i in range(2)]

    def _in(self, dtype: torch.dtype, x: fx.Node) -> fx.Node:
        if x.meta["val"].dtype == dtype:
            return x
        return self.builder.call(aten._to_copy.default, x, dtype=dtype, name=f"{self.node.name}_cast")

    def _sums(self, some: Sequence[fx.Node], more: Sequence[fx.Node]) -> list[fx.Node]:
        return [self.call(aten.add.Tensor, a, b) for a, b in zip(some, more)]

    def _mask(self, mask: fx.Node | None, block: int) -> fx.Node | None:
        """Return the columns of a mask that are of one block."""
        if mask is None or mask.meta["val"].shape[-1] == 1:
            return mask
        start, length = self.blocks[block]
        return self.call(aten.slice.Tensor, mask, -1, start, start + length)

    # messages

    @cached_property
    def longest(self) -> int:
        """Return the keys of the longest block, to which messages are padded."""
        return max(length for _, length in self.blocks)

    def _start_keys(self, keys: list[fx.Node] | None, like, step: int) -> fx.Node | None:
        """Start to send the block of a step on; None behind the last step."""
        if step + 1 == self.ring.size:
            return None
        to, source = self.ring.keys_to(self.place, step), self.ring.keys_from(self.place, step)
        message = self._packed(keys) if to is not None else None
        return self._start(message, like, {to} - {None}, {source} - {None}, "keys")

    def _received_keys(self, started: fx.Node | None, like, step: int) -> tuple[list[fx.Node] | None, list[fx.Node]]:
        """Wait for the block of the next step; return it, None if none comes, and a mark of the exchange."""
        if started is None:
            return None, []
        arrived, mark = self._arrived(started)
        if self.ring.keys_from(self.place, step) is None:
            return None, [mark]
        return self._unpacked(arrived, 0, like, self.ring.block(self.place, step + 1)), [mark]

    def _arrived(self, started: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Wait for an exchange; return what came and a mark of it, which holds no memory."""
        arrived = self.call(c10d.wait_tensor.default, started)
        return arrived, self.call(aten.new_empty.default, arrived, [0])

    def _after(self, x: fx.Node, marks: list[fx.Node]) -> fx.Node:
        return self.call(autopar.after.default, x, marks) if marks else x

    def _start_gradients(self, parts: list[fx.Node] | None, like, step: int) -> fx.Node:
        """Start to send a block's gradients on behind the step that added to them."""
        to, sources = self.ring.gradients_to(self.place, step), self.ring.gradients_from(self.place, step)
        message = self._packed(parts) if to is not None else None
        wide = lse_dtype(like[0].meta["val"].dtype)
        return self._start(message, like, {to} - {None}, set(sources), "gradients", wide)

    def _received_gradients(self, started: fx.Node | None, own, like, step: int):
        """Wait for what was sent behind a step; return the gradients that came of the block that is worked on now, None
        if none did, those of the own block with what came home, and a mark of the exchange."""
        if started is None:
            return None, own, []
        arrived, mark = self._arrived(started)
        passed = None
        for row, source in enumerate(self.ring.gradients_from(self.place, step)):
            block = self.ring.block(source, step)
            found = self._unpacked(arrived, row, like, block)
            if block == self.place:
                own = self._sums(own, found)
            else:
                passed = found
        return passed, own, [mark]

    def _start(
        self,
        message: fx.Node | None,
        like,
        to: set[int],
        sources: set[int],
        what: str,
        dtype: torch.dtype | None = None,
    ) -> fx.Node:
        """Start an all-to-all that sends the message, a row, to the device in `to` and takes one from each of
        `sources`."""
        if message is None:
            dtype = dtype or like[0].meta["val"].dtype
            message = self.call(aten.new_empty.default, like[0], [0, sum(self._counts(like))])
            message = self._in(dtype, message)
        received, sent = ([int(place in places) for place in range(self.ring.size)] for places in (sources, to))
        arguments = message, received, sent, ",".join(self.axes)
        started = self.call(c10d.all_to_all_single.default, *arguments, name=f"{self.node.name}_{what}_start")
        phase = self.builder.meta.get("phase", "forward")
        sent_bytes = float(bytes_of(message.meta["val"]))
        started.meta["collective"] = Collective("all_to_all", self.axes, sent_bytes, self.node.name, phase)
        started.meta["tensor_bytes"] = (
            message.meta["val"].shape[1] * message.meta["val"].element_size() * self.ring.size
        )
        return started

    def _counts(self, like: Sequence[fx.Node]) -> list[int]:
        """Return the elements of keys and of values in a message."""
        return [math.prod(self._padded(x)) for x in like]

    def _padded(self, x: fx.Node) -> list[int]:
        b, h, _, d = x.meta["val"].shape
        return [b, h, self.longest, d]

    def _packed(self, parts: Sequence[fx.Node]) -> fx.Node:
        """Return keys and values, or their gradients, as one row."""
        flat = []
        for x in parts:
            missing = self.longest - x.meta["val"].shape[KEYS]
            x = self.call(aten.constant_pad_nd.default, x, [0, 0, 0, missing], 0) if missing else x
            flat.append(self.call(aten.reshape.default, x, [-1]))
        row = self.call(aten.cat.default, flat)
        return self.call(aten.reshape.default, row, [1, -1])

    def _unpacked(self, arrived: fx.Node, row: int, like: Sequence[fx.Node], block: int) -> list[fx.Node]:
        """Return keys and values, or their gradients, of a block that arrived as a row."""
        message, found, start = self.call(aten.select.int, arrived, 0, row), [], 0
        for x, count in zip(like, self._counts(like)):
            x = self.call(
                aten.reshape.default, self.call(aten.slice.Tensor, message, 0, start, start + count), self._padded(x)
            )
            length = self.blocks[block][1]
            found.append(x if length == self.longest else self.call(aten.slice.Tensor, x, KEYS, 0, length))
            start += count
        return found
