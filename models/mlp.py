"""A stack of Linear - GELU - Linear blocks: the smallest model on which data and tensor parallelism differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from .output import Output
from .sizes import require_positive


@dataclass(frozen=True)
class Config:
    """Sizes. `ffn` is the inner width, 4 * hidden if None. Raises ModelError on sizes below 1."""

    hidden: int = 256
    ffn: int | None = None
    layers: int = 2
    bias: bool = True

    def __post_init__(self):
        if self.ffn is None and isinstance(self.hidden, int):
            object.__setattr__(self, "ffn", 4 * self.hidden)
        require_positive(self, "hidden", "ffn", "layers")


class Block(nn.Module):
    """down(gelu(up(x))), (..., H) -> (..., H)."""

    def __init__(self, config: Config):
        super().__init__()
        self.up = nn.Linear(config.hidden, config.ffn, bias=config.bias)
        self.down = nn.Linear(config.ffn, config.hidden, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Compute (..., H) -> (..., H)."""
        return self.down(F.gelu(self.up(x)))


class MLP(nn.Module):
    """Blocks one after the other."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))

    def forward(self, x: Tensor, target: Tensor | None = None) -> Output:
        """Compute the logits from x (..., H), and the loss if there is a target of the same shape: the mean squared
        error."""
        for block in self.blocks:
            x = block(x)
        return Output(None if target is None else F.mse_loss(x, target), x)


def build(**options) -> MLP:
    """Build an MLP of these options (see Config), initialised as torch's layers are."""
    return MLP(Config(**options))
