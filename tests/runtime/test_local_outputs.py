"""With inputs="local" a rank gets what its own samples give, as plain tensors, and gradients are those of DDP."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import InputError
from tests.helpers import gloo

from . import tiny
from .parity import assert_close, assert_same_gradients, device_mesh, pair


class Encoder(nn.Module):
    """Outputs with the samples in several places: first, last, with time in one dim, in all pairs, summed, none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(6, 8, bias=False), nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.rand(16))

    def forward(self, x):
        hidden = torch.tanh(self.norm(self.embed(x).transpose(1, 2)).transpose(1, 2))
        y = self.head(hidden) * self.scale
        pooled = F.normalize(y.mean(1), dim=-1)
        return {
            "y": y, "turned": y.transpose(0, 2), "flat": y.flatten(0, 1), "sums": y.sum(-1),
            "pairs": pooled @ pooled.T, "total": y.sum((0, 1)), "scale": self.scale * 2, "mean": y.square().mean(),
            "best": y.argmax(-1),
        }  # fmt: skip


PLACES = {"y": 0, "turned": 2, "flat": 0, "sums": 0, "best": 0}  # of the samples
BATCH, SEQ = 8, 3


def _part(whole: torch.Tensor, dim: int, rank: int, parts: int) -> torch.Tensor:
    return whole.chunk(parts, dim)[rank]


def _loss_of(out, targets) -> torch.Tensor:
    """A loss of every output, as a script writes it for plain tensors."""
    return (
        F.cross_entropy(out["y"].flatten(0, 1), targets.flatten()) + out["turned"].square().mean()
        + out["flat"].abs().mean() + out["sums"].square().mean() + out["mean"]
    )  # fmt: skip


def _local_outputs(rank: int, mesh_text: str, strategy: str | None) -> None:
    mesh = device_mesh(mesh_text)
    parts, mine = mesh.size(0), mesh.get_local_rank(0)
    x, targets = torch.randn(BATCH, SEQ, 6), torch.randint(0, 16, (BATCH, SEQ))
    parallel, reference = pair(Encoder(), mesh, (_part(x, 0, mine, parts),), inputs="local", strategy=strategy)
    x = torch.randn(BATCH, SEQ, 6)
    found, expected = parallel(_part(x, 0, mine, parts)), reference(x)
    for name, whole in expected.items():
        wanted = _part(whole, PLACES[name], mine, parts) if name in PLACES else whole
        assert found[name].shape == wanted.shape and len(found[name].shape) == wanted.dim(), name
        assert found[name].numel() == wanted.numel() and found[name].requires_grad == wanted.requires_grad, name
        assert "_plain" not in vars(found[name]), "a shape is no reason to gather"
    for name, whole in expected.items():
        wanted = _part(whole, PLACES[name], mine, parts) if name in PLACES else whole
        assert_close(found[name] * 1, wanted, name)
        assert found[name].tolist() == (found[name] * 1).detach().numpy().tolist()
    # the loss of each rank's part; eager: the mean over the parts
    _loss_of(found, _part(targets, 0, mine, parts)).backward()
    losses = [
        _loss_of({k: _part(v, PLACES[k], i, parts) if k in PLACES else v for k, v in expected.items()},
                 _part(targets, 0, i, parts)) for i in range(parts)
    ]  # fmt: skip
    (sum(losses) / parts).backward()
    assert_same_gradients(parallel, reference)
    with torch.no_grad():
        right = (parallel(_part(x, 0, mine, parts))["y"].argmax(-1) == _part(targets, 0, mine, parts)).sum()
        assert 0 <= right.item() <= BATCH // parts * SEQ
    with pytest.raises(InputError, match="meets a DTensor"):
        parallel(_part(x, 0, mine, parts))["y"] @ parallel.head.weight


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("mesh, strategy", [("dp=2,tp=2", "megatron"), ("dp=2,tp=2", None), ("dp=4", "fsdp")])
def test_outputs_are_those_of_the_ranks_own_samples(mesh, strategy):
    gloo.run(4, _local_outputs, mesh, strategy)


def _as_ddp(rank: int) -> None:
    """GPT-2 with its loss outside, against torch's DDP: gradients, and parameters after three steps of SGD."""
    mesh, (model, batch) = device_mesh("dp=2"), tiny.gpt2(n_layer=1)
    parallel, reference = pair(model, mesh, {"input_ids": batch["input_ids"][:2]}, inputs="local")
    ddp = nn.parallel.DistributedDataParallel(reference)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (parallel, ddp)]
    for _ in range(3):
        tokens = torch.randint(0, 96, (4, 12))[2 * rank : 2 * rank + 2]
        losses = []
        for model, optimizer in zip((parallel, ddp), optimizers):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(input_ids=tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            losses.append(loss)
        assert_close(*losses, "loss")
        assert_same_gradients(parallel, reference)
        for optimizer in optimizers:
            optimizer.step()


class Pairs(nn.Module):
    """Has two passages for each question."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.question, self.passage = nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, questions, passages):
        q, p = self.question(questions), self.passage(passages)
        return q, p, q @ p.T


def _of_other_numbers(rank: int) -> None:
    mesh, generator = device_mesh("dp=2"), torch.Generator().manual_seed(0)
    whole = [torch.randn(n, 6, generator=generator) for n in (4, 8)]
    parallel, reference = pair(Pairs(), mesh, tuple(_part(x, 0, rank, 2) for x in whole), inputs="local")
    q, p, scores = parallel(*(_part(x, 0, rank, 2) for x in whole))
    expected = reference(*whole)
    assert torch.numel(input=p) == 4 * 8 and scores.shape == (4, 8)
    for found, wanted in zip((q, p, scores), (*(_part(x, 0, rank, 2) for x in expected[:2]), expected[2])):
        assert_close(found * 1, wanted)


@pytest.mark.gloo
def test_inputs_may_have_other_numbers_of_samples():
    gloo.run(2, _of_other_numbers)


@pytest.mark.gloo
def test_a_loss_outside_trains_as_under_ddp():
    gloo.run(2, _as_ddp)


def _sharded(rank: int) -> None:
    mesh, x = device_mesh("dp=2"), torch.randn(BATCH, SEQ, 6)
    for inputs, batch in (("local", _part(x, 0, rank, 2)), ("global", x)):
        parallel, reference = pair(Encoder(), mesh, (batch,), inputs=inputs, outputs="sharded")
        y = parallel(batch)["y"]
        assert type(y) is DTensor and y.shape == (BATCH, SEQ, 16)
        (y @ parallel.head.weight).square().mean().backward()
        (reference(x)["y"] @ reference.head.weight).square().mean().backward()
        assert_same_gradients(parallel, reference)


@pytest.mark.slow
@pytest.mark.gloo
def test_sharded_outputs_are_dtensors():
    gloo.run(2, _sharded)
    with pytest.raises(InputError, match='use "stage", "everywhere" or "sharded"'):
        autopar.compile(Encoder(), None, outputs="parts")


def _pipelined(rank: int) -> None:
    """Outputs of stages and micro-batches, of the samples of the ranks along dp."""
    mesh, (model, batch) = device_mesh("pp=2,dp=2"), tiny.gpt2(n_layer=1)
    mine = {k: _part(v, 0, mesh.get_local_rank("dp"), 2) for k, v in batch.items()}
    options = dict(inputs="local", outputs="everywhere", strategy="ddp", schedule="1f1b", micro_batches=2)
    parallel, reference = pair(model, mesh, mine, **options)
    found, expected = parallel(**mine), reference(**batch)
    assert_close(found.loss, expected.loss)
    assert_close(found.logits * 1, _part(expected.logits, 0, mesh.get_local_rank("dp"), 2))
    found.loss.backward(), expected.loss.backward()
    here = dict(parallel.named_parameters())
    assert here and all(p.grad is not None for p in here.values())
    for name, parameter in here.items():
        assert_close(parameter.grad, reference.get_parameter(name).grad, name)


@pytest.mark.slow
@pytest.mark.gloo
def test_outputs_of_a_pipeline():
    gloo.run(4, _pipelined)
