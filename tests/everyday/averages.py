"""Averages of the weights beside the training: exponential ones, and SWA."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from .nets import ConvNet, mlp
from .script import script


@script()
def average_of_weights(parallel, log):
    """An exponential average as a deep copy that the script moves, buffers too; it is evaluated."""
    images, labels = torch.randn(3, 6, 1, 8, 8), torch.randint(0, 4, (3, 6))
    model = parallel(ConvNet(), (images[0],))
    ema = copy.deepcopy(model).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in zip(images, labels):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            mine, theirs = ema.state_dict(), model.state_dict()
            for name, value in mine.items():
                if value.dtype.is_floating_point:
                    value.mul_(0.9).add_(theirs[name], alpha=0.1)
                else:
                    value.copy_(theirs[name])
            log(loss=loss.item(), averaged=F.cross_entropy(ema(x), y).item())


@script()
def average_by_torch(parallel, log):
    """AveragedModel with an exponential average, used in place of the model for evaluation."""
    data = [(torch.randn(12, 8), torch.randint(0, 3, (12,))) for _ in range(3)]
    model = parallel(mlp(8, 12, 3), (data[0][0],))
    ema = AveragedModel(model, avg_fn=lambda mean, new, count: 0.9 * mean + 0.1 * new, use_buffers=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update_parameters(model)
        with torch.no_grad():
            log(loss=loss.item(), averaged=F.cross_entropy(ema(x), y).item())


@script()
def stochastic_weight_averaging(parallel, log):
    """SWA: an average of the last weights, whose batch norm statistics are computed anew."""
    images, labels = torch.randn(4, 6, 1, 8, 8), torch.randint(0, 4, (4, 6))
    model = parallel(ConvNet(), (images[0],))
    average, optimizer = AveragedModel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for i, (x, y) in enumerate(zip(images, labels)):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i >= 1:
            average.update_parameters(model)
            schedule.step()
        log(loss=loss.item())
    update_bn(list(images), average)
    average.eval()
    with torch.no_grad():
        log(averaged=average(images[0]), averages=average.n_averaged.item())
