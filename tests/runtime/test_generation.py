"""`generate` with a cache of keys and values, against the plain model's: greedy, sampled and beams, between steps."""

from __future__ import annotations

import logging

import pytest
import torch

from autopar.errors import AdaptError, MemoryInfeasibleError
from autopar.frontend.precision import computing_in
from tests.helpers import gloo

from . import tiny
from .parity import assert_same_gradients, device_mesh, pair

MODELS = {
    "gpt2": lambda: tiny.gpt2(n_layer=1, bos_token_id=0, eos_token_id=0),
    "llama": lambda: tiny.llama(num_hidden_layers=1, num_key_value_heads=1, bos_token_id=0, eos_token_id=0),
}
CACHED = dict(use_cache=True, pad_token_id=0)
HOW = (
    dict(do_sample=False), dict(do_sample=True, top_k=20),
    dict(do_sample=True, temperature=0.7, num_return_sequences=2), dict(num_beams=2, do_sample=False),
)  # fmt: skip


def _generated(rank: int, mesh: str, make: str, options: dict) -> None:
    model, batch = MODELS[make]()
    parallel, reference = pair(model, device_mesh(mesh), batch, **options)
    captures = len(parallel.captures)
    lengths = (6, 4)
    for length in lengths:
        prompts = batch["input_ids"][:2, :length]
        for how in HOW:
            found = []
            for m in (parallel, reference):
                m.eval()
                torch.manual_seed(5)
                tokens = m.generate(prompts, max_new_tokens=5, min_new_tokens=3, **CACHED, **how)
                found.append(tokens.tolist())
            assert found[0] == found[1], how
        assert len(parallel.captures) == captures, "no capture is made for it"
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (parallel, reference)]
        for m, optimizer in zip((parallel, reference), optimizers):
            m.train()
            optimizer.zero_grad()
            m(**batch).loss.backward()
            optimizer.step()
        if parallel.stage_mesh.pp_group is None:
            assert_same_gradients(parallel, reference)


@pytest.mark.gloo
@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh, make, options", [
    ("dp=2", "gpt2", dict(strategy="fsdp")), ("dp=2", "llama", dict(strategy="ddp")),
    ("tp=2", "gpt2", dict(strategy="megatron")), ("tp=2", "llama", dict(strategy="megatron")),
    ("pp=2", "gpt2", dict(micro_batches=2)),
    ("dp=2", "llama", dict(micro_batches=2)),
])  # fmt: skip
def test_tokens_of_the_plain_model(mesh, make, options):
    gloo.run(2, _generated, mesh, make, options)


def _in_bf16(rank: int) -> None:
    model, batch = MODELS["llama"]()
    parallel, reference = pair(model, device_mesh("dp=2"), batch, strategy="fsdp", precision="bf16")
    for m in (parallel, reference):
        m.eval()
    for how in HOW:
        torch.manual_seed(5)
        mine = parallel.generate(batch["input_ids"][:2, :6], max_new_tokens=5, **CACHED, **how)
        torch.manual_seed(5)
        with computing_in(reference, torch.bfloat16):
            assert torch.equal(mine, reference.generate(batch["input_ids"][:2, :6], max_new_tokens=5, **CACHED, **how))


@pytest.mark.slow
@pytest.mark.gloo
def test_in_bf16():
    gloo.run(2, _in_bf16)


def _by_rank(rank: int) -> None:
    """Ranks have prompts of their own, and end when these do."""
    model, batch = MODELS["gpt2"]()
    halves = {name: value.chunk(2)[rank] for name, value in batch.items()}
    parallel, reference = pair(model, device_mesh("dp=2"), halves, inputs="local", strategy="fsdp")
    prompt = batch["input_ids"][rank : rank + 1, : 3 + 2 * rank]
    for m in (parallel, reference):
        m.eval()
    tokens = [m.generate(prompt, max_new_tokens=2 + 4 * rank, do_sample=False, **CACHED) for m in (parallel, reference)]
    assert torch.equal(*tokens)


@pytest.mark.slow
@pytest.mark.gloo
def test_prompts_of_ranks():
    gloo.run(2, _by_rank)


def test_cost_and_errors(alone, caplog):
    caplog.set_level(logging.INFO, logger="autopar")
    model, batch = MODELS["gpt2"]()
    parallel, reference = pair(model, alone, batch)
    ids = batch["input_ids"][:1, :4]
    for m in (parallel, reference):
        m.eval()
    for _ in range(2):
        assert torch.equal(*[m.generate(ids, max_new_tokens=3, **CACHED) for m in (parallel, reference)])
    told = [message for message in caplog.messages if message.startswith("generate: each call gathers ")]
    assert len(told) == 1 and "use_cache=False" in told[0]
    with pytest.raises(MemoryInfeasibleError, match="keys and values .* GiB(.|\n)*use_cache=False"):
        parallel.generate(ids, max_new_tokens=10**8, **CACHED)


@pytest.mark.slow
def test_adapters(alone):
    from autopar import LoRA

    model, batch = MODELS["llama"]()
    parallel, _ = pair(model, alone, batch, adapt=[LoRA(target_modules=["q_proj"])])
    parallel.eval()
    ids = batch["input_ids"][:1, :4]
    with pytest.raises(AdaptError, match="no adapters(.|\n)*use_cache=False"):
        parallel.generate(ids, max_new_tokens=3, **CACHED)
