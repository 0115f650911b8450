"""Logits of a loss in blocks: training without them, and what reads them all the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import InputError
from autopar.models.output import Output
from autopar.runtime.unmade import UnmadeTensor
from tests.helpers import gloo

from .parity import assert_close, assert_same_gradients, device_mesh, full, pair, train


class Language(nn.Module):
    """A tiny language model with tied embeddings; `dropout` draws random numbers."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.layer = nn.Embedding(19, 6), nn.Linear(6, 6)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(6, 19, bias=False)
        self.head.weight = self.body.weight

    def forward(self, ids, labels):
        logits = self.head(self.drop(torch.tanh(self.layer(self.body(ids)))))
        return Output(F.cross_entropy(logits.reshape(-1, 19), labels.reshape(-1)), logits)


def batch(rows: int = 6):
    generator = torch.Generator().manual_seed(rows)
    return {n: torch.randint(0, 19, (rows, 5), generator=generator) for n in ("ids", "labels")}


def compiled(mesh: str, dropout: float = 0.0, **options):
    parallel, reference = pair(
        Language(dropout), device_mesh(mesh), batch(), tile="loss", hardware="cpu-gloo", **options
    )
    assert parallel.plan.tiled
    return parallel, reference


def check_training(rank: int, mesh: str, strategy: str, sizes: tuple[int, ...]):
    parallel, reference = compiled(mesh, strategy=strategy)
    for mine, whole in zip(train(parallel, batch(), 3), train(reference, batch(), 3)):
        assert abs(mine - whole) < 1e-5
    for rows in sizes:
        found, wanted = parallel(**batch(rows)), reference(**batch(rows))
        assert found.logits.shape == wanted.logits.shape
        assert_close(found.logits + 0, wanted.logits, "logits")
        found.loss.backward(), wanted.loss.backward()
        assert_same_gradients(parallel, reference)
    return type(found.logits).__name__


def check_reads(rank: int, mesh: str):
    parallel, reference = compiled(mesh)
    found, wanted = parallel(**batch()), reference(**batch())
    logits = found.logits
    assert isinstance(logits, UnmadeTensor) and not torch.isnan(logits.sum())
    assert logits.dtype == torch.float32 and logits.device.type == "cpu" and logits.requires_grad
    assert (logits.size(0), len(logits), logits.dim(), logits.numel()) == (6, 6, 3, 6 * 5 * 19)
    assert_close(logits.argmax(-1), wanted.logits.argmax(-1)), assert_close(logits.detach(), wanted.logits)
    assert_close(torch.tensor(logits.tolist()), wanted.logits)
    assert_close(full(logits), wanted.logits)
    for outputs in (found, wanted):  # a gradient for them, which needs another program
        (outputs.loss + 0.1 * outputs.logits.square().mean()).backward()
    assert_same_gradients(parallel, reference)
    parallel.zero_grad(), reference.zero_grad()
    for model in (parallel, reference):
        model(**batch()).loss.backward()
    assert_same_gradients(parallel, reference)
    with torch.no_grad():
        assert_close(parallel(**batch()).logits, reference(**batch()).logits)


def check_late(rank: int, mesh: str):
    """A read after a write to what the forward read is an error, not another number; dropout is that of the forward."""
    parallel, _ = compiled(mesh, dropout=0.5)
    found = parallel(**batch())
    logits = found.logits + 0
    loss = F.cross_entropy(logits.reshape(-1, 19), batch()["labels"].reshape(-1))
    assert_close(loss, found.loss.detach())
    found = parallel(**batch())
    found.loss.backward()
    assert found.logits.shape == logits.shape
    with torch.no_grad():
        parallel.layer.bias.add_(1)
    with pytest.raises(InputError, match="layer.bias, which this output needs, has been modified"):
        found.logits.sum()


@pytest.mark.slow
def test_training():
    assert set(gloo.run(2, check_training, "dp=2", "fsdp", (6,))) == {"UnmadeTensor"}


@pytest.mark.slow
@pytest.mark.parametrize("mesh, strategy", [("tp=2", "megatron"), ("dp=2", "fsdp")])
def test_sizes_that_are_captured_and_that_follow(mesh, strategy):
    gloo.run(2, check_training, mesh, strategy, (6, 5, 9, 7))


@pytest.mark.slow
def test_reads():
    gloo.run(2, check_reads, "dp=2")


def test_reads_under_tensor_parallelism_and_late_ones():
    gloo.run(2, check_both, "tp=2")


def check_both(rank: int, mesh: str):
    check_reads(rank, mesh)
    check_late(rank, mesh)
