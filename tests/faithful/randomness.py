"""Random numbers in the forward: of torch, of Python and of numpy, and what is made of them.

The compiled model draws numbers of its own (the same ones on any mesh), so that what is compared of torch's are
averages and where they are zero; Python's and numpy's are seeded by the user and must be the same.
"""

from __future__ import annotations

import logging
import random
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .nets import Heads, Net
from .program import Topic, one, randn

randomness = Topic(__name__)


class Drawing(nn.Module):
    """Returns averages of what `draw(self, x)` gives for a large x, with a parameter in it."""

    def __init__(self, draw, **values):
        super().__init__()
        self.draw, self.weight = draw, nn.Parameter(torch.ones(40))
        for name, value in values.items():
            setattr(self, name, value)

    def forward(self, x):
        y = self.draw(self, x * self.weight)
        return y.mean(), y.square().mean()


def ones(*shape):
    return lambda seed: (torch.ones(*shape),)


def _mean_loss(run):
    """Gradients of single elements are random; only those of the averages' sum are not."""
    run.loss = lambda out: None


def _averages(run):
    _mean_loss(run)
    run(1)
    run(2)


DRAWS = {
    "dropout": lambda m, x: F.dropout(x, 0.3, m.training),
    "feature_dropout": lambda m, x: F.dropout1d(x, 0.3, m.training),
    "alpha_dropout": lambda m, x: F.alpha_dropout(x, 0.3, m.training),
    "rand_like": lambda m, x: x + torch.rand_like(x),
    "randn_like": lambda m, x: x + torch.randn_like(x),
    "rand": lambda m, x: x * torch.rand(x.shape),
    "randn": lambda m, x: x + torch.randn(x.shape[0], 1),
    "bernoulli": lambda m, x: x * torch.bernoulli(torch.full_like(x, 0.25)),
    "bernoulli_in_place": lambda m, x: x * torch.empty_like(x).bernoulli_(0.25),
    "normal_in_place": lambda m, x: x + torch.empty_like(x).normal_(1.0, 2.0),
    "uniform_in_place": lambda m, x: x + torch.empty_like(x).uniform_(-1.0, 3.0),
    "normal": lambda m, x: torch.normal(x, 0.5),
    "randint": lambda m, x: x + torch.randint(0, 5, x.shape),
    "randperm": lambda m, x: x[torch.randperm(x.shape[0])],
    "multinomial": lambda m, x: torch.multinomial(x.detach(), 50, replacement=True).float() / 40,
    "exponential": lambda m, x: x * torch.empty_like(x).exponential_(2.0),
    "gumbel_softmax": lambda m, x: F.gumbel_softmax(x, dim=-1) * x.shape[-1],
    "rrelu": lambda m, x: F.rrelu(-x, 0.1, 0.3, m.training),
    "distribution": lambda m, x: torch.distributions.Normal(x, 0.5).rsample(),
    "stochastic_depth": lambda m, x: x * (torch.rand(x.shape[0], 1) < 0.8) / 0.8,
}
REFUSED = {
    "randperm": "random",
    "multinomial": "random",
    "rrelu": "random",
    "exponential": "random",
    "distribution": "value",
}
for name, draw in DRAWS.items():

    def _build(draw=draw):
        return Drawing(draw), ones(4000, 40), _averages

    randomness.add(f"torch_{name}", _build, tolerance=0.1, refused=REFUSED.get(name))


@randomness(tolerance=0.05)
def dropout_rate_changed():
    """p of a dropout layer goes from 0.1 to 0.6 between calls."""

    def script(run):
        _averages(run)
        run.model.layer.p = 0.6
        run(3)

    return Drawing(lambda m, x: m.layer(x), layer=nn.Dropout(0.1)), ones(4000, 40), script


@randomness(tolerance=0.05)
def dropout_gradient_uses_the_same_mask():
    """The gradient is zero where the output is zero; the rest is scaled alike."""

    def script(run):
        x = torch.ones(200, 300, requires_grad=True)
        y = run.model(x)
        y.sum().backward()
        run.record(agree=((y == 0) == (x.grad == 0)).float().mean(), scale=x.grad.max())

    return nn.Sequential(nn.Dropout(0.4)), lambda seed: (torch.ones(200, 300, requires_grad=True),), script


@randomness(tolerance=0.05)
def dropout_masks_of_two_calls_differ():
    """Two calls draw two masks, and two layers draw two."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.scale = nn.Dropout(0.5), nn.Dropout(0.5), nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.a(x) * self.scale, self.b(x) * self.scale

    def script(run):
        a, b = run.model(torch.ones(200, 300))
        c, _ = run.model(torch.ones(200, 300))
        run.record(layers=((a == 0) == (b == 0)).float().mean(), calls=((a == 0) == (c == 0)).float().mean())

    return Two(), ones(200, 300), script


@randomness(refused="generator")
def own_generator():
    """The forward draws with a generator of its own, seeded by the user."""

    class Own(Net):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator().manual_seed(7)

        def forward(self, x):
            return super().forward(x + torch.randn(x.shape, generator=self.generator))

    return Own(), one(5, 6)


@randomness(refused="random")
def python_random_factor():
    """random.random() scales the output of each call."""

    class Scaled(Net):
        def forward(self, x):
            return super().forward(x) * random.random()

    def script(run):
        random.seed(1)
        for seed in range(4):
            run(seed)

    return Scaled(), one(5, 6), script


@randomness(refused="random")
def layer_drop_by_python():
    """LayerDrop (Fan et al. 2019) by random.random() in train mode."""

    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                if self.training and random.random() < 0.5:
                    continue
                x = layer(x).tanh()
            return x

    def script(run):
        random.seed(2)
        for seed in range(5):
            run(seed)
        run.model.eval()
        run(6)

    return Dropping(), one(5, 6), script


@randomness(refused="as a random number says")
def layer_drop_by_torch():
    """LayerDrop as transformers has it, by the value of torch.rand([])."""

    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                if self.training and torch.rand([]) < 1.5:
                    continue
                x = layer(x).tanh()
            return x

    def script(run):
        run(1)
        run.model.eval()
        run(2)

    return Dropping(), one(5, 6), script


@randomness(refused="random")
def python_choice_of_a_branch():
    """random.choice picks one of two heads."""

    class Heads(Net):
        def forward(self, x):
            return super().forward(x) if random.choice([True, False]) else self.features(x)[:, :3]

    def script(run):
        random.seed(3)
        for seed in range(6):
            run(seed)

    return Heads(), one(5, 6), script


@randomness(refused="random")
def numpy_noise():
    """numpy draws a vector that is added."""

    class Noisy(Net):
        def forward(self, x):
            return super().forward(x + torch.from_numpy(np.random.rand(6)).float())

    def script(run):
        np.random.seed(4)
        for seed in range(3):
            run(seed)

    return Noisy(), one(5, 6), script


@randomness(refused="random")
def numpy_mixup():
    """Mixup (Zhang et al. 2017) inside of the model, with numpy's beta distribution."""

    class Mixed(Net):
        def forward(self, x):
            share = np.random.beta(1.0, 1.0)
            return super().forward(share * x + (1 - share) * x.flip(0))

    def script(run):
        np.random.seed(5)
        run(1)
        run(2)

    return Mixed(), one(5, 6), script


@randomness()
def printing_and_logging():
    """The forward prints, logs and takes the time; nothing of it goes into the numbers."""

    class Talking(Net):
        def forward(self, x):
            start = time.time()
            y = super().forward(x)
            print("shape", tuple(y.shape))
            logging.getLogger("talking").info("took %s", time.time() - start)
            return y

    return Talking(), one(5, 6)


@randomness(refused="value")
def printing_values():
    """The forward prints a value of a tensor."""

    class Talking(Net):
        def forward(self, x):
            y = super().forward(x)
            print("mean", y.mean().item())
            return y

    return Talking(), one(5, 6)


@randomness()
def attention_mask_drawn():
    """The mask of attention is drawn in every call: two calls on one input differ, and every query sees itself."""

    class Masked(Heads):
        def forward(self, x):
            q, k, v = self.heads(x)
            mask = (torch.rand(x.shape[1], x.shape[1]) < 0.5) | torch.eye(x.shape[1], dtype=torch.bool)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def script(run):
        x = randn(1, 2, 9, 8)
        first, second = run.model(x), run.model(x)
        run.record(differ=not torch.equal(first, second), finite=bool(torch.isfinite(first).all()))

    return Masked(), one(2, 9, 8), script
