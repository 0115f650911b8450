"""Losses that are put together outside of the model, and derivatives that are asked for in other ways than
backward()."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .nets import Net, Tokens
from .program import Topic, ids, one, randn

losses = Topic(__name__)


class Classifier(nn.Module):
    """A dict with a loss and logits."""

    def __init__(self):
        super().__init__()
        self.net = Net(6, 9, 5)

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"loss": None if labels is None else F.cross_entropy(logits, labels), "logits": logits}


def _labelled(seed):
    return {"x": randn(seed, 7, 6), "labels": ids(seed, 5, 7)}


LOSSES = {
    "the_loss": lambda out: out["loss"],
    "loss_plus_logits": lambda out: out["loss"] + 0.1 * out["logits"].square().mean(),
    "logits_alone": lambda out: out["logits"].log_softmax(-1)[:, 0].sum(),
    "loss_squared": lambda out: out["loss"] ** 2,
    "loss_divided": lambda out: out["loss"] / 4,
    "loss_detached_plus_logits": lambda out: out["loss"].detach() * out["logits"].mean(),
    "logit_times_loss": lambda out: (out["logits"][0, 1] * out["loss"]).exp(),
    "largest_logit": lambda out: out["logits"].max(),
}
for name, loss in LOSSES.items():

    def _script(run, loss=loss):
        run.loss = loss
        run(1)
        run(2)

    losses.add(name, lambda script=_script: (Classifier(), _labelled, script))


@losses()
def distillation_outside():
    """A loss of the user's own between a compiled student and a plain teacher."""

    def script(run):
        torch.manual_seed(5)
        teacher = Net(6, 9, 5)
        x = randn(3, 5, 6)
        run.loss = lambda y: F.kl_div(y.log_softmax(-1), teacher(x).softmax(-1).detach(), reduction="batchmean")
        run.call(x)

    return Net(6, 9, 5), one(5, 6), script


@losses()
def gradients_by_autograd_grad():
    """torch.autograd.grad of the loss for some of the parameters; `.grad` stays None."""

    def script(run):
        parameters = list(run.model.parameters())
        loss = run.model(randn(1, 5, 6)).square().mean()
        found = torch.autograd.grad(loss, [parameters[0], parameters[3]])
        run.record(found=found)

    return Net(), one(5, 6), script


@losses()
def two_losses_one_after_the_other():
    """Two outputs, each with a backward of its own."""

    class Two(Net):
        def forward(self, x):
            h = self.features(x)
            return h.square().mean(), self.down(h)

    def script(run):
        a, b = run.model(randn(1, 5, 6))
        a.backward(retain_graph=True)
        run.record()
        b.sum().backward()
        run.record()

    return Two(), one(5, 6), script


@losses()
def gradient_given_to_backward():
    """backward(gradient=...) of an output that is no scalar."""

    def script(run):
        run.model(randn(1, 5, 6)).backward(randn(7, 5, 3))
        run.record()

    return Net(), one(5, 6), script


@losses(refused="create_graph")
def gradient_penalty():
    """WGAN-GP: the norm of the input's gradient is part of the loss (Gulrajani et al. 2017)."""

    def script(run):
        x = randn(1, 5, 6, requires_grad=True)
        gradient = torch.autograd.grad(run.model(x).sum(), x, create_graph=True)[0]
        penalty = (gradient.norm(dim=1) - 1).square().mean()
        penalty.backward()
        run.record(penalty=penalty)

    return Net(6, 9, 1), one(5, 6, requires_grad=True), script


@losses(refused="create_graph")
def hessian_vector_product():
    """The gradient of a gradient's product with a vector."""

    def script(run):
        parameters = list(run.model.parameters())
        found = torch.autograd.grad(run.model(randn(1, 5, 6)).square().mean(), parameters, create_graph=True)
        sum((g * g.detach()).sum() for g in found).backward()
        run.record()

    return Net(), one(5, 6), script


@losses()
def token_losses_weighted():
    """Losses by token are weighted outside, as in reinforcement learning from feedback."""

    class PerToken(Tokens):
        def forward(self, tokens):
            logits = super().forward(tokens)
            return -F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(
                len(tokens), -1
            )

    def script(run):
        run.loss = lambda logp: -(torch.exp(logp - logp.detach()) * randn(8, *logp.shape)).sum() / 3
        run(1)
        run(2)

    return PerToken(), lambda seed: (ids(seed, 13, 3, 5),), script


@losses()
def loss_and_logits_of_other_sizes():
    """A scalar of loss and logits, in batches of other sizes than the planned one."""

    def script(run):
        run(1)
        for seed, size in enumerate((5, 9, 2)):
            run.call(randn(seed, size, 6), ids(seed, 5, size))

    return Classifier(), _labelled, script


@losses()
def loss_and_logits_of_a_counter():
    """The same of sequences through a layer that divides by a count of its calls."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.head = nn.Linear(6, 5)

        def forward(self, x, labels):
            self.calls += 1
            logits = self.head(x / self.calls.clone())
            return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    def script(run):
        for seed, size in enumerate((4, 7, 3)):
            run.call(randn(seed, size, 3, 6), ids(seed, 5, size, 3))

    return Counting(), lambda seed: (randn(seed, 4, 3, 6), ids(seed, 5, 4, 3)), script
