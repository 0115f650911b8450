"""Keep the log-sum-exp of queries of which all keys are closed by a number that is added, not by -inf.

Libraries close keys by adding the lowest finite number of the type. A query whose keys are all closed so attends to all
of them alike, as its scores are lost in that number, and so is what tells one key from many: the log-sum-exp is the
number itself. Outputs over blocks of keys then join by the log of how many keys each block has.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op


@custom_op("autopar::block_lse", mutates_args=())
def block_lse(lse: Tensor, highest: Tensor, block: Tensor, keys: int) -> Tensor:
    """Return a log-sum-exp (b, h, s) over a block of so many `keys`, by which its output joins others'. `block`: what
    is added to their scores, broadcastable to (b, h, s, keys); `highest`: the most that is added to any key of a query,
    one column. Where that is so low that nothing else is left, it is the log of how many keys of the block have it."""
    times = keys if block.shape[-1] == 1 else 1
    many = _four(block == highest).sum(-1).to(lse.dtype) * times
    return torch.where(_is_lost(highest, lse), many.log(), lse)


@custom_op("autopar::whole_lse", mutates_args=())
def whole_lse(lse: Tensor, highest: Tensor) -> Tensor:
    """Return the log-sum-exp (b, h, s) over all keys, given that of joined blocks: of the queries that `block_lse`
    means it is the number that is added to their keys, as attention over all keys has it."""
    return torch.where(_is_lost(highest, lse), _four(highest).squeeze(-1).to(lse.dtype), lse)


def _four(added: Tensor) -> Tensor:
    """Return what is added to scores with all four dims."""
    return added.reshape((1,) * (4 - added.dim()) + tuple(added.shape))


def _is_lost(highest: Tensor, lse: Tensor) -> Tensor:
    """Return whether scores of a usual size are lost in the highest number that is added to them."""
    limit = -1.0 / torch.finfo(lse.dtype).eps
    return _four((highest < limit) & (highest > float("-inf"))).squeeze(-1)


@block_lse.register_fake
def _(lse, highest, block, keys):
    return torch.empty_like(lse)


@whole_lse.register_fake
def _(lse, highest):
    return torch.empty_like(lse)
