"""Hold what the chunks of a row leave each other on a device: keys and values, and the sums of their gradients.

A tensor is made for the whole row when its first chunk asks for it; every chunk sees its beginning, up to its own last
token. Keys go with the row's last backward, or after the last chunk's forward where there is none; sums begin at zero.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ..ops.kept_keys import TOKENS


class KeptRows:
    """The tensors of a stage by row, as lists with one item a rank. `chunks`: of a row, micro-batches that follow one
    another."""

    def __init__(self, chunks: int):
        self.chunks = chunks
        self.rows: dict[int, dict[tuple[str, int], Tensor]] = {}

    def part(self, node: fx.Node, i: int, at: int, device: torch.device) -> Tensor:
        """Return what micro-batch `i` sees, on the rank `at`, of what a placeholder names."""
        row, number = divmod(i, self.chunks)
        kept, like, role = self.rows.setdefault(row, {}), node.meta["val"], node.meta["role"]
        key = node.name, at
        if key not in kept:
            make = torch.zeros if role.kind == "kept_sum" else torch.empty
            b, h, tokens, d = like.shape
            kept[key] = make((b, tokens, h, d), dtype=like.dtype, device=device).transpose(1, TOKENS)
        whole = kept[key]
        return whole.narrow(TOKENS, 0, whole.shape[TOKENS] // self.chunks * (number + 1))

    def forward_ended(self, i: int, has_backward: bool) -> None:
        """Let go of a row after the forward of its last chunk, if no backward reads it."""
        if not has_backward and i % self.chunks == self.chunks - 1:
            self.rows.pop(i // self.chunks, None)

    def backward_ended(self, i: int) -> None:
        """Let go of a row after the backward of its first chunk, which is its last."""
        if i % self.chunks == 0:
            self.rows.pop(i // self.chunks, None)


def is_kept(node: fx.Node) -> bool:
    """Return whether a placeholder names something that the chunks of a row leave each other."""
    return node.meta["role"].kind in ("kept", "kept_sum")
