"""Scripts of which every rank reads its own samples, as those for DDP do."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from .nets import ConvNet, Language, mlp
from .script import script


def _mean(value: torch.Tensor, world: int) -> float:
    """Return the mean over all ranks, as a script logs it."""
    if world > 1:
        dist.all_reduce(value)
        value = value / dist.get_world_size()
    return value.item()


@script(local=True)
def distributed_sampler(parallel, log, rank, world):
    """A DataLoader with a sampler that is told the epoch; losses and counts are reduced for the log."""
    x, y = torch.randn(24, 8), torch.randint(0, 3, (24,))
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True, seed=1)
    loader = DataLoader(data, batch_size=8 // world, sampler=sampler)
    model = parallel(mlp(8, 12, 3), (x[: 8 // world],))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            outputs = model(inputs)
            loss = F.cross_entropy(outputs, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right = (outputs.argmax(1) == targets).to(inputs).mean()
            log(loss=_mean(loss.detach(), world), accuracy=_mean(right, world))


@script(local=True)
def images_by_rank(parallel, log, rank, world):
    """Batch norm of the whole batch, accumulation inside of no_sync, clipping, and an evaluation by ranks."""
    images, labels = torch.randn(4, 8, 1, 8, 8), torch.randint(0, 4, (4, 8))
    mine = slice(rank * 8 // world, (rank + 1) * 8 // world)
    model = parallel(ConvNet(), (images[0, mine],))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(zip(images, labels)):
        loss = F.cross_entropy(model(x[mine]), y[mine])
        (loss / 2).backward()
        if i % 2:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            log(norm=norm.item())
        log(loss=_mean(loss.detach(), world))
    model.eval()
    with torch.no_grad():
        log(loss=_mean(F.cross_entropy(model(images[0, mine]), labels[0, mine]), world))


@script(local=True)
def tokens_by_rank(parallel, log, rank, world):
    """Ranks have lengths of their own, and losses are over all tokens: each rank counts its own and tells others."""
    text = torch.randint(1, 16, (3, 8, 10))
    text[:, ::2, 6:] = 0
    mine = slice(rank * 8 // world, (rank + 1) * 8 // world)
    model = parallel(Language(), (text[0, mine, :-1],))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for tokens in text:
        inputs, targets = tokens[mine, :-1], tokens[mine, 1:]
        count = (targets != 0).sum().to(torch.get_default_dtype())
        if world > 1:
            dist.all_reduce(count)
            count = count / (dist.get_world_size() / world)
        total = F.cross_entropy(model(inputs).transpose(1, 2), targets, ignore_index=0, reduction="sum")
        loss = total * world / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=_mean(loss.detach(), world))


@script(local=True)
def loss_inside_by_rank(parallel, log, rank, world):
    """A model with its loss inside: that of the whole batch, on every rank."""

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(8, 12, 3)

        def forward(self, x, labels):
            logits = self.net(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    x, y = torch.randn(3, 8, 8), torch.randint(0, 3, (3, 8))
    mine = slice(rank * 8 // world, (rank + 1) * 8 // world)
    model = parallel(WithLoss(), {"x": x[0, mine], "labels": y[0, mine]})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(3):
        out = model(x=x[i, mine], labels=y[i, mine])
        optimizer.zero_grad()
        out["loss"].backward()
        optimizer.step()
        log(loss=out["loss"].item(), right=_mean((out["logits"].argmax(-1) == y[i, mine]).to(x).mean(), world))


@script(local=True)
def lengths_by_rank(parallel, log, rank, world):
    """Each rank pads its sentences to its own longest."""
    lengths = torch.tensor([9, 8, 10, 7, 5, 6, 4, 5])
    text = torch.randint(1, 16, (3, 8, 10)) * (torch.arange(10) < lengths[:, None])
    mine = slice(rank * 8 // world, (rank + 1) * 8 // world)
    longest = int(lengths[mine].max())
    model = parallel(Language(), (text[0, mine, : longest - 1],), pad={"tokens": 0})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for tokens in text:
        inputs, targets = tokens[mine, : longest - 1], tokens[mine, 1:longest]
        total = F.cross_entropy(model(inputs).transpose(1, 2), targets, ignore_index=0, reduction="sum")
        loss = total * world / (lengths.sum() - 8)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=_mean(loss.detach(), world))


@script(local=True)
def gan_by_rank(parallel, log, rank, world):
    """The loss goes through one model into another, directly and through what the script computes in between."""
    noise, real = torch.randn(3, 8, 4), torch.randn(3, 8, 6)
    mine = slice(rank * 8 // world, (rank + 1) * 8 // world)
    generator = parallel(mlp(4, 12, 6), (noise[0, mine],))
    discriminator = parallel(mlp(6, 12, 1, activation=nn.Tanh), (real[0, mine],))
    of_g, of_d = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, discriminator))
    for z, x in zip(noise, real):
        fake = generator(z[mine])
        of_d.zero_grad()
        loss_d = F.softplus(-discriminator(x[mine])).mean() + F.softplus(discriminator(fake.detach())).mean()
        loss_d.backward()
        of_d.step()
        of_g.zero_grad()
        loss_g = F.softplus(-discriminator(fake)).mean() + F.softplus(-discriminator(fake * 0.9)).mean()
        loss_g = loss_g + fake.square().mean()
        loss_g.backward()
        of_g.step()
        log(d=_mean(loss_d.detach(), world), g=_mean(loss_g.detach(), world))
