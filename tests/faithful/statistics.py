"""Running statistics in buffers, written in all the ways that people write them."""

from __future__ import annotations

import torch
from torch import nn

from .nets import Net
from .program import Topic, ids, one, randn

statistics = Topic(__name__)


class Running(Net):
    """A Net with a running mean of its features, written in the way `update(self, mean)` says."""

    def __init__(self, update):
        super().__init__()
        self.update = update
        self.register_buffer("running", torch.zeros(10))

    def forward(self, x):
        h = self.features(x)
        self.update(self, h.mean(0))
        return self.down(h - self.running)


def _detached_lerp(m, mean):
    m.running = torch.lerp(m.running, mean.detach(), 0.1)


def _no_grad_lerp(m, mean):
    with torch.no_grad():
        m.running.lerp_(mean, 0.1)


def _decorated(m, mean):
    @torch.no_grad()
    def write(new):
        m.running.mul_(0.9).add_(0.1 * new)

    write(mean)


def _data(m, mean):
    m.running.data.mul_(0.9).add_(mean.data, alpha=0.1)


def _sliced(m, mean):
    with torch.no_grad():
        m.running[:5] = mean[:5]
        m.running[5:] *= 0.5


def _set_data(m, mean):
    m.running.data = 0.9 * m.running.data + 0.1 * mean.detach()


def _register_again(m, mean):
    m.register_buffer("running", 0.9 * m.running + 0.1 * mean.detach())


def _setattr(m, mean):
    setattr(m, "runn" + "ing", (m.running + mean.detach()) / 2)


def _buffers_dict(m, mean):
    m._buffers["running"] = (m.running + mean.detach()) / 2


def _fill_and_zero(m, mean):
    with torch.no_grad():
        m.running.zero_()
        m.running.add_(mean)


def _index_copy(m, mean):
    m.running.index_copy_(0, torch.tensor([0, 3]), mean.detach()[:2])


def _where(m, mean):
    m.running = torch.where(mean.detach() > m.running, mean.detach(), m.running)


for update in (_detached_lerp, _no_grad_lerp, _decorated, _data, _sliced, _set_data, _register_again, _setattr,
               _buffers_dict, _fill_and_zero, _index_copy, _where):  # fmt: skip
    statistics.add(f"running{update.__name__}", lambda update=update: (Running(update), one(5, 6)))


@statistics(raises=True)
def buffer_with_gradient_history():
    """A buffer is assigned without detaching: the second call goes back through the first, which eager autograd
    refuses."""

    def update(m, mean):
        m.running = 0.9 * m.running + 0.1 * mean

    return Running(update), one(5, 6)


@statistics()
def normalizing_inputs():
    """Welford's running mean and variance of the inputs, as in reinforcement learning."""

    class Normalized(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))
            self.register_buffer("var", torch.ones(6))
            self.register_buffer("count", torch.tensor(1e-4, dtype=torch.float64))

        def forward(self, x):
            if self.training:
                delta, total = x.mean(0) - self.mean, self.count + x.shape[0]
                self.var = (self.var * self.count + x.var(0, unbiased=False) * x.shape[0]
                            + delta**2 * self.count * x.shape[0] / total).div(total).float()  # fmt: skip
                self.mean = (self.mean + delta * x.shape[0] / total).float()
                self.count = total
            return super().forward((x - self.mean) / self.var.sqrt())

    def script(run):
        run(1)
        run(2)
        run.model.eval()
        run(3)

    return Normalized(), one(7, 6), script


@statistics()
def center_of_a_teacher():
    """DINO's center (Caron et al. 2021) follows the teacher's outputs, under autograd's eyes."""

    class Dino(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = Net(outputs=5), Net(outputs=5).requires_grad_(False)
            self.register_buffer("center", torch.zeros(1, 5))

        @torch.no_grad()
        def update_center(self, teacher):
            self.center = self.center * 0.9 + teacher.mean(0, keepdim=True) * 0.1

        def forward(self, a, b):
            target = ((self.teacher(b) - self.center) / 0.04).softmax(-1).detach()
            loss = -(target * (self.student(a) / 0.1).log_softmax(-1)).sum(-1).mean()
            self.update_center(self.teacher(b))
            return loss

    return Dino(), lambda seed: (randn(seed, 6, 6), randn(seed + 50, 6, 6))


@statistics()
def usage_histogram():
    """Token counts are added by index into a buffer, and gradients flow beside it."""

    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 6)
            self.register_buffer("seen", torch.zeros(11, dtype=torch.long))

        def forward(self, tokens):
            self.seen.index_add_(0, tokens.flatten(), torch.ones_like(tokens.flatten()))
            return self.embed(tokens) / (1 + self.seen[tokens])[..., None]

    return Counted(), lambda seed: (ids(seed, 11, 4, 5),)
