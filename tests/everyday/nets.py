"""Small networks for the scripts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.faithful.nets import Block


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers of these widths, with an activation between them."""
    layers: list[nn.Module] = []
    for wide, next_wide in zip(widths, widths[1:]):
        layers += [nn.Linear(wide, next_wide), activation()]
    return nn.Sequential(*layers[:-1])


class Language(nn.Module):
    """tokens (B, S) -> logits (B, S, vocab), with tied embeddings."""

    def __init__(self, vocab: int = 16, width: int = 12, length: int = 16):
        super().__init__()
        self.embed, self.place = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.block, self.norm = Block(width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.block(x)))


class EncoderHead(nn.Module):
    """x (B, 8) -> (B, 3), of an encoder and a head."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = mlp(8, 16, 12), nn.Linear(12, 3)

    def forward(self, x):
        return self.head(F.relu(self.encoder(x)))


class ConvNet(nn.Module):
    """images (B, 1, 8, 8) -> logits (B, 4), with batch norm."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        )  # fmt: skip
        self.classifier = nn.Linear(8, 4)

    def forward(self, images):
        return self.classifier(self.features(images).flatten(1))
