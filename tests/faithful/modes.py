"""Train and eval, and settings of layers that are changed between calls."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .nets import Net
from .program import Topic, one

modes = Topic(__name__)


class Normed(nn.Module):
    """With BatchNorm in the middle."""

    def __init__(self, **settings):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 9), nn.BatchNorm1d(9, **settings), nn.Linear(9, 3)

    def forward(self, x):
        return self.last(F.relu(self.norm(self.first(x))))


@modes()
def batch_norm_train_and_eval():
    """Running statistics are followed in train mode and used in eval mode."""

    def script(run):
        run(1)
        run(2)
        run.model.eval()
        run(3)
        run.model.train()
        run(4)

    return Normed(), one(7, 6), script


@modes()
def batch_norm_momentum_changed():
    """The momentum of BatchNorm is changed between calls, as schedules for it do."""

    def script(run):
        run(1)
        for module in run.model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.momentum = 0.5
        run(2)

    return Normed(), one(7, 6), script


@modes(refused="value")
def batch_norm_cumulative():
    """momentum=None averages over all calls."""

    def script(run):
        for seed in range(3):
            run(seed)

    return Normed(momentum=None), one(7, 6), script


@modes()
def batch_norm_without_statistics():
    """Statistics of the batch alone, also in eval mode."""

    def script(run):
        run(1)
        run.model.eval()
        run(2)

    return Normed(track_running_stats=False), one(7, 6), script


@modes()
def batch_norm_frozen():
    """Only the norm is put in eval mode, as in fine-tuning of detectors, by a train() that the class overrides."""

    class Frozen(Normed):
        def train(self, mode: bool = True):
            super().train(mode)
            self.norm.eval()
            return self

    def script(run):
        run.model.train()
        run(1)
        run.model.eval()
        run(2)
        run.model.train()
        run(3)

    return Frozen(), one(7, 6), script


@modes()
def batch_norm_reset():
    """reset_running_stats() between calls."""

    def script(run):
        run(1)
        run.model.norm.reset_running_stats()
        run(2)

    return Normed(), one(7, 6), script


@modes()
def batch_norm_eps_changed():
    """The eps of a norm is changed between calls."""

    def script(run):
        run(1)
        run.model.norm.eps = 0.5
        run(2)

    return Normed(), one(7, 6), script


class Dropped(nn.Module):
    """Dropout of which only p=0 and p=1 are compared exactly."""

    def __init__(self, p: float):
        super().__init__()
        self.net, self.dropout = Net(), nn.Dropout(p)

    def forward(self, x):
        return self.dropout(self.net(x))


@modes()
def thawed_between_evaluations():
    """A bias is thawed between two calls without gradients, which one graph serves, and then trains."""

    def build():
        model = Normed()
        model.last.bias.requires_grad_(False)
        return model

    def script(run):
        run(1)
        for n in (2, 3):
            with torch.no_grad():
                run(n)
            run.model.last.bias.requires_grad_(True)
        run(4)

    return build(), one(7, 6), script


@modes()
def dropout_switched_off_by_p():
    """p of a dropout layer is set to 0 between calls, found by looping over modules with isinstance."""

    def script(run):
        run(1)
        for module in run.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        run(2)

    return Dropped(1.0), one(5, 6), script


@modes()
def dropout_switched_on_by_p():
    """p of a dropout layer is set to 1 by its name."""

    def script(run):
        run(1)
        run.model.dropout.p = 1.0
        run(2)

    return Dropped(0.0), one(5, 6), script


@modes()
def dropout_eval_of_one_layer():
    """One dropout layer is put in eval mode."""

    def script(run):
        run(1)
        run.model.dropout.eval()
        run(2)
        run.model.train()
        run(3)

    return Dropped(1.0), one(5, 6), script


@modes()
def functional_dropout_by_training_flag():
    """F.dropout with the training flag and a rate from an attribute."""

    class Functional(Net):
        rate = 1.0

        def forward(self, x):
            return F.dropout(super().forward(x), self.rate, training=self.training)

    def script(run):
        run(1)
        run.model.eval()
        run(2)
        run.model.train()
        run.model.rate = 0.0
        run(3)

    return Functional(), one(5, 6), script


@modes()
def branch_on_training():
    """Another structure comes out in eval mode."""

    class Detector(Net):
        def forward(self, x):
            y = super().forward(x)
            return {"loss": y.square().mean()} if self.training else [y.argmax(-1), y]

    def script(run):
        run(1)
        run.model.eval()
        run(2)

    return Detector(), one(5, 6), script
