"""Programs whose forward leaves something in plain attributes: caches, lists, side losses, tensors with a gradient."""

from __future__ import annotations

import math
from collections import deque

import torch
from torch import nn

from .nets import Net
from .program import Topic, calls, one, randn

memories = Topic(__name__)


@memories()
def lazy_cache_of_positions():
    """A table is made at the first call and kept in an attribute."""

    class Positions(Net):
        def __init__(self):
            super().__init__()
            self.cache = None

        def forward(self, x):
            if self.cache is None:
                self.cache = torch.arange(6, dtype=x.dtype).div(6).cos()
            return super().forward(x * self.cache)

    return Positions(), one(4, 6)


@memories()
def lazy_cache_grows():
    """A table is made anew where a longer input comes, as rotary embeddings do."""

    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj, self.longest, self.table = nn.Linear(6, 6), 0, None

        def forward(self, x):
            if x.shape[1] > self.longest:
                self.longest = x.shape[1]
                self.table = torch.outer(torch.arange(self.longest).float(), torch.arange(6).float() / 6).cos()
            return self.proj(x) * self.table[: x.shape[1]]

    return Rotary(), one(3, 5, 6), calls((3, 4, 6), (3, 7, 6), (3, 5, 6))


@memories()
def cache_of_the_first_batch():
    """The first batch's features are kept and compared with those of later batches."""

    class Anchored(Net):
        def __init__(self):
            super().__init__()
            self.anchor = None

        def forward(self, x):
            h = self.features(x)
            if self.anchor is None:
                self.anchor = h.detach().mean(0)
            return self.down(h) + (h - self.anchor).square().mean()

    return Anchored(), one(4, 6)


@memories()
def dict_cache_by_length():
    """Masks are cached in a dict by length."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj, self.masks = nn.Linear(6, 6), {}

        def forward(self, x):
            n = x.shape[1]
            if n not in self.masks:
                self.masks[n] = torch.ones(n, n).tril()
            return torch.einsum("bsd,btd,st->bsd", self.proj(x), x, self.masks[n]) / math.sqrt(n)

    return Masked(), one(3, 5, 6), calls((3, 5, 6), (3, 4, 6), (3, 5, 6))


@memories()
def history_list():
    """Losses are appended to a list."""

    class Historical(Net):
        def __init__(self):
            super().__init__()
            self.history = []

        def forward(self, x):
            y = super().forward(x).square().mean()
            self.history.append(y.detach())
            return y

    return Historical(), one(4, 6)


@memories()
def history_deque_read():
    """The last two means are kept in a deque, and their average is subtracted."""

    class Recent(Net):
        def __init__(self):
            super().__init__()
            self.recent = deque(maxlen=2)

        def forward(self, x):
            y = super().forward(x)
            if self.recent:
                y = y - sum(self.recent) / len(self.recent)
            self.recent.append(y.detach().mean())
            return y

    def script(run):
        for seed in range(4):
            run(seed)

    return Recent(), one(4, 6), script


@memories()
def metrics_dict():
    """Metrics are written into a dict attribute."""

    class Metered(Net):
        def __init__(self):
            super().__init__()
            self.metrics = {}

        def forward(self, x):
            y = super().forward(x)
            self.metrics["mean"] = y.detach().mean()
            self.metrics["shape"] = tuple(y.shape)
            return y.square().mean()

    return Metered(), one(4, 6)


class WithAuxLoss(Net):
    """Keeps a differentiable loss of its features in an attribute."""

    def forward(self, x):
        h = self.features(x)
        self.aux_loss = h.square().mean()
        return self.down(h)


@memories()
def aux_loss_of_the_root():
    """A loss in an attribute is added by the user and differentiated."""

    def script(run):
        run.loss = lambda y: y.square().mean() + 0.1 * run.model.aux_loss
        run(1)
        run(2)

    return WithAuxLoss(), one(4, 6), script


@memories()
def aux_loss_of_inner_modules():
    """Losses of all inner modules are summed by the user, as balancing losses of experts are."""

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(WithAuxLoss(6, 7, 6) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x.mean()

    def script(run):
        run.loss = lambda y: y + sum(layer.aux_loss for layer in run.model.layers)
        run(1)
        run(2)

    return Stack(), one(4, 6), script


@memories()
def aux_loss_read_inside():
    """Losses that inner modules keep are summed by the forward of the outer one."""

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(WithAuxLoss(6, 7, 6) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x.mean() + sum(layer.aux_loss for layer in self.layers)

    return Stack(), one(4, 6)


@memories()
def kept_activation():
    """Features are kept in an attribute and the user reads them after the call."""

    class Keeping(Net):
        def forward(self, x):
            self.last = self.features(x)
            return self.down(self.last)

    def script(run):
        run.loss = lambda y: y.mean() + run.model.last.abs().sum()
        run(1)
        run(2)

    return Keeping(), one(5, 6), script


@memories()
def recurrent_state():
    """A hidden state in an attribute goes from call to call, detached (truncated backpropagation)."""

    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.hidden = nn.GRUCell(6, 5), None

        def forward(self, x):
            h = torch.zeros(x.shape[0], 5) if self.hidden is None else self.hidden
            h = self.cell(x, h)
            self.hidden = h.detach()
            return h

    def script(run):
        run(1)
        run(2)
        run.model.hidden = None
        run(3)

    return Stateful(), one(4, 6), script


@memories()
def recurrent_state_attached():
    """A hidden state keeps its graph, and one backward goes through two calls."""

    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.hidden = nn.GRUCell(6, 5), torch.zeros(4, 5)

        def forward(self, x):
            self.hidden = self.cell(x, self.hidden)
            return self.hidden

    def script(run):
        first = run.model(randn(1, 4, 6))
        second = run.model(randn(2, 4, 6))
        (first.sum() + second.square().sum()).backward()
        run.record(second=second)

    return Stateful(), one(4, 6), script


@memories()
def memory_tensor_written():
    """A plain tensor attribute is written in place by the forward."""

    class Memory(Net):
        def __init__(self):
            super().__init__()
            self.memory = torch.zeros(3)

        def forward(self, x):
            y = super().forward(x)
            with torch.no_grad():
                self.memory.mul_(0.9).add_(y.mean(0), alpha=0.1)
            return y - self.memory

    return Memory(), one(4, 6)


@memories()
def memory_tensor_replaced():
    """A plain tensor attribute is replaced by the forward."""

    class Memory(Net):
        def __init__(self):
            super().__init__()
            self.memory = torch.zeros(3)

        def forward(self, x):
            y = super().forward(x)
            self.memory = 0.9 * self.memory + 0.1 * y.detach().mean(0)
            return y - self.memory

    return Memory(), one(4, 6)
