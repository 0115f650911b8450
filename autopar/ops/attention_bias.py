"""Keep the log-sum-exp and the gradient of queries of which all keys are closed by an added number, not by -inf.

Libraries close keys by adding the lowest finite number of the type. A query whose keys are all closed so attends to all
of them alike, as its scores are lost in that number, and so is what tells one key from many: the log-sum-exp is the
number itself. Outputs over blocks of keys then join by the log of how many keys each block has. Kernels, which make the
weights again from the log-sum-exp, give such a query a gradient as many times too large as it has keys; a softmax that
is written out does not.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from .attention_forms import lse_dtype


@custom_op("autopar::block_lse", mutates_args=())
def block_lse(lse: Tensor, highest: Tensor, block: Tensor, keys: int) -> Tensor:
    """Return a log-sum-exp (b, h, s) over a block of so many `keys`, by which its output joins others'. `block`: what
    is added to their scores, broadcastable to (b, h, s, keys); `highest`: the most that is added to any key of a query,
    one column. Where that is so low that nothing else is left, it is the log of how many keys of the block have it."""
    times = keys if block.shape[-1] == 1 else 1
    many = _four(block == highest).sum(-1).to(lse.dtype) * times
    return torch.where(_four(_is_lost(highest, lse.dtype)).squeeze(-1), many.log(), lse)


@custom_op("autopar::whole_lse", mutates_args=())
def whole_lse(lse: Tensor, highest: Tensor) -> Tensor:
    """Return the log-sum-exp (b, h, s) over all keys, given that of joined blocks: of the queries that `block_lse`
    means it is the number that is added to their keys, as attention over all keys has it."""
    lost = _four(_is_lost(highest, lse.dtype)).squeeze(-1)
    return torch.where(lost, _four(highest).squeeze(-1).to(lse.dtype), lse)


@custom_op("autopar::even_gradient", mutates_args=())
def even_gradient(grad: Tensor, mask: Tensor, keys: int) -> Tensor:
    """Return the gradient (b, h, s, d) of an attention's output from which its kernel makes what a softmax gives, under
    a `mask` that is added to the scores of so many `keys`: divided by how many keys a query attends to alike."""
    highest = mask.amax(-1, keepdim=True)
    many = (mask == highest).sum(-1, keepdim=True) * (keys if mask.shape[-1] == 1 else 1)
    lost = _is_lost(highest, lse_dtype(grad.dtype))
    return grad / torch.where(lost, many, 1).to(grad.dtype)


def _four(added: Tensor) -> Tensor:
    """Return what is added to scores with all four dims."""
    return added.reshape((1,) * (4 - added.dim()) + tuple(added.shape))


def _is_lost(highest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return whether scores of a usual size, in the log-sum-exp's type, are lost in the highest number that is added to
    them."""
    return (highest < -1.0 / torch.finfo(dtype).eps) & (highest > float("-inf"))


@block_lse.register_fake
def _(lse, highest, block, keys):
    return torch.empty_like(lse)


@whole_lse.register_fake
def _(lse, highest):
    return torch.empty_like(lse)


@even_gradient.register_fake
def _(grad, mask, keys):
    return torch.empty_like(grad)
