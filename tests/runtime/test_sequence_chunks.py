"""Chunks of a row's tokens through stages on gloo: a call is the whole batch on one process, with rows of other lengths
and without gradients too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.errors import CompilerError
from autopar.models import build
from tests.helpers import gloo
from tests.helpers.allocations import training_step

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


def _memory(rank: int, chunks: int, rows: int, schedule: str, precision: str) -> float:
    """Bytes that the tracker sees over those of the plan for this rank."""
    text = "llama:hidden=64,layers=4,heads=4,kv_heads=2,ffn=128,vocab=64,seq=2048"
    model, inputs = build(text, batch=rows, seq=2048, device="cpu")
    options = dict(sequence_chunks=chunks, micro_batches=rows, schedule=schedule, precision=precision, tile="none")
    module = autopar.compile(model, device_mesh("pp=2"), inputs, **options)
    seen = training_step(module, inputs, torch.optim.AdamW(module.parameters()), steps=2)
    return seen.peak_bytes / module.plan.pipeline.costs[rank].peak_bytes


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(
    "case", [(4, 1, "1f1b", "fp32"), (8, 1, "zb_h1", "bf16"), (4, 2, "1f1b", "fp32"), (4, 4, "1f1b", "bf16")]
)
def test_memory_is_what_the_plan_says(case):
    shares = gloo.run(2, _memory, *case, seconds=240)
    assert all(0.9 <= share <= 1.01 for share in shares), shares


@pytest.mark.gloo
def test_rows_of_other_lengths():
    assert gloo.run(2, _calls, "pp=2", 4, 1, "1f1b", seconds=240) == [[16, 24, 15]] * 2


def _compiled(rank: int) -> str:
    model, batch = tiny.llama(num_hidden_layers=2)
    parallel, _ = pair(model, device_mesh("pp=2"), _batch(batch, 16, 0), sequence_chunks=2, micro_batches=1)
    assert parallel.plan.execution == "eager"
    with pytest.raises(CompilerError, match="2 chunks of its tokens, which run op by op") as error:
        parallel.compile()
    return str(error.value)


@pytest.mark.slow
@pytest.mark.gloo
def test_chunks_run_op_by_op():
    assert all("sequence_chunks=1" in text for text in gloo.run(2, _compiled, seconds=120))


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("mesh", ["pp=2,dp=2", "pp=2,tp=2"])
def test_together_with_other_axes(mesh):
    assert gloo.run(4, _calls, mesh, 2, 2, "zb_h1", seconds=400) == [[16, 24, 15]] * 4
