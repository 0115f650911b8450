"""Time the canonical attention, forward and backward, for benchmarks/packed_documents.py and windows.py."""

from __future__ import annotations

import time

import torch

from autopar.ops import autopar

WIDTH, ROUNDS = 64, 3


def run(q: torch.Tensor, mask: torch.Tensor | None, causal: bool, *documents: torch.Tensor, window: int = 0) -> None:
    out, lse = autopar.attention(q, q, q, mask, causal, None, 0, 0, 0, *documents, window=window)
    autopar.attention_bw(out, q, q, q, out, lse, mask, causal, None, 0, 0, 0, *documents, window=window)


def seconds(*call, window: int = 0) -> float:
    """Return the least CPU seconds of some rounds, of this thread."""
    found = []
    for _ in range(ROUNDS):
        start = time.thread_time()
        run(*call, window=window)
        found.append(time.thread_time() - start)
    return min(found)
