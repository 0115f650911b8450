"""Micro-batches of mixtures of experts, and of ops that name the samples of a batch or mix them with another dim."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import nn

from tests.helpers import staged

from .test_micro_batch import check

functional = nn.functional


class Experts(nn.Module):
    """Tokens (B, S, H), each through the `active` experts that a router picks, whose bias makes some of them
    popular."""

    def __init__(self, experts: int, active: int, bias: torch.Tensor):
        super().__init__()
        self.active = active
        self.router = nn.Linear(6, experts)
        self.router.bias.data = bias
        self.up, self.down = (
            nn.Parameter(torch.randn(experts, 6, 10) / 3),
            nn.Parameter(torch.randn(experts, 10, 6) / 3),
        )

    def forward(self, x):
        tokens = x.reshape(-1, 6)  # (B * S, H)
        weights, which = self.router(tokens).softmax(-1).topk(self.active)
        rows, expert = tokens.repeat_interleave(self.active, 0), which.reshape(-1)
        y = torch.bmm(
            torch.tanh(torch.bmm(rows.unsqueeze(1), self.up[expert]).squeeze(1)).unsqueeze(1), self.down[expert]
        )
        y = (y.squeeze(1) * weights.reshape(-1, 1)).view(len(tokens), self.active, 6).sum(1)
        return (x + y.view_as(x)).square().mean()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(6))
def test_experts_of_any_number_and_load(seed):
    print(f"seed {seed}")
    random = Random(seed)
    torch.manual_seed(seed)
    experts, samples = random.choice([3, 4, 5, 7]), random.choice([4, 6])
    bias = torch.tensor(
        [random.choice([-8.0, 0.0, 2.0, 8.0]) for _ in range(experts)]
    )  # some get no token, some get all
    model = Experts(experts, random.choice([1, 2]), bias)
    case = staged.Case.of(model, (torch.randn(samples, random.choice([1, 3, 5]), 6),))
    for count in (2, samples):
        check(case, count, (experts, model.active))


class Of(nn.Module):
    """A linear layer's result and a parameter (4, 6), in what `function` makes of them."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.other, self.function = nn.Linear(6, 6), nn.Parameter(torch.randn(4, 6)), function

    def forward(self, x, place):
        return self.function(self.layer(x), place, self.other).square().mean()


ROWS = {
    "one token of each sample": lambda y, place, _: y[torch.arange(len(y)), place],
    "the same tokens of each sample": lambda y, place, _: y[torch.arange(len(y))[:, None], torch.tensor([3, 0, 3])],
    "a dim that may be dropped": lambda y, place, _: y.gather(1, (place % 5)[:, None, None].expand(-1, 1, 6)).squeeze(),
    "copies of heads": lambda y, place, other: torch.baddbmm(other[:, :1, None].repeat(len(y), 1, 1), *heads(y)),
    "samples inside tokens": lambda y, place, other: torch.einsum("sbh,kh->sbk", y.transpose(0, 1), other),
    "samples inside heads": lambda y, place, other: (
        other[:, None, None] @ torch.stack([y, y * 2, y * 3, y + 1]).transpose(-1, -2)
    ),
    "a parameter that is resized": lambda y, place, other: (
        y[:, :2] * functional.interpolate(other[None, None], size=(2, 6), mode="bilinear")[0]
    ),
    "rows of a parameter": lambda y, place, other: y + other[torch.tensor([0, 3, 3, 1, 0])],
    "a weight of unit length": lambda y, place, other: (
        y @ torch._weight_norm(other, other.norm(dim=1, keepdim=True), 0).t()
    ),
    "the largest of a region": lambda y, place, _: functional.adaptive_max_pool2d(y[:, None], (2, 3)),
}


def heads(y):
    """(B * 4, 5, 1) and (B * 4, 1, 5) of y (B, 5, 6)."""
    wide = y[..., :4].transpose(1, 2).reshape(-1, 5, 1)
    return wide, wide.transpose(1, 2)


@pytest.mark.parametrize("kind", ROWS)
def test_samples_by_number_or_inside_of_another_dim(kind):
    torch.manual_seed(1)
    case = staged.Case.of(Of(ROWS[kind]), (torch.randn(6, 5, 6), torch.tensor([4, 0, -1, 2, -5, 0])))
    for count in (2, 6):
        check(case, count, kind)
