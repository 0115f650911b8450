"""A step whose sequence is cut equals one device's to 1e-10: attention of all kinds, lengths that no axis divides, real
models with rotary tables, windows, padding and position biases."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F

from autopar.errors import StrategyError
from autopar.simulate.compare import verify_model

from ..helpers.sequences import VOCABULARY, Decoder, Mixed, batch

KINDS = ("causal", "full", "left", "right", "window", "packed")
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}


def assert_same(model, inputs, mesh: str, strategy: str | None, **options) -> None:
    report = verify_model(model, inputs, mesh, strategy=strategy, **options)
    assert report.match and max(report.errors.values()) <= 1e-10, report


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "kind, heads, size, length", itertools.product(KINDS, HEADS, (2, 3, 4), (12, 13, 7))
)  # fmt: skip
def test_keys_gathered(kind, heads, size, length):
    padded = kind if kind in ("left", "right") else ""
    model = Decoder("padded" if padded else kind, *HEADS[heads], shift=("pad", "cut")[length % 2])
    assert_same(model, batch(length, padded), f"cp={size}", "all_gather_kv")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind, heads, size, length", itertools.product(KINDS, HEADS, (2, 3, 4), (12, 13, 7)))
def test_heads_exchanged(kind, heads, size, length):
    padded, (many, few) = kind if kind in ("left", "right") else "", HEADS[heads]
    model = Decoder("padded" if padded else kind, 12 if size == 3 else many, 6 if (size, few) == (3, 2) else few)
    assert_same(model, batch(length, padded), f"cp={size}", "ulysses")


@pytest.mark.parametrize("seed", [None, *range(2)])
def test_what_both_phases_read_is_exchanged_once(seed):
    """The backward reads queries, keys and values as the forward's exchange has left them: eight tensors a step."""
    drawn = random.Random(seed if seed is not None else (seed := random.randrange(2**32)))
    print(f"seed {seed}")
    size, samples = drawn.choice((2, 3, 4)), 2
    kv_heads, length = size * drawn.choice((1, 2)), size * drawn.randrange(2, 6)
    heads = kv_heads * drawn.choice((1, 2))
    report = verify_model(Decoder("causal", heads, kv_heads), batch(length, ""), f"cp={size}", strategy="ulysses")
    assert report.match and max(report.errors.values()) <= 1e-10, report
    exchanged = sum(c.wire_bytes for c in report.plan.collectives if c.kind == "all_to_all")
    rows = samples * length // size * 8 * torch.float64.itemsize
    assert exchanged == 2 * (2 * heads + 2 * kv_heads) * rows * (size - 1) / size
    assert all(sent == pytest.approx(report.predicted_bytes, abs=64) for sent in report.sent_bytes)


def test_more_devices_than_heads():
    with pytest.raises(StrategyError, match="4 of queries and 2 of keys"):
        assert_same(Decoder("causal", 4, 2), batch(12, ""), "cp=8", "ulysses")


ROUND = [*itertools.product((2, 3, 4), (12, 13, 7)), *itertools.product((8,), (16, 15, 23))]  # a block for each device


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind, heads, at", itertools.product(KINDS, HEADS, ROUND))
def test_keys_go_round(kind, heads, at):
    (size, length), padded = at, kind if kind in ("left", "right") else ""
    model = Decoder("padded" if padded else kind, *HEADS[heads], shift=("pad", "cut")[length % 2])
    assert_same(model, batch(length, padded), f"cp={size}", "ring")


def test_fewer_blocks_than_devices():
    with pytest.raises(StrategyError, match="one for each device"):
        assert_same(Decoder("causal", 4, 2), batch(12, ""), "cp=8", "ring")


IN_ZIGZAG = {"input_ids": "cp:Z(1)"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy, kind, heads, size", itertools.product(
    ("all_gather_kv", "ring"), KINDS, HEADS, (2, 3, 4)))  # fmt: skip
def test_zigzag(strategy, kind, heads, size):
    """A causal attention beside each other kind: both are cut in zigzag, and what is computed for each token."""
    padded = kind if kind in ("left", "right") else ""
    made, length = Mixed if kind != "causal" else Decoder, {2: 16, 3: 18, 4: 24}[size]
    model = made("padded" if padded else kind, *HEADS[heads], shift=("pad", "cut")[size % 2])
    report = verify_model(model, batch(length, padded), f"cp={size}", strategy=strategy, pin=IN_ZIGZAG)
    assert report.match and max(report.errors.values()) <= 1e-10, report
    of_attention = [node for name, node in report.plan.sharding.nodes.items() if name.startswith("attention")]
    assert {node.choice for node in of_attention} == {
        ("s/zigzag",) if strategy == "all_gather_kv" else ("ring/zigzag",)
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh, strategy", [
    ("dp=2,cp=2", "ring"), ("cp=2,tp=2", "all_gather_kv+megatron_sp"), ("cp=2,up=2", "ring+ulysses"),
    ("dp=2,cp=2", "all_gather_kv+fsdp"), ("dp=2,cp=2,tp=2", "ring+megatron_sp+zero1"),
])  # fmt: skip
def test_zigzag_beside_other_axes(mesh, strategy):
    assert_same(Mixed("padded", 4, 4), batch(16, "left"), mesh, strategy, pin=IN_ZIGZAG)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh, strategy", [
    ("dp=2,cp=2", "ring"), ("cp=2,tp=2", "ring+megatron_sp"), ("dp=2,cp=2", "ring+fsdp"), ("cp=2,up=2", "ring+ulysses"),
    ("dp=2,cp=2,tp=2", "ring+megatron_sp+zero1"), ("cp=2,up=2", "ring+ulysses+fsdp"), ("cp=3", "ring+zero1"),
])  # fmt: skip
def test_ring_beside_other_axes(mesh, strategy):
    assert_same(Decoder("padded", 4, 4), batch(13, "left"), mesh, strategy)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh, strategy", [
    ("dp=2,cp=2", "all_gather_kv"), ("cp=2,tp=2", "all_gather_kv+megatron_sp"), ("dp=2,cp=2", "ulysses+fsdp"),
    ("cp=2", "all_gather_kv+fsdp"), ("tp=2,cp=2", "ulysses+megatron"), ("dp=2,cp=2,tp=2", "ulysses+megatron_sp+zero1"),
])  # fmt: skip
def test_beside_other_axes(mesh, strategy):
    assert_same(Decoder("padded", 4, 4), batch(13, "left"), mesh, strategy)


@pytest.mark.slow
def test_micro_batches_and_stages():
    inputs = batch(12, "left", samples=4)
    assert_same(Decoder("padded", 4, 2), inputs, "cp=2", "all_gather_kv", micro_batches=2)
    llama = WithLoss(MODELS["llama"]())
    assert_same(llama.double(), inputs, "pp=2,cp=2", "all_gather_kv", micro_batches=2)
    assert_same(llama.double(), inputs, "pp=2,cp=2", "ring", micro_batches=2)


class WithLoss(nn.Module):
    """A model of transformers' with a loss in its own type, where theirs is in fp32; T5 shifts the ids itself."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, labels, **inputs):
        shifted = self.model.config.is_encoder_decoder
        logits = self.model(**inputs, **({"decoder_input_ids": inputs["input_ids"]} if shifted else {})).logits
        labels = labels if shifted else F.pad(labels, (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))


SIZES = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=32)  # fmt: skip
OPEN = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
MODELS = {
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4,
                                                     n_positions=32, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0,
                                                     **OPEN)),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=2, **OPEN)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=3,
                                                              **OPEN)),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES, hidden_dropout_prob=0, attention_probs_dropout_prob=0)),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48,
                                                            num_layers=1, num_heads=4, dropout_rate=0)),
}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["all_gather_kv", "ulysses", "ring", None])
@pytest.mark.parametrize(
    "mesh, length, padded", [("cp=2", 12, "left"), ("cp=2", 13, "right"), ("dp=2,cp=2", 8, "left")]
)
@pytest.mark.parametrize("name", MODELS)
def test_real_models(name, mesh, length, padded, strategy):
    torch.manual_seed(0)
    model = WithLoss(MODELS[name]()).double()
    assert_same(model, batch(length, padded), mesh, strategy)
