"""Gradients: of parameters and inputs, through losses outside of the model, stopped, repeated, and of several
modules."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .nets import Net
from .program import Topic, one, randn

gradients = Topic(__name__)


@gradients()
def input_gradient():
    """The input requires a gradient."""
    return Net(), one(5, 6, requires_grad=True)


@gradients()
def input_gradient_later():
    """The input requires a gradient in a later call alone."""

    def script(run):
        run.call(randn(1, 5, 6))
        run.call(randn(2, 5, 6, requires_grad=True))
        run.call(randn(3, 5, 6))

    return Net(), one(5, 6), script


@gradients()
def one_of_two_inputs():
    """One of two inputs requires a gradient."""

    class Two(Net):
        def forward(self, a, b):
            return super().forward(a * b)

    return Two(), lambda seed: (randn(seed, 5, 6), randn(seed + 9, 5, 6, requires_grad=True))


@gradients()
def intermediate_as_input():
    """The input is the result of another module, a plain one, which trains as well."""

    def script(run):
        torch.manual_seed(3)
        encoder = nn.Linear(4, 6)
        for seed in (1, 2):
            encoder.zero_grad()
            y = run.model(encoder(randn(seed, 5, 4)))
            y.square().mean().backward()
            run.record(y=y, weight=encoder.weight.grad, bias=encoder.bias.grad)

    return Net(), one(5, 6), script


@gradients()
def two_compiled_modules():
    """An encoder, a plain projector and a decoder: two of them are compiled, and all train."""

    def script(run):
        torch.manual_seed(3)
        encoder = run.compile(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), (randn(0, 5, 4),))
        projector = nn.Linear(8, 6)
        for seed in (1, 2):
            y = run.model(projector(encoder(randn(seed, 5, 4))))
            y.square().mean().backward()
            run.record(y=y, projector=projector.weight.grad, encoder=[p.grad for p in encoder.parameters()])

    return Net(), one(5, 6), script


@gradients()
def generator_and_discriminator():
    """A GAN's alternating steps, D(G(z)) with gradients through both."""

    def script(run):
        generator = run.compile(Net(3, 8, 6), (randn(0, 5, 3),))
        for_d = torch.optim.SGD(run.model.parameters(), lr=0.1)
        for_g = torch.optim.SGD(generator.parameters(), lr=0.1)
        for seed in (1, 2):
            fake = generator(randn(seed, 5, 3))
            d_loss = F.softplus(-run.model(randn(seed, 5, 6))).mean() + F.softplus(run.model(fake.detach())).mean()
            for_d.zero_grad()
            d_loss.backward()
            for_d.step()
            g_loss = F.softplus(-run.model(fake)).mean()
            for_g.zero_grad()
            g_loss.backward()
            for_g.step()
            run.record(d=d_loss, g=g_loss, generator=list(generator.parameters()))

    return Net(6, 9, 1), one(5, 6), script


@gradients()
def adversarial_example():
    """FGSM (Goodfellow et al. 2015): the sign of the input's gradient is added to the input, which is classified
    again."""

    def script(run):
        x = randn(1, 5, 6, requires_grad=True)
        gradient = torch.autograd.grad(run.model(x).square().sum(), x)[0]
        run.record(gradient=gradient)
        run.call((x + 0.1 * gradient.sign()).detach())

    return Net(), one(5, 6, requires_grad=True), script


@gradients()
def detached_in_the_middle():
    """The forward detaches its features: the first layer gets no gradient."""

    class Stopped(Net):
        def features(self, x):
            return super().features(x).detach()

    return Stopped(), one(5, 6)


@gradients()
def straight_through():
    """A rounding with a straight-through gradient."""

    class Rounded(Net):
        def features(self, x):
            h = super().features(x)
            return h + (h.round() - h).detach()

    return Rounded(), one(5, 6)


@gradients()
def unused_parameter():
    """A layer that the forward does not use has no gradient."""

    class Unused(Net):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(3, 3)

    return Unused(), one(5, 6)


@gradients()
def parameter_times_zero():
    """A layer multiplied with zero has a gradient of zeros."""

    class Zero(Net):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(6, 3)

        def forward(self, x):
            return super().forward(x) + 0.0 * self.spare(x)

    return Zero(), one(5, 6)


@gradients()
def frozen_layer():
    """A frozen layer passes gradients on to what is before it."""

    class Frozen(Net):
        def __init__(self):
            super().__init__()
            self.down.requires_grad_(False)

    return Frozen(), one(5, 6)


@gradients()
def all_frozen_with_input_gradient():
    """Nothing trains but the input: a saliency map."""
    return Net().requires_grad_(False), one(5, 6, requires_grad=True)


@gradients()
def backward_twice_retained():
    """One call, two backwards, the first of which keeps the graph."""

    def script(run):
        y = run.model(randn(1, 5, 6))
        y.sum().backward(retain_graph=True)
        run.record()
        y.square().sum().backward()
        run.record()

    return Net(), one(5, 6), script


@gradients(raises=True)
def backward_twice_freed():
    """One call, two backwards, of which the second finds the graph freed: eager raises."""

    def script(run):
        y = run.model(randn(1, 5, 6))
        y.sum().backward()
        y.sum().backward()

    return Net(), one(5, 6), script


@gradients()
def siamese():
    """Two calls before one backward."""

    def script(run):
        for seed in (1, 2):
            run.model.zero_grad()
            a, b = run.model(randn(seed, 5, 6)), run.model(randn(seed + 10, 5, 6))
            (a - b).square().sum().backward()
            run.record(a=a, b=b)

    return Net(), one(5, 6), script


@gradients()
def siamese_of_other_sizes():
    """Two calls of two batch sizes before one backward; the backwards run in another order than the calls."""

    def script(run):
        a, b = run.model(randn(1, 5, 6)), run.model(randn(2, 3, 6))
        a.sum().backward()
        run.record()
        b.square().sum().backward()
        run.record()

    return Net(), one(4, 6), script


@gradients(raises=True)
def changed_between_forward_and_backward():
    """A parameter is changed in place between forward and backward: eager raises."""

    def script(run):
        y = run.model(randn(1, 5, 6))
        with torch.no_grad():
            run.model.down.weight.mul_(2)
        y.sum().backward()

    return Net(), one(5, 6), script


@gradients(raises=True)
def input_changed_between_forward_and_backward():
    """The input is written between forward and backward, which needs it: eager raises."""

    def script(run):
        x = randn(1, 5, 6)
        y = run.model(x)
        x.zero_()
        y.sum().backward()

    return Net(), one(5, 6), script
