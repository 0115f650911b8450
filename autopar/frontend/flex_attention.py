"""flex_attention as attention that is written out, with its mask and score functions in ops of all pairs.

With a mask function alone it is `scaled_dot_product_attention`; with a score function, two products and a softmax.
Both become the canonical attention with what they say, causal, windows, documents, caps, and numbers that are added, in
passes/canonicalize. Rows without any key are 0 there, as of flex_attention.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import _torch
from ..errors import CaptureError
from .scalar_functions import of_all, places

aten = torch.ops.aten
Function = Callable[..., Tensor]
MASKS = "transformers.masking_utils"


@contextmanager
def flex_attention_written_out() -> Iterator[None]:
    """Inside, flex_attention is traced as it is written here, and transformers gives it the padding of a batch without
    a look at whether there is any."""
    masks: Any = sys.modules.get(MASKS)
    before = getattr(masks, "fast_all", None)
    try:
        if before is not None:
            masks.fast_all = lambda tensor: False
        with _torch.flex_attention_by(attend, mask_of):
            yield
    finally:
        if before is not None:
            masks.fast_all = before


def mask_of(function: Function, b: int, h: int, s: int, t: int, device: torch.device | str | None) -> Tensor:
    """Return which pairs a mask function opens, (b, h, s, t)."""
    return of_all(function, places(b, h, s, t, device)).expand(b, h, s, t)


def attend(
    q: Tensor, k: Tensor, v: Tensor, score: Function | None, mask: Function | None, scale: float, is_of_blocks: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, log-sum-exps and largest scores, of which the graph keeps what is read. Raises CaptureError
    for functions that are not of numbers, and for a mask of blocks without one."""
    if is_of_blocks:
        raise CaptureError(
            "flex_attention has a BlockMask without a mask function: which blocks are open depends on the kernel",
            fix="pass mask_mod=, as create_block_mask does",
        )
    b, h, s, t = *q.shape[:3], k.shape[2]
    at = places(b, h, s, t, q.device)
    opened = None if mask is None else of_all(mask, at)
    if opened is not None:
        opened = opened.to(torch.bool).expand(*opened.shape[:2], s, t) if opened.dim() else opened.expand(1, 1, s, t)
    k, v = (x.expand(b, *x.shape[1:]) for x in (k, v))
    if score is None:
        out = F.scaled_dot_product_attention(q, k, v, opened, scale=scale, enable_gqa=True)
    else:
        weights = aten._safe_softmax(_scores(q, k, score, opened, scale, at), -1).to(q.dtype)
        out = weights @ _of_all_heads(v, h)
    scores = _scores(q, k, score, opened, scale, at)
    return out, torch.logsumexp(scores, -1) / math.log(2.0), scores.amax(-1) / math.log(2.0)


def _scores(q: Tensor, k: Tensor, score: Function | None, opened: Tensor | None, scale: float, at: tuple) -> Tensor:
    """Return the scores of all pairs, -inf where a pair is closed."""
    scores = torch.matmul(q, _of_all_heads(k, q.shape[1]).transpose(-1, -2)) * scale
    if score is not None:
        scores = of_all(score, at, (scores,))
    return scores if opened is None else scores.masked_fill(~opened, -math.inf)


def _of_all_heads(x: Tensor, heads: int) -> Tensor:
    """Return keys or values (b, h_kv, t, d) for each head of the queries."""
    b, few, t, d = x.shape
    return x if few == heads else x[:, :, None].expand(b, few, heads // few, t, d).reshape(b, heads, t, d)
