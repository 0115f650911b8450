"""Tensor parallelism without and with sequence parallelism as its authors draw it: between the blocks' tensor-parallel
regions every op is whole, or cut along the sequence, whoever wrote the norm.

Korthikanti et al., arXiv 2205.05198, figures 5 and 6: before each region an all-gather, behind it a reduce-scatter, and
in the backward the same. So an attention and an MLP make two of each a layer and phase, an attention over an encoder's
output makes one more, and none of the big tensors is reduced or re-sharded otherwise.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from autopar import compiler
from autopar.compiler import lower

from .planning import make, toy

LAYERS, BATCH, SEQ, HIDDEN = 2, 4, 32, 64
FAST = toy(flops=1e10, memory=1e10, latency=1e-9)


def config(name: str, **more):
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=8, intermediate_size=192)
    return getattr(transformers, f"{name}Config")(**sizes, vocab_size=256, **more)


def gpt2():
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=HIDDEN, n_layer=LAYERS, n_head=4, vocab_size=256, n_positions=SEQ, resid_pdrop=0,
                                embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)
    )  # fmt: skip


def t5():
    transformers = pytest.importorskip("transformers")
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=HIDDEN, d_kv=16, d_ff=192, num_layers=LAYERS, num_decoder_layers=LAYERS,
                              num_heads=4, vocab_size=256, dropout_rate=0, decoder_start_token_id=0)
    )  # fmt: skip


def causal(name: str, **more):
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, f"{name}ForCausalLM")(config(name, **more))


FAMILIES = {  # with the regions of all layers and the streams that start at an embedding
    "gpt2": (gpt2, 2 * LAYERS, 1),
    "llama": (lambda: causal("Llama", num_key_value_heads=4), 2 * LAYERS, 1),
    "qwen3": (lambda: causal("Qwen3", num_key_value_heads=4, head_dim=16), 2 * LAYERS, 1),
    "gemma2": (lambda: causal("Gemma2", num_key_value_heads=4, head_dim=16), 2 * LAYERS, 1),
    "t5": (t5, (2 + 3) * LAYERS, 2),
}


def activation_collectives(graph, plan, ways: int) -> dict[str, Counter]:
    """Count by phase and kind the collectives of tp one rank runs that send as much as an all-gather of the stream."""
    found: dict[str, Counter] = {"forward": Counter(), "backward": Counter()}
    for node in lower(graph, plan, 0, check=True).local.graph.nodes:
        c = node.meta.get("collective")
        if c and "tp" in c.axes and c.wire_bytes >= BATCH * SEQ * HIDDEN * 4 * (ways - 1) / ways:
            found[c.phase][c.kind] += 1
    return found


def planned(family: str, ways: int, strategy: str):
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long)
    graph = compiler.trace(FAMILIES[family][0](), {"input_ids": ids, "labels": ids})
    plan = make(graph, f"tp={ways}", FAST, strategy=strategy)
    norms = {name: layout for name, layout in plan.layouts.items() if "norm" in name or "ln_" in name}
    assert norms and set(norms.values()) == {"R"}
    return graph, plan


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_collectives_are_those_of_the_closed_formula(family, ways):
    """Besides those of the regions, the vocabulary's head gathers its input, embeddings scatter what they look up, and
    the encoder's output is gathered once for all attentions that read it."""
    _, regions, streams = FAMILIES[family]
    assert activation_collectives(*planned(family, ways, "megatron_sp"), ways) == {
        "forward": {"all_gather": regions + streams, "reduce_scatter": regions + streams},
        "backward": {"all_gather": regions + streams, "reduce_scatter": regions + streams},
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_without_sequence_parallelism_sums_are_whole(family, ways):
    """Figure 4 there: what runs between the regions is whole on every device, so that an all-reduce stands behind each
    region, or as many bytes of all-gathers, and in the backward before each. Embeddings cut by feature are gathered;
    in the backward the inputs of the vocabulary's head and of an encoder's readers are summed as well."""
    _, regions, streams = FAMILIES[family]
    found = activation_collectives(*planned(family, ways, "megatron"), ways)
    sent = {"all_reduce": 2, "all_gather": 1}  # times the bytes of the stream
    assert 0 < sum(sent[kind] * count for kind, count in found["forward"].items()) - 2 * regions <= streams
    assert found["backward"] == {"all_reduce": regions + streams}
