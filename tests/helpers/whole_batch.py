"""Losses that are functions of all samples of a batch: of all pairs, or of sums over all tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..families import FAMILIES

functional = nn.functional


def clip(a: Tensor, b: Tensor, model: Pairs) -> tuple[Tensor, Tensor]:
    """Each sample's other half among all of them: Radford et al., arXiv 2103.00020."""
    logits, own = model.scale.exp() * a @ b.t(), torch.arange(len(a))
    return (functional.cross_entropy(logits, own) + functional.cross_entropy(logits.t(), own)) / 2, logits


def siglip(a: Tensor, b: Tensor, model: Pairs) -> tuple[Tensor, Tensor]:
    """Every pair by itself: Zhai et al., arXiv 2303.15343."""
    logits = a @ b.t() * model.scale.exp() + model.bias
    return -functional.logsigmoid((2 * torch.eye(len(a)) - 1) * logits).sum() / len(a), logits


def simclr(a: Tensor, b: Tensor, model: Pairs) -> tuple[Tensor, Tensor]:
    """Both halves in one tensor, so that the samples are in two parts of a dim: Chen et al., arXiv 2002.05709."""
    z, n = torch.cat([a, b]), len(a)
    logits = (z @ z.t() * model.scale.exp()).masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
    return functional.cross_entropy(logits, torch.cat([torch.arange(n, 2 * n), torch.arange(n)])), logits


def barlow(a: Tensor, b: Tensor, model: Pairs) -> tuple[Tensor, Tensor]:
    """Correlations over the batch: Zbontar et al., arXiv 2103.03230."""
    a, b = ((v - v.mean(0)) / (v.std(0) + 1e-3) for v in (a, b))
    return (a.t() @ b / len(a) - torch.eye(a.shape[1])).square().sum(), a.t() @ b


def ratio(a: Tensor, b: Tensor, model: Pairs) -> tuple[Tensor, Tensor]:
    """A mean with weights that the model gives, and a mean beside it."""
    weights = (3 * a[:, 0]).exp()
    return (weights * b[:, 1]).sum() / weights.sum() + a[:, 2].square().mean(), weights


LOSSES: dict[str, Callable] = {f.__name__: f for f in (clip, siglip, simclr, barlow, ratio)}


class Pairs(nn.Module):
    """Two towers over the halves (B, 6) and (B, 5) of each sample, and a loss of all of them."""

    def __init__(self, loss: str):
        super().__init__()
        torch.manual_seed(0)
        self.loss = LOSSES[loss]
        self.image = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.text = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
        self.scale, self.bias = nn.Parameter(torch.tensor(1.3)), nn.Parameter(torch.tensor(-1.0))

    def forward(self, image, text):
        a, b = functional.normalize(self.image(image), dim=-1), functional.normalize(self.text(text), dim=-1)
        loss, logits = self.loss(a, b, self)
        return dict(loss=loss, logits=logits, embeddings=a)


def pairs(samples: int, seed: int = 0) -> dict[str, Tensor]:
    """Return a batch for Pairs."""
    made = torch.Generator().manual_seed(seed)
    return dict(image=torch.randn(samples, 6, generator=made), text=torch.randn(samples, 5, generator=made))


class Balanced(nn.Module):
    """A layer with a router, which adds its balance to that of the layers before."""

    def __init__(self, number: int):
        super().__init__()
        self.layer, self.router = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, extra: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.router(x).softmax(-1)
        most = functional.one_hot(shares.argmax(-1), 3).to(x.dtype)
        extra = extra + 3 * (most.mean((0, 1)) * shares.mean((0, 1))).sum()
        return x + self.layer(x).tanh() * shares.amax(-1, keepdim=True), extra


class Layered(nn.Module):
    """Several layers, each with a balance of its own."""

    def __init__(self, layers: int):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(map(Balanced, range(layers)))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        extra = x.new_zeros(())
        for layer in self.layers:
            x, extra = layer(x, extra)
        return dict(loss=x.square().mean() + 0.3 * extra, last=x)


class Gathered(nn.Module):
    """Several layers with one balance, summed up after the last one as transformers does, and their logits."""

    def __init__(self, layers: int):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 3)]) for _ in range(layers))

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, object]:
        kept = []
        for layer, router in self.layers:
            kept.append(router(x))
            x = x + layer(x).tanh() * kept[-1].softmax(-1).amax(-1, keepdim=True)
        count, sums, rows = mask.sum(), torch.zeros(3), 0
        for logits in kept:
            shares = logits.softmax(-1) * mask[..., None]
            chosen = torch.zeros(3).scatter_add_(0, shares.argmax(-1).flatten(), mask.flatten())
            sums, rows = sums + chosen.detach() / count * shares.sum((0, 1)), rows + len(logits)
        loss = x.square().mean() + 0.3 * sums.square().sum() / rows
        return dict(loss=loss, logits=tuple(kept), last=x)


def balanced(name: str, samples: int, length: int = 8, weight: float = 0.5) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a mixture of experts of transformers and a batch, with so much of the loss that balances experts."""
    torch.manual_seed(0)
    model, inputs = FAMILIES[name](samples, length)
    model.config.output_router_logits = True
    model.config.router_aux_loss_coef = model.router_aux_loss_coef = weight
    return model, inputs
