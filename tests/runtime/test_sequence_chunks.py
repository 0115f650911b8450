"""Chunks of a row's tokens through stages on gloo: a call is the whole batch on one process, with rows of other lengths
and without gradients too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.helpers import gloo

from . import tiny
from .parity import assert_close, device_mesh, pair


def _batch(batch: dict, tokens: int, seed: int) -> dict:
    """Another batch, in which samples have labels on some tokens alone."""
    torch.manual_seed(seed)
    ids = torch.randint(0, 32, (len(batch["input_ids"]), tokens))
    labels = torch.where(torch.rand(ids.shape) < 0.3, -100, ids)
    return {"input_ids": ids, "labels": labels}


def _calls(rank: int, mesh: str, chunks: int, micro_batches: int, schedule: str) -> list[int]:
    model, batch = tiny.llama(num_hidden_layers=2)
    planned = _batch(batch, 16, 0)
    parallel, reference = pair(
        model, device_mesh(mesh), planned, sequence_chunks=chunks, micro_batches=micro_batches, schedule=schedule
    )
    pipeline = parallel.plan.pipeline
    assert (pipeline.row_chunks, pipeline.micro_batches) == (chunks, chunks * micro_batches)
    lengths = [16, 24, 15]  # the last is no multiple of the chunks: its rows are whole
    for seed, tokens in enumerate(lengths):
        given = _batch(batch, tokens, seed)
        parallel.zero_grad()
        reference.zero_grad()
        loss, expected = parallel(**given).loss, reference(**given).loss
        assert_close(loss, expected, f"loss of {tokens} tokens")
        loss.backward()
        expected.backward()
        for name, parameter in parallel.named_parameters():
            assert_close(parameter.grad, reference.get_parameter(name).grad, f"{name}, {tokens} tokens")
    with torch.no_grad():
        given = _batch(batch, 16, 7)
        found, wanted = parallel(**given), reference(**given)
        assert_close(found.loss, wanted.loss, "loss without gradients")
        if found.logits is not None:
            assert_close(found.logits, wanted.logits, "logits")
    dist.barrier()
    return lengths


@pytest.mark.gloo
def test_rows_of_other_lengths():
    assert gloo.run(2, _calls, "pp=2", 4, 1, "1f1b", seconds=240) == [[16, 24, 15]] * 2


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("mesh", ["pp=2,dp=2", "pp=2,tp=2"])
def test_together_with_other_axes(mesh):
    assert gloo.run(4, _calls, mesh, 2, 2, "zb_h1", seconds=400) == [[16, 24, 15]] * 4
