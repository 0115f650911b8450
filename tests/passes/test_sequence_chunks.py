"""Rows in chunks of their tokens: run on all chunks the graph of one gives what whole rows give, or the model is
refused with the op."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from autopar.errors import MicroBatchError
from autopar.ops import ATTENTION
from autopar.passes.pipeline.micro_batch import micro_batch
from autopar.passes.pipeline.sequence_chunks import chunk_of, in_chunks
from autopar.passes.pipeline.stages import cut
from tests.helpers import staged

functional = nn.functional


def check(case: staged.Case, rows: int, chunks: int, note: object = ""):
    """The step, chunk by chunk, against whole rows on one device."""
    micro = in_chunks(micro_batch(case.captured, rows), chunks)
    assert micro.micro_batches == rows * chunks and len(micro.sizes) == rows * chunks
    step = staged.play_stages(micro, cut(micro.captured.graph_module, ()), case.values)
    case.check(step, f"{note} {rows} x {chunks} chunks")
    return micro


# causal, grouped queries, windows, ALiBi, learned positions, a cap on scores, norms of keys
FAMILIES = ["llama", "mistral", "gemma2", "gemma3_text", "bloom", "falcon", "mpt", "gpt2", "gpt_neox", "phi3", "opt"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name):
    case = staged.family(name)
    for rows, chunks in ((1, 4), (2, 2)):
        check(case, rows, chunks, name)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["gpt_oss", "mixtral"])
def test_experts_of_one_row_at_a_time(name):
    """Rows of experts of one sample are in order; GPT-OSS has sinks and windows too."""
    case = staged.family(name)
    check(case, case.samples, 2, name)
    with pytest.raises(MicroBatchError, match="computes with all of them at once"):
        in_chunks(micro_batch(case.captured, 1), 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_own_models_of_any_size(kind):
    seed = random.randrange(10**6)
    draw = random.Random(seed)
    for _ in range(3):
        batch, rows, chunks = draw.randint(1, 5), draw.randint(1, 3), draw.randint(2, 4)
        tokens = chunks * draw.randint(1, 5)
        heads = f"heads=4,kv_heads={draw.choice([1, 2, 4])}" if kind == "llama" else "heads=4"
        case = staged.own(f"{kind}:layers=2,hidden=16,vocab=32,{heads}", batch=batch, seq=tokens)
        check(case, min(rows, batch), chunks, f"seed {seed}: {kind}, {heads}, batch {batch}, {tokens} tokens")


class Attention(nn.Module):
    """A layer of attention, a loss over the tokens that count and the outputs beside it: x (b, s, 8)."""

    def __init__(self, attend, after=lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.attend, self.after = nn.Linear(8, 24), nn.Linear(8, 5), attend, after

    def forward(self, x, target, documents=None):
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = self.out(self.after(self.attend(q, k, v, documents).transpose(1, 2).flatten(2)))
        return dict(loss=functional.cross_entropy(y.flatten(0, 1), target.flatten()), outputs=y)


def _batch(samples: int, tokens: int, seed: int) -> dict:
    """A batch of which some tokens count, in documents that follow one another."""
    torch.manual_seed(seed)
    target = torch.randint(0, 5, (samples, tokens))
    target[torch.rand(samples, tokens) < 0.4] = -100
    documents = (torch.rand(samples, tokens) < 0.3).cumsum(1)
    return dict(x=torch.randn(samples, tokens, 8), target=target, documents=documents)


def _mask(q, documents):
    """A query reads the keys of its own document up to its own."""
    tokens = q.shape[2]
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril()
    return causal & (documents[:, None, :, None] == documents[:, None, None, :])


def _weights_dropped(q, k, v, documents):
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.3)


ATTEND = {
    "causal": lambda q, k, v, d: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
    "documents": lambda q, k, v, d: functional.scaled_dot_product_attention(q, k, v, attn_mask=_mask(q, d)),
    "weights dropped": _weights_dropped,
}


@pytest.mark.parametrize("kind", ATTEND)
def test_kinds_of_attention(kind):
    seed = random.randrange(10**6)
    draw = random.Random(seed)
    for _ in range(2):
        samples, chunks = draw.randint(1, 3), draw.randint(2, 4)
        case = staged.Case.of(Attention(ATTEND[kind]), _batch(samples, chunks * draw.randint(1, 6), seed))
        check(case, 1, chunks, f"seed {seed}: {kind}")


def test_dropped_values_are_those_of_whole_rows():
    model = Attention(_weights_dropped, after=lambda x: functional.dropout(x, 0.5))
    case = staged.Case.of(model, _batch(2, 12, 0))
    micro = check(case, 1, 3)
    assert micro.chunks[0].draws
    with pytest.raises(MicroBatchError, match="drawn by their number alone"):
        in_chunks(micro_batch(case.captured, 2), 3)


REFUSED = {
    "later keys": (Attention(lambda q, k, v, d: functional.scaled_dot_product_attention(q, k, v)), "later tokens"),
    "a mean of tokens": (
        Attention(ATTEND["causal"], lambda x: x - x.mean(1, keepdim=True)),
        "sub computes with all",
    ),
    "a sum over tokens": (Attention(ATTEND["causal"], lambda x: x.cumsum(1)), "cumsum computes with all"),
    "no attention": (Attention(lambda q, k, v, d: q), "no causal attention"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_tokens_is_refused(name):
    model, about = REFUSED[name]
    case = staged.Case.of(model, _batch(2, 8, 0))
    with pytest.raises(MicroBatchError, match="cannot be computed in 2 chunks") as error:
        in_chunks(micro_batch(case.captured, 1), 2)
    assert about in str(error.value) and "sequence_chunks" in str(error.value)


def test_a_number_that_does_not_divide_the_tokens():
    case = staged.own("llama:layers=1,hidden=16,heads=2,vocab=32", batch=2, seq=10)
    with pytest.raises(MicroBatchError, match="10 tokens, which 4 does not divide"):
        in_chunks(micro_batch(case.captured, 1), 4)


@pytest.mark.parametrize("chunks", [2, 3, 4, 8])
def test_a_mean_chunk_has_the_mean_of_their_keys(chunks):
    """Pairs of a query and a key of all chunks are those of whole rows: tokens (tokens + 1) / 2, or half a key less."""
    tokens = 24
    case = staged.own("llama:layers=1,hidden=16,heads=2,vocab=32", batch=1, seq=tokens)
    captured, found = chunk_of(case.captured, chunks)
    own = tokens // chunks
    assert found.tokens == own
    for node in captured.graph.nodes:
        if node.target in ATTENTION:
            at = 0 if node.target is torch.ops.autopar.attention.default else 1
            queries, keys = (node.args[at + i].meta["val"].shape[2] for i in range(2))
            first = node.kwargs.get("first") or node.args[5 if at == 0 else 9]
            pairs = chunks * sum(first + i + 1 for i in range(queries))
            assert queries == own and keys == first + own
            assert abs(pairs - tokens * (tokens + 1) / 2) <= tokens / 2
