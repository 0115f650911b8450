"""Mixtral: Llama with a mixture of feed-forward experts in every layer, of which a router picks a few for each token.

Jiang et al., arXiv 2401.04088. Written densely: every expert computes every token, and the weights of those that were
not picked are zero. The result is the same, and every dim may be sharded; the work is experts / active times that of a
sparse layer. Shapes: B batch, S sequence, H hidden, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import ModelError
from . import llama
from .sizes import require_positive


@dataclass(frozen=True)
class Config(llama.Config):
    """Those of llama, `experts` in a layer and how many of them are `active` for a token. Raises ModelError on sizes
    that do not fit together."""

    experts: int = 8
    active: int = 2

    def __post_init__(self):
        super().__post_init__()
        require_positive(self, "experts", "active")
        if self.active > self.experts:
            raise ModelError(
                f"active={self.active} of experts={self.experts}", fix=f"set active to {self.experts} or less"
            )


class FeedForward(nn.Module):
    """The experts of one layer, weighted by the router's softmax over the picked ones, (B, S, H) -> (B, S, H)."""

    def __init__(self, config: Config):
        super().__init__()
        self.active = config.active
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        self.experts = nn.ModuleList(llama.FeedForward(config) for _ in range(config.experts))

    def forward(self, x: Tensor) -> Tensor:
        """Add up the picked experts of each position of x (B, S, H) -> (B, S, H)."""
        logits = self.router(x).float()  # (B, S, E)
        picked, which = logits.topk(self.active, dim=-1)  # (B, S, active)
        weights = torch.zeros_like(logits).scatter(-1, which, picked.softmax(-1)).to(x.dtype)  # (B, S, E)
        return sum(expert(x) * weight.unsqueeze(-1) for expert, weight in zip(self.experts, weights.unbind(-1)))


class MoE(llama.Llama):
    """A Llama whose feed-forwards are mixtures of experts."""

    def __init__(self, config: Config):
        super().__init__(config, FeedForward)


def build(**options) -> MoE:
    """Build a mixture of experts of these options (see Config), freshly initialised."""
    return MoE(Config(**options))
