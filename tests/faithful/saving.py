"""Models that are copied, averaged, saved and loaded."""

from __future__ import annotations

import copy
import io
import pickle

import torch
from torch import nn

from .nets import Net
from .program import Topic, one, randn
from .training import train

saving = Topic(__name__)


@saving()
def weight_average():
    """torch.optim.swa_utils.AveragedModel follows the model, and is called."""

    def script(run):
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
        average = torch.optim.swa_utils.AveragedModel(run.model)
        for seed in (1, 2):
            run(seed)
            optimizer.step()
            average.update_parameters(run.model)
        run.record(y=average(randn(3, 5, 6)))

    return Net(), one(5, 6), script


@saving()
def average_by_hand():
    """A deep copy of the model follows it, parameter by parameter."""

    def script(run):
        optimizer, average = torch.optim.SGD(run.model.parameters(), lr=0.1), copy.deepcopy(run.model)
        for seed in (1, 2):
            run(seed)
            optimizer.step()
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), run.model.parameters()):
                    mine.lerp_(theirs, 0.5)
        run.record(y=average(randn(3, 5, 6)))

    return Net(), one(5, 6), script


@saving()
def deep_copy_is_apart():
    """A deep copy trains on without the original."""

    def script(run):
        run(1)
        other = copy.deepcopy(run.model)
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        other(randn(2, 5, 6)).sum().backward()
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        run(2)
        run.record(y=other(randn(2, 5, 6)))

    return Net(), one(5, 6), script


@saving(refused="pickle")
def pickled():
    """The whole model is pickled and loaded."""

    def script(run):
        run(1)
        other = pickle.loads(pickle.dumps(run.model))
        run.record(y=other(randn(2, 5, 6)))

    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)), one(5, 6), script


@saving()
def best_weights_restored():
    """Early stopping: the best state dict is copied, and loaded at the end."""

    def script(run):
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.5)
        best = {k: v.clone() for k, v in run.model.state_dict().items()}
        train(run, optimizer, 2)
        run.model.load_state_dict(best)
        run(4)

    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), one(5, 6), script


@saving(alone=True)
def plain_weights_loaded():
    """A state dict of plain tensors, as of another training, is loaded."""
    torch.manual_seed(4)
    other = Net().state_dict()

    def script(run):
        run(1)
        run.model.load_state_dict(other)
        run(2)

    return Net(), one(5, 6), script


@saving()
def optimizer_state_round_trip():
    """Optimizer and model are saved to memory and loaded in the middle of a training."""

    def script(run):
        optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2, eps=1e-3)
        train(run, optimizer, 2)
        state = copy.deepcopy((run.model.state_dict(), optimizer.state_dict()))
        train(run, optimizer, 2)
        run.model.load_state_dict(state[0])
        optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2, eps=1e-3)
        optimizer.load_state_dict(state[1])
        train(run, optimizer, 2)

    return Net(), one(5, 6), script


@saving(alone=True)
def torch_save_of_the_state_dict():
    """torch.save and torch.load of the state dict."""

    def script(run):
        file = io.BytesIO()
        torch.save(run.model.state_dict(), file)
        with torch.no_grad():
            run.model.up.weight.zero_()
        file.seek(0)
        run.model.load_state_dict(torch.load(file, weights_only=False))
        run(1)

    return Net(), one(5, 6), script
