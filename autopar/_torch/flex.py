"""torch's flex_attention while a model is traced: what it calls instead of its kernels, which have no graph."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

NAME = "torch.nn.attention.flex_attention"
Function = Callable[..., Tensor]


@contextlib.contextmanager
def flex_attention_by(attend: Callable[..., tuple[Tensor, Tensor, Tensor]], mask: Function) -> Iterator[None]:
    """Inside, flex_attention returns what `attend(q, k, v, score function, mask function, scale, is_of_blocks)` does:
    the output, the log-sum-exp and the largest score of each query, both in units of ln 2; functions are None where
    they change nothing. `mask(function, b, h, s, t, device)` makes the masks of all pairs; masks of blocks that are
    made know their function alone, not which blocks are open. What is compiled runs as it is. Nothing happens if nobody
    has imported flex_attention."""
    flex: Any = sys.modules.get(NAME)
    if flex is None:
        yield
        return

    def kernel(q, k, v, score, blocks, scale, options, *more):
        function = blocks[-1]
        is_plain = function is flex.noop_mask
        is_of_blocks = is_plain and flex._LARGE_SPARSE_BLOCK_SIZE not in [x for x in blocks if isinstance(x, int)]
        score = None if score is flex._identity else score
        return attend(q, k, v, score, None if is_plain else function, scale, is_of_blocks)

    def all_pairs(function: Function, b: int | None, h: int | None, s: int, t: int, device=None) -> Tensor:
        if flex._get_mod_type(function) is flex._ModificationType.SCORE_MOD:
            zero = torch.zeros((), device=device)
            return mask(lambda *at: ~torch.isneginf(function(zero, *at)), b or 1, h or 1, s, t, device)
        return mask(function, b or 1, h or 1, s, t, device)

    def converted(opened: Tensor, **sizes: int) -> tuple[Tensor, None]:
        return opened, None

    def blocks_of(
        found: tuple[Tensor, None], function: Function, lengths: tuple[int, int], q_block: int, kv_block: int
    ):
        b, h = found[0].shape[:2]
        count = [-(-length // size) for length, size in zip(lengths, (q_block, kv_block))]
        return stand_in((b, h, *count), (q_block, kv_block), function, lengths, found[0].device)

    def of_all_pairs(query: Tensor, key: Tensor):
        size = flex._LARGE_SPARSE_BLOCK_SIZE
        return stand_in((1, 1, 1, 1), (size, size), flex.noop_mask, (1, 1), query.device)

    def stand_in(shape, sizes, function: Function, lengths: tuple[int, int], device: torch.device):
        numbers = [torch.zeros(shape[:dims], dtype=torch.int32, device=device) for dims in (3, 4)]
        return flex.BlockMask(lengths, *numbers, *[None] * 6, sizes, function)

    def as_it_is(function=None, **options):
        return function if function is not None else as_it_is

    changed: list[tuple[Any, str, Any]] = [
        (flex, "flex_attention_hop", kernel),
        (flex, "_validate_device", lambda *tensors: None),
        (flex, "create_mask", all_pairs),
        (flex, "_convert_mask_to_block_mask", converted),
        (flex, "_create_sparse_block_from_block_mask", blocks_of),
        (flex, "_create_empty_block_mask", of_all_pairs),
        (flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
        (torch, "compile", as_it_is),
    ]
    before = [getattr(owner, name) for owner, name, _ in changed]
    try:
        for owner, name, new in changed:
            setattr(owner, name, new)
        yield
    finally:
        for (owner, name, _), old in zip(changed, before):
            setattr(owner, name, old)
