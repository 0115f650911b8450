"""ResNet: stages of residual blocks of convolutions and batch norms, pooled into a linear head.

He et al., arXiv 1512.03385, with the stride of a bottleneck in its 3x3 convolution, as most published weights have it.
Shapes: B batch, C channels, and pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ModelError
from .output import Output
from .sizes import require_positive

# By depth: blocks a stage, and whether they are bottlenecks (table 1; depth 10 is the smallest of the same form).
STAGES = {
    10: ((1, 1, 1, 1), False),
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
    152: ((3, 8, 36, 3), True),
}
EXPANSION = 4  # of a bottleneck's channels at its end


@dataclass(frozen=True)
class Config:
    """Sizes; the defaults are ResNet-50's. `width` is the channels of the first stage, `image` pixels a side. Raises
    ModelError on a depth that the paper does not have."""

    depth: int = 50
    width: int = 64
    image: int = 224
    classes: int = 1000

    def __post_init__(self):
        require_positive(self, "depth", "width", "image", "classes")
        if self.depth not in STAGES:
            raise ModelError(f"there is no ResNet of depth {self.depth}", fix=f"use {', '.join(map(str, STAGES))}")


def convolution(before: int, after: int, size: int, stride: int = 1, activated: bool = True) -> nn.Sequential:
    """Return convolution and batch norm, and a ReLU if `activated`, (B, before, ...) -> (B, after, ...)."""
    layers = [nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(after)]
    return nn.Sequential(*layers, nn.ReLU()) if activated else nn.Sequential(*layers)


class Block(nn.Module):
    """Two 3x3 convolutions, or a bottleneck of 1x1, 3x3 and 1x1, added to the (projected) input."""

    def __init__(self, before: int, channels: int, stride: int, bottleneck: bool):
        super().__init__()
        after = channels * EXPANSION if bottleneck else channels
        if bottleneck:
            self.path = nn.Sequential(
                convolution(before, channels, 1),
                convolution(channels, channels, 3, stride),
                convolution(channels, after, 1, activated=False),
            )
        else:
            self.path = nn.Sequential(
                convolution(before, channels, 3, stride), convolution(channels, after, 3, activated=False)
            )
        same = before == after and stride == 1
        self.shortcut = nn.Identity() if same else convolution(before, after, 1, stride, activated=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute images (B, C, height, width) -> (B, C2, height / stride, width / stride)."""
        return F.relu(self.path(x) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, stages of blocks that halve the image, and a linear layer to the classes."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        counts, bottleneck = STAGES[config.depth]
        self.stem = convolution(3, config.width, 7, stride=2)
        self.blocks = nn.ModuleList()
        channels = config.width
        for stage, count in enumerate(counts):
            for i in range(count):
                block = Block(channels, config.width * 2**stage, 2 if stage and not i else 1, bottleneck)
                self.blocks.append(block)
                channels = config.width * 2**stage * (EXPANSION if bottleneck else 1)
        self.head = nn.Linear(channels, config.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Output:
        """Compute logits (B, classes), and the loss if there are labels, from pixel_values (B, 3, image, image) and
        labels (B) below config.classes."""
        x = F.max_pool2d(self.stem(pixel_values), 3, stride=2, padding=1)  # (B, width, image / 4, image / 4)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x.mean((2, 3)))  # (B, classes)
        return Output(None if labels is None else F.cross_entropy(logits, labels), logits)


def build(**options) -> ResNet:
    """Build a ResNet of these options (see Config), freshly initialised."""
    return ResNet(Config(**options))
