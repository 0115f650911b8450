"""Canonical ops for a compiler that fuses what it knows, in place of kernels that it cannot look into.

Each computes what its op does, in ops of torch alone, which by themselves would write large values between them:
`vocab_loss` all of the logits in fp32, `dropout` words of 8 bytes an element. Fused they are read and written once.
Four neighbours share a word of random bits, which each of them draws: integer products cost less than memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .counter_rng import LOW_32

MIXED = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)  # of SplitMix64, as signed integers
GOLDEN = 0x9E3779B97F4A7C15 - 2**64


def dropout(
    x: Tensor, state: Tensor, p: float, stream: int, start: int, strides: Sequence[int], micro_batch_step: int = 0
) -> Tensor:
    """Return what `autopar::dropout` does."""
    dropped = round(p * 2**16)
    if dropped == 2**16:
        return torch.zeros_like(x)
    index = _indices(x, strides) + start
    if micro_batch_step:
        index = index + (state[2:].sum() * micro_batch_step).to(x.device)
    word = _squares(index >> 2, _key(state, stream).to(x.device))
    bits = ((word >> ((index & 3) * 16)) & (2**16 - 1)) ^ 2**15
    return x * (bits >= dropped).to(x.dtype) * (2**16 / (2**16 - dropped))


def _indices(x: Tensor, strides: Sequence[int]) -> Tensor:
    """Return the place of each element in the global tensor, less that of the first."""
    index = torch.zeros([1] * x.dim(), dtype=torch.int64, device=x.device)
    for d, (size, stride) in enumerate(zip(x.shape, strides)):
        steps = torch.arange(size, device=x.device) * stride
        index = index + steps.reshape([-1 if e == d else 1 for e in range(x.dim())])
    return index


def _key(state: Tensor, stream: int) -> Tensor:
    """Return what `key_of` does, as a number on the host."""
    z = torch.zeros((), dtype=torch.int64)
    for word in (state[0], state[1], stream):
        z = z + word + GOLDEN
        z = (z ^ _shifted(z, 30)) * MIXED[0]
        z = (z ^ _shifted(z, 27)) * MIXED[1]
        z = z ^ _shifted(z, 31)
    return z | 1


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift right without the sign."""
    return (z >> bits) & (2 ** (64 - bits) - 1)


def _squares(counter: Tensor, key: Tensor) -> Tensor:
    """Return what `squares64` does."""
    y = counter * key
    z = y + key
    x = _swapped(y**2 + y)  # not y * y: Inductor writes an operand down as often as it is named
    x = _swapped(x**2 + z)
    x = _swapped(x**2 + y)
    t = x**2 + z
    x = _swapped(t)
    return t ^ _shifted(x**2 + y, 32)


def _swapped(x: Tensor) -> Tensor:
    return ((x >> 32) & LOW_32) | (x << 32)


def vocab_loss(logits: Tensor, target: Tensor, row_max: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """Return what `autopar::vocab_loss` does."""
    hit = _hits(logits, target, offset)
    wide = logits.to(row_max.dtype)
    total = (wide - row_max.unsqueeze(-1)).exp().sum(-1)
    return total, torch.where(hit, wide, 0.0).sum(-1)


def vocab_loss_bw(
    grad_sum: Tensor, grad_picked: Tensor, logits: Tensor, target: Tensor, row_max: Tensor, offset: int
) -> Tensor:
    """Return what `autopar::vocab_loss_bw` does."""
    top, factor, added = (t.unsqueeze(-1) for t in (row_max, grad_sum, grad_picked))
    grad = (logits.to(row_max.dtype) - top).exp() * factor
    return (grad + torch.where(_hits(logits, target, offset), added, 0.0)).to(logits.dtype)


def _hits(logits: Tensor, target: Tensor, offset: int) -> Tensor:
    """Return where a logit is that of its row's target."""
    columns = torch.arange(logits.shape[-1], device=logits.device)
    return columns == (target - offset).unsqueeze(-1)


autopar = torch.ops.autopar
FUSED: dict[object, Callable] = {
    autopar.dropout.default: dropout,
    autopar.vocab_loss.default: vocab_loss,
    autopar.vocab_loss_bw.default: vocab_loss_bw,
}
