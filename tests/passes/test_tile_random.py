"""Row-wise regions of random models in pieces: found where they are expected, as eager on random meshes."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.ops import row_pieces

from .test_tile_rows import RMSNorm, assert_like_eager

ACTIVATIONS = {"gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh, "square": torch.square}


class Layer(nn.Module):
    """A residual of a norm and an MLP, drawn from a random generator. `regions`: of row-wise ops that it has."""

    def __init__(self, draw: random.Random, width: int):
        super().__init__()
        wide = 6 * draw.randint(2, 5)  # else an axis of three that is asked to cut a few columns moves them elsewhere
        self.norm = draw.choice([RMSNorm, RMSNorm, nn.LayerNorm, lambda _: nn.Identity()])(width)
        self.inside = draw.choice([RMSNorm, nn.LayerNorm, *([lambda _: nn.Identity()] * 3)])(wide)
        self.gate = nn.Linear(width, wide, draw.random() < 0.5) if draw.random() < 0.5 else None
        self.up, self.down = (nn.Linear(*ends, draw.random() < 0.5) for ends in ((width, wide), (wide, width)))
        self.activation, self.mixes = ACTIVATIONS[draw.choice(list(ACTIVATIONS))], draw.random() < 0.5
        self.regions = 1 + isinstance(self.norm, RMSNorm)

    @property
    def is_cut_by_columns(self) -> bool:
        return isinstance(self.inside, nn.Identity)

    def forward(self, x):
        rows = self.norm(x)
        wide = self.activation(self.up(rows))
        wide = self.inside(wide if self.gate is None else wide * self.gate(rows))
        x = x + self.down(wide)
        return x + x.mean(1, keepdim=True) if self.mixes else x  # of all rows of a sample


class Model(nn.Module):
    def __init__(self, draw: random.Random, width: int):
        super().__init__()
        self.body = nn.Embedding(7, width)
        self.layers = nn.ModuleList(Layer(draw, width) for _ in range(draw.randint(1, 3)))

    def forward(self, ids):
        x = self.body(ids)
        for layer in self.layers:
            x = layer(x)
        return x.tanh().square().mean()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", range(24))
def test_random_models_on_random_meshes(case, monkeypatch):
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    torch.manual_seed(seed % 2**31)
    monkeypatch.setattr(row_pieces, "MOST_ROWS", draw.randint(1, 6))
    model = Model(draw, draw.randint(2, 9)).double()
    axes = draw.sample(["dp", "tp"], draw.randint(1, 2))
    can_be_cut = all(layer.is_cut_by_columns for layer in model.layers)
    strategies = {"dp": ["ddp", "zero1", "fsdp"], "tp": ["megatron", "megatron_sp"]}
    named = [draw.choice(strategies[axis]) for axis in sorted(axes, reverse=True)]
    strategy = "+".join(named) if draw.random() < 0.7 and (can_be_cut or "tp" not in axes) else None
    mesh = ",".join(f"{axis}={draw.randint(2, 3)}" for axis in axes)
    shape = draw.randint(2, 5), draw.randint(4, 9)
    recompute = draw.choice(["none", "selective", "full"])
    print(mesh, strategy, shape, recompute, row_pieces.MOST_ROWS, model)
    plan = assert_like_eager(model, (torch.randint(0, 7, shape),), mesh, strategy, recompute=recompute)
    assert len(plan.tiled) == sum(layer.regions for layer in model.layers)
