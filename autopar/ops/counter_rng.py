"""Random numbers by counter: `autopar::dropout`, `autopar::uniform` and `autopar::normal`.

A number is a function of a seed, the forward's offset, the op's stream number in the graph and the element's index in
the global tensor, and of nothing else. So every device draws its part of what one device would draw, whatever the
layout; the backward draws a mask again instead of reading a saved one; and a run that stops goes on from two integers.

Generator: Squares (Widynski, "Squares: a fast counter-based RNG", arXiv 2004.06278), counter = global index, key = a
hash of (seed, offset, stream) by the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014). It needs 64-bit
products alone, which every device has as int64 (they wrap around), a fifth of the work of Philox 4x32-10.

`state` is int64 (2,) on the CPU, seed and offset. The element at local index (i, j, ..) has the global index
start + i * strides[0] + j * strides[1] + ...; globally start is 0 and strides are those of a contiguous tensor. In the
graph of one micro-batch (passes/pipeline/micro_batch.py) `state` has the number of the micro-batch too, and it starts
`micro_batch_step` further than the one before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.library import custom_op

BLOCK_NUMEL = {"cpu": 2**15, "cuda": 2**21}  # words drawn at once, which stay in a core's or the device's cache
WORD_BYTES = 48  # of memory for each word that is drawn, at the most: six numbers at a time
LONG_ROW = 8  # elements from which on fewer words are drawn than there are elements
LOW_32 = 2**32 - 1
ALL = 2**16  # the steps of a probability to drop


# the generator
# ---------------------------------------------------------------------------------------------------------


def key_of(seed: int, offset: int, stream: int) -> int:
    """Return an odd 64-bit key, as the signed integer of the same bits."""
    z = 0
    for word in (seed, offset, stream):
        z = (z + word + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        z ^= z >> 31
    return (z | 1) - (z >> 63 << 64)


def squares64(counter: Tensor, key: int) -> Tensor:
    """Return 64 random bits for each counter, by five rounds, both as int64."""
    y = counter * key
    z = y + key
    x = torch.addcmul(y, y, y)
    for weyl in (z, y):
        _swap(x)
        x = torch.addcmul(weyl, x, x)
    _swap(x)
    t = torch.addcmul(z, x, x)
    del z, weyl
    x = t.clone()
    _swap(x)
    return torch.addcmul(y, x, x).bitwise_right_shift_(32).bitwise_and_(LOW_32).bitwise_xor_(t)


def _swap(x: Tensor) -> None:
    """Exchange the two halves of each 64-bit word, in place."""
    high = (x >> 32).bitwise_and_(LOW_32)
    x.bitwise_left_shift_(32).bitwise_or_(high)


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """Return the steps of the global index along each dim of a whole tensor."""
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def _merged(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Return (size, stride) of the dims with those joined that lie in the global tensor without a gap; at least one."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides):
        if dims and dims[-1][1] == size * stride:
            dims[-1] = dims[-1][0] * size, stride
        elif size != 1:
            dims.append((size, stride))
    return dims or [(1, 1)]


def _firsts(dims: list[tuple[int, int]], start: int, device: torch.device) -> Tensor:
    """Return the global index of the first element of each row of a tensor seen as a matrix, whose columns its last
    merged dim gives."""
    rows = torch.full((1,), start, device=device)
    for size, stride in dims[:-1]:
        rows = (rows[:, None] + torch.arange(0, size * stride, stride, device=device)).reshape(-1)
    return rows


def _pieces(rows: int, width: int, words: int, each: int, device_type: str) -> Iterator[tuple[slice, slice]]:
    """Yield pieces of a matrix whose rows take so many words, one for `each` columns."""
    block = BLOCK_NUMEL.get(device_type, BLOCK_NUMEL["cuda"])
    height = max(1, block // words)
    for top in range(0, rows, height):
        for left in range(0, width, each * block):
            yield slice(top, top + height), slice(left, min(left + each * block, width))


def _blocks(
    dims: list[tuple[int, int]], start: int, device: torch.device
) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
    """Yield pieces of a tensor seen as a matrix, with the global indices of their elements."""
    firsts, (width, step) = _firsts(dims, start, device), dims[-1]
    for slices in _pieces(len(firsts), width, width, 1, device.type):
        columns = torch.arange(slices[1].start * step, slices[1].stop * step, step, device=device)
        yield slices, firsts[slices[0], None] + columns


def _are_fours(dims: list[tuple[int, int]], start: int) -> bool:
    """Return whether every four neighbours, from the first on, are those of a word."""
    *outer, (width, step) = dims
    return step == 1 and not any(n % 4 for n in (start, width, *(stride for _, stride in outer)))


def _are_long(dims: list[tuple[int, int]]) -> bool:
    """Return whether neighbours share words, wherever a row begins in one."""
    return dims[-1][1] == 1 and dims[-1][0] >= LONG_ROW


def _words_of_row(width: int) -> int:
    """Return the words that a row may reach into, and none that it does not need to be shifted."""
    return width // 4 + 2


def drawing_bytes(shape: Sequence[int], strides: Sequence[int], start: int, device_type: str) -> int:
    """Return the bytes that dropout needs at its peak for bits of a tensor of this shape, beside what it makes."""
    dims, numel = _merged(shape, strides), math.prod(shape)
    each = 4 if _are_fours(dims, start) or _are_long(dims) else 1
    words = numel if each == 1 else numel // dims[-1][0] * _words_of_row(dims[-1][0])
    return min(words, BLOCK_NUMEL[device_type]) * (WORD_BYTES + each)


def _short_words(dims: list[tuple[int, int]], start: int, key: int, device: torch.device):
    """Yield pieces as `_blocks` does, with 16 random bits for each element as int16: the quarters of a word serve four
    neighbours, lowest first."""
    *outer, (width, _) = dims
    if _are_fours(dims, start):
        quarters = [*((size, stride // 4) for size, stride in outer), (width // 4, 1)]
        for (rows, columns), counter in _blocks(quarters, start // 4, device):
            slices = rows, slice(4 * columns.start, 4 * columns.stop)
            yield slices, squares64(counter, key).view(torch.int16)
    elif _are_long(dims):
        firsts = _firsts(dims, start, device)
        for slices in _pieces(len(firsts), width, _words_of_row(width), 4, device.type):
            first, count = firsts[slices[0], None] + slices[1].start, slices[1].stop - slices[1].start
            counter = (first >> 2) + torch.arange(_words_of_row(count), device=device)
            yield slices, _shifted(squares64(counter, key).view(torch.int16), first & 3, count)
    else:
        for slices, index in _blocks(dims, start, device):
            yield slices, (squares64(index >> 2, key) >> (index & 3) * 16).to(torch.int16)


def _shifted(quarters: Tensor, by: Tensor, count: int) -> Tensor:
    """Return so many columns of each row, from the one of number `by` (rows, 1), 0 to 3, on."""
    found = quarters[:, :count]
    for shift in (1, 2, 3):
        found = torch.where(by == shift, quarters[:, shift : shift + count], found)
    return found


# the ops
# ---------------------------------------------------------------------------------------------------------------


@custom_op("autopar::dropout", mutates_args=())
def dropout(
    x: Tensor, state: Tensor, p: float, stream: int, start: int, strides: Sequence[int], micro_batch_step: int = 0
) -> Tensor:
    """Return x (...) with elements set to zero with probability p, the others divided by 1 - p. p counts in multiples
    of 1 / ALL."""
    dropped = round(p * ALL)
    if dropped == ALL:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    out, dims = torch.empty(x.shape, dtype=x.dtype, device=x.device), _merged(x.shape, strides)
    source, target = (t.reshape(-1, dims[-1][0]) for t in (x, out))
    key, start = key_and_start(state, stream, start, micro_batch_step)
    for slices, word in _short_words(dims, start, key, x.device):
        torch.mul(source[slices], word >= dropped - ALL // 2, out=target[slices])
        del word  # before the next are drawn
    return out.mul_(ALL / (ALL - dropped))


def kept(
    shape: Sequence[int], strides: Sequence[int], start: int, key: int, dropped: int, device: torch.device
) -> Tensor:
    """Return whether `dropout` keeps each element of a tensor of this shape, as bools."""
    if dropped == ALL:
        return torch.zeros(shape, dtype=torch.bool, device=device)
    out, dims = torch.empty(shape, dtype=torch.bool, device=device), _merged(shape, strides)
    target = out.view(-1, dims[-1][0])
    for slices, word in _short_words(dims, start, key, device):
        torch.ge(word, dropped - ALL // 2, out=target[slices])
        del word
    return out


@custom_op("autopar::uniform", mutates_args=())
def uniform(
    state: Tensor,
    size: Sequence[int],
    stream: int,
    start: int,
    strides: Sequence[int],
    micro_batch_step: int = 0,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Draw numbers of [0, 1), multiples of the type's precision, of shape `size`."""
    bits = round(1 - math.log2(torch.finfo(dtype).eps))
    return _filled(
        key_and_start(state, stream, start, micro_batch_step),
        size,
        strides,
        dtype,
        device,
        lambda word: (word >> (64 - bits)).bitwise_and_(2**bits - 1).to(torch.float64).mul_(2.0**-bits),
    )


@custom_op("autopar::normal", mutates_args=())
def normal(
    state: Tensor,
    size: Sequence[int],
    stream: int,
    start: int,
    strides: Sequence[int],
    micro_batch_step: int = 0,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Draw standard normal numbers of shape `size` by the method of Box and Muller, Annals of Mathematical Statistics
    29, 1958, each from 64 bits."""

    def normal_of(word: Tensor) -> Tensor:
        radius = (word >> 32).bitwise_and_(LOW_32).to(torch.float64).add_(1).mul_(2.0**-32).log_().mul_(-2).sqrt_()
        return word.bitwise_and_(LOW_32).to(torch.float64).mul_(2 * math.pi * 2.0**-32).cos_().mul_(radius)

    return _filled(key_and_start(state, stream, start, micro_batch_step), size, strides, dtype, device, normal_of)


def key_and_start(state: Tensor, stream: int, start: int, micro_batch_step: int) -> tuple[int, int]:
    """Return the key of an op's numbers, and the global index of its first."""
    seed, offset, *micro_batch = state.tolist()
    return key_of(seed, offset, stream), start + micro_batch_step * sum(micro_batch)


def _filled(key_and_start, size, strides, dtype, device, number_of) -> Tensor:
    (key, start), out, dims = key_and_start, torch.empty(size, dtype=dtype, device=device), _merged(size, strides)
    target = out.reshape(-1, dims[-1][0])
    for slices, index in _blocks(dims, start, device):
        target[slices] = number_of(squares64(index, key))
    return out


dropout.register_fake(lambda x, *constants: x.new_empty(x.shape))
for op in (uniform, normal):
    op.register_fake(lambda state, size, *constants, dtype, device: torch.empty(size, dtype=dtype, device=device))


def _dropout_setup(ctx, inputs, output):
    _, state, *ctx.constants = inputs
    ctx.save_for_backward(state)


def _dropout_backward(ctx, grad):
    return dropout(grad, ctx.saved_tensors[0], *ctx.constants), *[None] * (1 + len(ctx.constants))


dropout.register_autograd(_dropout_backward, setup_context=_dropout_setup)


def of_micro_batch(state: Tensor, number: int) -> Tensor:
    """Return the state that one micro-batch of a forward takes: int64 (3,)."""
    return torch.cat([state, state.new_tensor([number])])
