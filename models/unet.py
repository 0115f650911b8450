"""U-Net: residual blocks of convolutions at halving and then doubling resolution, with a skip from each block down to
the block up.

The shape is that of Ho et al., arXiv 2006.11239, appendix B (two residual blocks a resolution, group norms, SiLU), with
channels that double, and without its attention and its embedding of time. Up by transposed convolutions, as in
Ronneberger et al.,
arXiv 1505.04597. Shapes: B batch, C channels, and pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ModelError
from .output import Output
from .sizes import require_positive


@dataclass(frozen=True)
class Config:
    """Sizes: `width` is the channels of the first resolution, `levels` the number of resolutions, `blocks` those of
    each, `image` pixels a side. Raises ModelError on an image that cannot be halved so often, or a width that has no
    groups."""

    width: int = 128
    levels: int = 4
    blocks: int = 2
    groups: int = 32
    image: int = 256
    channels: int = 3

    def __post_init__(self):
        require_positive(self, "width", "levels", "blocks", "groups", "image", "channels")
        if self.image % 2 ** (self.levels - 1):
            raise ModelError(f"{self.image} pixels cannot be halved {self.levels - 1} times", fix="use a power of two")
        if self.width % self.groups:
            raise ModelError(f"{self.width} channels have no {self.groups} equal groups", fix="use a multiple")


class Block(nn.Module):
    """Two 3x3 convolutions behind group norms, added to the (projected) input."""

    def __init__(self, before: int, after: int, groups: int):
        super().__init__()
        self.path = nn.Sequential(
            nn.GroupNorm(groups, before),
            nn.SiLU(),
            nn.Conv2d(before, after, 3, padding=1),
            nn.GroupNorm(groups, after),
            nn.SiLU(),
            nn.Conv2d(after, after, 3, padding=1),
        )
        self.shortcut = nn.Identity() if before == after else nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Compute images (B, C, height, width) -> (B, C2, height, width)."""
        return self.path(x) + self.shortcut(x)


class UNet(nn.Module):
    """Levels of blocks down to small images and up again, each way up joined with the level of the way down."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        sizes, groups = [config.width * 2**level for level in range(config.levels)], config.groups
        self.stem = nn.Conv2d(config.channels, sizes[0], 3, padding=1)
        self.down, self.shrink, self.up, self.grow = (nn.ModuleList() for _ in range(4))
        before = sizes[0]
        for level, size in enumerate(sizes):
            if level:
                self.shrink.append(nn.Conv2d(before, before, 3, stride=2, padding=1))
            self.down.append(
                nn.ModuleList(Block(before if not i else size, size, groups) for i in range(config.blocks))
            )
            before = size
        self.middle = Block(before, before, groups)
        for level, size in reversed([*enumerate(sizes)]):
            if level < config.levels - 1:
                self.grow.append(nn.ConvTranspose2d(before, size, 2, stride=2))
                before = size
            self.up.append(nn.ModuleList(Block(before + size, size, groups) for _ in range(config.blocks)))
            before = size
        self.head = nn.Sequential(
            nn.GroupNorm(groups, before), nn.SiLU(), nn.Conv2d(before, config.channels, 3, padding=1)
        )

    def forward(self, pixel_values: Tensor, target: Tensor | None = None) -> Output:
        """Compute the logits of pixel_values, and the loss if there is a target, both (B, channels, image, image): the
        mean squared error, of noise in a diffusion model."""
        x, skips = self.stem(pixel_values), []  # (B, width, image, image)
        for level, blocks in enumerate(self.down):
            x = self.shrink[level - 1](x) if level else x  # (B, C, image / 2**level, ...)
            for block in blocks:
                x = block(x)
                skips.append(x)
        x = self.middle(x)
        for level, blocks in enumerate(self.up):
            x = self.grow[level - 1](x) if level else x
            for block in blocks:
                x = block(torch.cat([x, skips.pop()], 1))
        logits = self.head(x)
        return Output(None if target is None else F.mse_loss(logits, target), logits)


def build(**options) -> UNet:
    """Build a U-Net of these options (see Config), freshly initialised."""
    return UNet(Config(**options))
