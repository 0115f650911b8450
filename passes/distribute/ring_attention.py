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
query is from its first key, and has those keys alone that its window reaches.

Messages are those of ring_messages.py. Each output depends on the same exchanges on all devices, also on those that
neither send nor receive, so that whatever removes what nobody needs removes it everywhere.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from ..._torch import op_name
from ...ir.layout import Layout, local_offset
from ...ir.mesh import Mesh
from ...ops import ATTENTION, autopar
from ...ops.attention_forms import lse_dtype
from ...ops.ring import Block, Ring
from ...plans.sharding import NodeSharding
from ...rules.layers import is_added
from ...rules.localize import heads_read, weights_from
from ...rules.reading import bound, tensors_by_name
from ...rules.rings import KEYS, Round, round_of
from .emit import Builder
from .ring_documents import DocumentMessages
from .ring_mask import ROWS, MaskGradient, with_zeros
from .ring_messages import RingMessages

aten = torch.ops.aten
DROPS = ("state", "p", "stream", "strides", "micro_batch_step")  # arguments of dropout that all steps have


class RingAttention:
    """Adds the steps of ring attention to one device's graph."""

    def __init__(self, builder: Builder, mesh: Mesh, coordinate: Mapping[str, int], rank: int):
        self.builder, self.mesh, self.coordinate, self.rank = builder, mesh, coordinate, rank
        self.reached: dict[tuple[str, Layout, Round], fx.Node] = {}

    def goes_round(self, node: fx.Node, sharding: NodeSharding) -> bool:
        """Return whether an op is attention whose keys are cut with its queries over more than one device."""
        return node.target in ATTENTION and round_of(node, sharding.inputs, self.mesh) is not None

    def _reached(self, name: str, layout: Layout, around: Round, documents: fx.Node) -> fx.Node:
        """Return which rows devices reach among documents, which is found once for all attentions."""
        key = name, layout, around
        if key not in self.reached:
            ends = [place for block in around.blocks for ends in block for place in ends]
            before = self.builder.meta
            self.builder.meta = {k: before[k] for k in ("phase", "module", "source") if k in before}
            arguments = documents, ends, len(around.blocks), around.causal, around.window
            self.reached[key] = self.builder.call(autopar.reached_rows.default, *arguments, name=f"{name}_reached")
            self.builder.meta = before
        return self.reached[key]

    def __call__(self, node: fx.Node, sharding: NodeSharding, args: Sequence) -> list[fx.Node]:
        """Return the local outputs of an attention, forward or backward. `args`: its arguments, tensors local."""
        around = round_of(node, sharding.inputs, self.mesh, self.rank)
        assert around is not None  # as it goes round
        names, given = list(tensors_by_name(node)), bound(node)
        self.builder.meta = {**self.builder.meta, "part_of": node.name}
        place = self.mesh.group(around.axes, self.rank).index(self.rank)
        at = node, sharding.inputs, self.mesh, self.coordinate, names.index("q")
        heads = heads_read(*at)
        row = local_offset(given["q"].meta["val"].shape, sharding.inputs[names.index("q")], *at[2:4], KEYS)
        local = dict(zip(given, args))
        documents = [local.get(name) for name in ("documents", "key_documents")]
        drops = {**{name: local.get(name, given[name]) for name in DROPS}, **weights_from(*at, row)}
        drops = drops if given["state"] is not None else {}
        ways = self.builder, around.axes, place, around.ring, node.name, [local["k"], local["v"]]
        messages = RingMessages(*ways)
        ids = local.get("key_documents")
        if ids is not None and given["documents"] is given["key_documents"]:
            layout = sharding.inputs[names.index("key_documents")]
            messages = DocumentMessages(*ways, self._reached(given["documents"].name, layout, around, ids))
        steps = _Steps(self.builder, node, messages, around.blocks, heads, documents, drops, row)
        if node.target is autopar.attention.default:
            return steps.forward(*args[:6], sinks=local.get("sinks"))
        return steps.backward(*args[:9], is_exact=bool(given["of_block"]))


Parts = list[fx.Node]  # keys and values, or their gradients


@dataclass(frozen=True)
class _Steps:
    """One attention's way round. `blocks`: the places of every device's keys; `heads`: which heads of them its queries
    read, if not all (autopar/ops/attention_heads.py); `documents`: of the device's queries and of all keys; `drops`:
    arguments of the dropout of the weights of the device's queries and all keys, if there is one; `row`: the number of
    the device's first query."""

    builder: Builder
    node: fx.Node
    messages: RingMessages
    blocks: Sequence[Block]
    heads: Mapping[str, Any]
    documents: Sequence[fx.Node | None]
    drops: Mapping[str, Any]
    row: int

    @property
    def ring(self) -> Ring:
        """Return what is sent where."""
        return self.messages.ring

    @property
    def place(self) -> int:
        """Return the device's number."""
        return self.messages.place

    def forward(self, q, k, v, mask, causal: bool, scale: float | None, *, sinks: fx.Node | None) -> list[fx.Node]:
        """Return output and log-sum-exp."""
        ring = self.ring
        works = {i: ring.open_halves(self.place, i) for i in ring.steps if ring.works(self.place, i)}
        last = {half: max(step for step, halves in works.items() if half in halves) for half in ring.halves}
        is_one = len(ring.halves) == 1
        held: fx.Node | None = None
        joined: dict[int, list[fx.Node]] = {}  # by half of the queries
        unused: list[fx.Node] = []
        highest = self.call(aten.amax.default, mask, [-1], True) if is_added(mask) and not causal else None
        for step, following in itertools.zip_longest(ring.steps, ring.steps[1:]):
            started = self._start_keys(following, held)
            if step in works:
                keys = self._keys(held, step)
                (here,), block = self._open(step, mask, [q])
                name = self._name(is_one and step == last[0] == 0)
                arguments = here, *keys, block, causal and step == 0, scale
                result = self._pair(autopar.attention.default, *arguments, name=name, **self._constants(step))
                if highest is not None:
                    count = keys[0].meta["val"].shape[KEYS]
                    result[1] = self.call(autopar.block_lse.default, result[1], highest, block, count)
                for half in works[step]:
                    own = result if len(works[step]) == 1 else [self._half(x, (half,)) for x in result]
                    if half in joined:
                        name = self._name(is_one and step == last[half])
                        arguments = *joined[half], *own, step == last[half]
                        own = self._pair(autopar.join_attention.default, *arguments, name=name)
                    joined[half] = own
            held, marks = self._received_keys(started, following)
            unused += marks if held is None else []
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
        dmask = MaskGradient(self.call, mask) if self.node.target is autopar.attention_bias_bw.default else None
        held: fx.Node | None = None
        dq: fx.Node | None = None
        own: fx.Node | None = None  # gradients of the own block, as rows
        coming, before = None, 0  # an exchange of gradients, and the step behind which it started
        of_keys: list[fx.Node] = []
        of_gradients: list[fx.Node] = []
        unused: list[fx.Node] = []
        for step, following in itertools.zip_longest(self.ring.steps, self.ring.steps[1:]):
            started = self._start_keys(following, held)
            rows: fx.Node | None = None
            if self.ring.works(self.place, step):
                (dy, query, *joined), block = self._open(step, mask, [grad, q, out, lse])
                arguments = dy, query, *self._keys(held, step), *joined, block, causal and step == 0, scale
                of_block: dict[str, Any] = {"of_block": True} if is_exact or is_added(mask) else {}
                made = self.call(self.node.target, *arguments, **self._constants(step), **of_block)
                found = [self._in(wide, self.call(operator.getitem, made, i)) for i in range(3)]
                if dmask is not None:
                    self._add_to(dmask, self.call(operator.getitem, made, 3), step)
                here = self._with_zeros(found[0], self.ring.open_halves(self.place, step))
                dq = here if dq is None else self.call(aten.add.Tensor, dq, here)
                rows = self.messages.packed(found[1:])
            own = own or rows
            assert dq is not None and own is not None  # each device has something to do in the first step
            if coming is not None:
                passed, own, mark = self.messages.received_gradients(coming, before, own)
                rows = rows if passed is None else self.call(aten.add.Tensor, passed, rows)
                of_gradients.append(mark)
            coming, before = self.messages.start_gradients(step, rows, own) if step else None, step
            held, marks = self._received_keys(started, following)
            of_keys += marks
            unused += marks if held is None else []
        assert dq is not None and own is not None
        if coming is not None:
            _, own, mark = self.messages.received_gradients(coming, before, own)
            of_gradients.append(mark)
        outputs = [self._in(x.meta["val"].dtype, d) for x, d in zip((q, k, v), (dq, *self.messages.unpacked(own)))]
        all_marks = of_keys + of_gradients
        of_mask = [] if dmask is None else [dmask.whole()]
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

    def _keys(self, held: fx.Node | None, step: int) -> Parts:
        """Return the keys and values of a step: the own ones, or those of the rows that came."""
        return list(self.messages.like) if held is None else self.messages.unpacked(held)

    def _open(self, step: int, mask: fx.Node | None, rows: Parts) -> tuple[Parts, fx.Node | None]:
        """Return, of what has the device's queries in dim 2, those that have something to do in a step, and what
        another mask says of them and of the keys of the step."""
        halves = self.ring.open_halves(self.place, step)
        if mask is not None and mask.meta["val"].shape[-1] > 1:
            mask = self._of_keys(mask, step)
        if mask is not None and mask.meta["val"].shape[-2] > 1:
            mask = self._half(mask, halves, -2)
        return [self._half(x, halves) for x in rows], mask

    def _constants(self, step: int) -> dict[str, Any]:
        """Return which heads of keys are read in a step, the documents of queries and keys, and what is dropped."""
        documents, of_all_keys = self.documents
        constants = {**self.heads, **self._capped, **self._within(step), **self._dropped(step)}
        if documents is None or of_all_keys is None:
            return constants
        documents = self._half(documents, self.ring.open_halves(self.place, step), -1)
        return {**constants, "documents": documents, "key_documents": self._of_keys(of_all_keys, step)}

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
        ((first, _),) = self._places(step)
        return first

    def _places(self, step: int) -> list[tuple[int, int]]:
        """Return the places of the keys of a step among all."""
        start, stop = self.ring.reached(self.place, step)
        found, at = [], 0
        for first, end in self.blocks[self.ring.block(self.place, step)]:
            low, high = max(start - at, 0), min(stop - at, end - first)
            found += [(first + low, first + high)] if low < high else []
            at += end - first
        return found

    def _of_keys(self, x: fx.Node, step: int) -> fx.Node:
        """Return what a tensor with all keys in the last dim has of those of a step."""
        found = [self.call(aten.slice.Tensor, x, -1, *ends) for ends in self._places(step)]
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
        if dmask.mask.meta["val"].shape[ROWS] > 1:
            part = self._with_zeros(part, self.ring.open_halves(self.place, step), ROWS)
        dmask.add(part, self._places(step))

    def _whole(self, pairs: list[list[fx.Node]]) -> list[fx.Node]:
        """Return output and log-sum-exp of a block, given those of its halves; stored as (b, s, h, d)."""
        outs = [self.call(aten.transpose.int, out, 1, KEYS) for out, _ in pairs]
        out = self.call(aten.transpose.int, self.call(aten.cat.default, outs, 1), 1, KEYS)
        return [out, self.call(aten.cat.default, [lse for _, lse in pairs], KEYS)]

    def _after(self, x: fx.Node, marks: list[fx.Node]) -> fx.Node:
        return self.call(autopar.after.default, x, marks) if marks else x

    def _start_keys(self, following: int | None, held: fx.Node | None) -> fx.Node | None:
        """Start to send the rows of the next step; None behind the last one."""
        return None if following is None else self.messages.start_keys(following, self.own_rows, held)

    def _received_keys(self, started: fx.Node | None, following: int | None) -> tuple[fx.Node | None, list[fx.Node]]:
        """Wait for the rows of the next step; return them, None if none come, and a mark of the exchange."""
        if started is None or following is None:
            return None, []
        held, mark = self.messages.received_keys(started, following)
        return held, [mark]

    @cached_property
    def own_rows(self) -> fx.Node:
        """Return the keys and values of the own block as rows."""
        return self.messages.packed(self.messages.like)
