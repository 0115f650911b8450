"""Keys and values of a row's earlier chunks, which a causal attention of a later chunk reads.

Chunks of a sequence run one after the other as micro-batches (passes/pipeline/sequence_chunks.py). A plan is made for
two ops: `with_earlier` puts the keys of so many earlier tokens before those of a chunk, `of_own` gives what all later
chunks and this one say of the gradient of its own. They run as two others, which write in place (passes/distribute/
keep_keys.py): a device keeps the keys of a row in one tensor, into which every chunk writes its own, and adds up their
gradients in another, while the chunks' backwards run in reverse order.

Tensors are (b, h, tokens, d), all local.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, fx
from torch.library import Library, custom_op

from .attention_forms import lse_dtype

TOKENS = 2  # their dim
_LIBRARY = Library("autopar", "FRAGMENT")
_LIBRARY.define("keep_rows(Tensor(a!) kept, Tensor rows) -> Tensor(a!)")


@custom_op("autopar::with_earlier", mutates_args=())
def with_earlier(keys: Tensor, earlier: int) -> Tensor:
    """Return keys or values behind those of so many `earlier` tokens, which are not here: a plan's op, which runs as
    `keep_rows` does. Raises RuntimeError where there are any."""
    if earlier:
        raise RuntimeError("keys of earlier chunks are kept by a program of a rank, not by its plan's graph")
    return keys.clone()


@with_earlier.register_fake
def _(keys, earlier):
    b, h, tokens, d = keys.shape
    return keys.new_empty(b, earlier + tokens, h, d).transpose(1, 2)


@custom_op("autopar::of_own", mutates_args=())
def of_own(gradient: Tensor, own: int) -> Tensor:
    """Return the gradient of the last `own` tokens, to which later chunks have added: a plan's op, which runs as
    `add_rows` does."""
    return gradient.narrow(TOKENS, gradient.shape[TOKENS] - own, own).clone()


@of_own.register_fake
def _(gradient, own):
    b, h, _, d = gradient.shape
    return gradient.new_empty(b, own, h, d).transpose(1, 2)


def keep_rows(kept: Tensor, rows: Tensor) -> Tensor:
    """Write the rows of a chunk to the end of what is kept of its row up to it, and return that."""
    own = rows.shape[TOKENS]
    kept.narrow(TOKENS, kept.shape[TOKENS] - own, own).copy_(rows)
    return kept.view_as(kept)


_LIBRARY.impl("keep_rows", keep_rows, "CompositeImplicitAutograd")


@custom_op("autopar::add_rows", mutates_args={"sums"})
def add_rows(sums: Tensor, gradient: Tensor, own: int) -> Tensor:
    """Add the gradient of all keys up to a chunk's last to the sums of the row, and return that of the chunk's `own`
    tokens: chunks come in reverse order, so nothing is added to it any more."""
    sums.add_(gradient)
    return sums.narrow(TOKENS, sums.shape[TOKENS] - own, own).to(gradient.dtype, copy=True)


@add_rows.register_fake
def _(sums, gradient, own):
    b, h, _, d = gradient.shape
    return gradient.new_empty(b, own, h, d).transpose(1, 2)


def own_share(node: fx.Node) -> float:
    """Return the share of what a node gives that belongs to its own chunk: less than all where earlier keys come with
    it."""
    if node.target is not torch.ops.autopar.with_earlier.default:
        return 1.0
    own = cast(fx.Node, node.args[0])
    return float(own.meta["val"].shape[TOKENS] / node.meta["val"].shape[TOKENS])


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which gradients of keys are added up."""
    return lse_dtype(dtype)
