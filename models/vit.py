"""Vision transformer: an image as a sequence of patches with a class token, pre-LayerNorm blocks, a linear head on the
token.

Dosovitskiy et al., arXiv 2010.11929. Shapes: B batch, S patches and the class token, H hidden, D = H / heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .output import Output
from .sizes import require_divides, require_positive


@dataclass(frozen=True)
class Config:
    """Sizes; the defaults are ViT-B/16's. `image` and `patch` are pixels a side, `ffn` is 4 * hidden if None. Raises
    ModelError on sizes that do not fit together."""

    hidden: int = 768
    layers: int = 12
    heads: int = 12
    ffn: int | None = None
    image: int = 224
    patch: int = 16
    classes: int = 1000
    norm_eps: float = 1e-6

    def __post_init__(self):
        if self.ffn is None and isinstance(self.hidden, int):
            object.__setattr__(self, "ffn", 4 * self.hidden)
        require_positive(self, "hidden", "layers", "heads", "ffn", "image", "patch", "classes")
        require_divides(self, "heads", "hidden")
        require_divides(self, "patch", "image")


class Attention(nn.Module):
    """Self-attention of all patches, (B, S, H) -> (B, S, H)."""

    def __init__(self, config: Config):
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.proj = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions of x (B, S, H) -> (B, S, H), each with all."""
        batch, seq, hidden = x.shape
        q, k, v = (
            part.view(batch, seq, self.heads, hidden // self.heads).transpose(1, 2)  # (B, heads, S, D)
            for part in self.qkv(x).split(hidden, dim=-1)
        )
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, seq, hidden))


class Block(nn.Module):
    """One layer: attention and feed-forward, each on the normalised input and added back."""

    def __init__(self, config: Config):
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.attn = Attention(config)
        self.norm_2 = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.up = nn.Linear(config.hidden, config.ffn)
        self.down = nn.Linear(config.ffn, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention and feed-forward to x (B, S, H) -> (B, S, H)."""
        x = x + self.attn(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class ViT(nn.Module):
    """Patches of an image and a class token, blocks, a norm and a linear layer to the classes."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.patches = nn.Conv2d(3, config.hidden, config.patch, stride=config.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.hidden))
        self.positions = nn.Parameter(torch.empty(1, (config.image // config.patch) ** 2 + 1, config.hidden))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.classes)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1 and name != "class_token":
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Output:
        """Compute logits (B, classes), and the loss if there are labels, from pixel_values (B, 3, image, image) and
        labels (B) below config.classes."""
        x = self.patches(pixel_values).flatten(2).transpose(1, 2)  # (B, S - 1, H)
        x = torch.cat((self.class_token.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)[:, 0])  # (B, classes)
        return Output(None if labels is None else F.cross_entropy(logits, labels), logits)


def build(**options) -> ViT:
    """Build a vision transformer of these options (see Config), freshly initialised."""
    return ViT(Config(**options))
