"""A step of models whose attention drops weights equals one device's to 1e-10, however it is cut, and no value of its
graph has the size of all weights."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F

from autopar import compiler
from autopar.frontend.fake_parameters import forms_of
from autopar.ir.graph import fingerprint, values_of
from autopar.ops import ATTENTION, autopar
from autopar.ops.streams import stream_of
from autopar.simulate.compare import verify_model

from ..helpers.sequences import VOCABULARY, Decoder, batch

LENGTH, HEADS, WIDTH = 20, 4, 4
SIZES = dict(vocab_size=VOCABULARY, use_cache=False)
CUTS = [
    ("dp=2", "ddp", {}), ("tp=2", "megatron", {}), ("dp=2,tp=2", "megatron_sp+fsdp", {}), ("dp=2,tp=2", None, {}),
    ("cp=2", "all_gather_kv", {}), ("cp=2", "ulysses", {}), ("cp=2", "ring", {}), ("cp=3", "ring", {}),
    ("dp=2,cp=2", "ring+fsdp", {}), ("cp=2,up=2", "ring+ulysses", {}), ("dp=3", "fsdp", {}),
    ("dp=2", "fsdp", {"micro_batches": 2}), ("pp=2", None, {"micro_batches": 2}),
    ("pp=2,dp=2", None, {"micro_batches": 2}), ("pp=2,cp=2", "ring", {"micro_batches": 2}),
]  # fmt: skip
RECOMPUTED = ("none", "full")


class Gpt(nn.Module):
    """A decoder whose attention drops weights, by sdpa as F has it."""

    def __init__(self, p: float = 0.2, kv_heads: int = HEADS):
        super().__init__()
        torch.manual_seed(0)
        hidden = HEADS * WIDTH
        self.p, self.kv_heads = p, kv_heads
        self.tokens = nn.Embedding(VOCABULARY, hidden)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(hidden, hidden + 2 * WIDTH * kv_heads) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)
        self.double()

    def forward(self, input_ids, labels):
        x = self.tokens(input_ids)
        for norm, qkv, out in zip(self.norms, self.qkv, self.out):
            widths = [WIDTH * n for n in (HEADS, self.kv_heads, self.kv_heads)]
            q, k, v = (t.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for t in qkv(norm(x)).split(widths, -1))
            y = F.scaled_dot_product_attention(q, k, v, None, self.p, True, enable_gqa=self.kv_heads != HEADS)
            x = x + out(y.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Transformers(nn.Module):
    """A model of transformers with dropout of 0.1 in its attention, and maybe elsewhere, under a loss in fp64."""

    def __init__(self, name: str, attention: str, rest: float = 0.0, layers: int = 2):
        super().__init__()
        torch.manual_seed(0)
        if name == "gpt2":
            sizes = SIZES | dict(n_embd=16, n_head=HEADS, n_layer=layers, n_positions=LENGTH)
            config = hf.GPT2Config(**sizes, attn_pdrop=0.1, resid_pdrop=rest, embd_pdrop=rest)
            self.model = hf.GPT2LMHeadModel._from_config(config, attn_implementation=attention)
        else:
            sizes = SIZES | dict(
                hidden_size=16, num_attention_heads=HEADS, num_hidden_layers=layers, intermediate_size=24
            )
            config = hf.BertConfig(**sizes, max_position_embeddings=LENGTH, hidden_dropout_prob=rest)
            self.model = hf.BertForMaskedLM._from_config(config, attn_implementation=attention)
        self.double().train()

    def forward(self, input_ids, labels, attention_mask):
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def model_of(name: str, attention: str):
    """Return a model and its inputs; BERT's are padded."""
    inputs = batch(LENGTH, "right" if name == "bert" else "", samples=4)
    if name == "gpt":
        return Gpt(kv_heads=2 if attention == "grouped" else HEADS), {n: inputs[n] for n in ("input_ids", "labels")}
    return Transformers(name, attention, 0.1 if attention == "eager" else 0.0), inputs


MODELS = [("gpt", "sdpa"), ("gpt", "grouped"), *itertools.product(("gpt2", "bert"), ("sdpa", "eager"))]
CASES = [
    (*model, *cut, recompute) for model, cut, recompute in itertools.product(MODELS, CUTS, RECOMPUTED)
    if not (recompute == "full" and "pp" not in cut[0] and "dp" not in cut[0])
]  # fmt: skip
CASES = [CASES[i * 37 % len(CASES)] for i in range(len(CASES))]  # of which a few are of all models and cuts


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name, attention, mesh, strategy, options, recompute", CASES)
def test_as_one_device(name, attention, mesh, strategy, options, recompute):
    model, inputs = model_of(name, attention)
    report = verify_model(model, inputs, mesh, strategy=strategy, recompute=recompute, **options)
    assert report.match and max(report.errors.values()) <= 1e-10, report
    assert any(name.startswith("attention") for name in report.plan.sharding.nodes)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name, attention", MODELS)
def test_nothing_has_the_size_of_all_weights(name, attention):
    model, inputs = model_of(name, attention)
    graph = compiler.trace(model, inputs).graph
    attentions = [n for n in graph.nodes if n.op == "call_function" and n.target in ATTENTION]
    streams = [stream_of(n) for n in attentions if n.target is autopar.attention.default]
    assert len(streams) == 2 and sorted(map(stream_of, attentions)) == sorted(2 * streams)
    assert len({stream_of(n) for n in graph.nodes} - {None}) == (3 * 2 + 1 if attention == "eager" else 2)
    shapes = {tuple(v.shape) for n in graph.nodes if n.op != "output" for v in values_of(n)}
    of_pairs = [shape for shape in shapes if shape[-2:] == (LENGTH, LENGTH)]
    assert not of_pairs or attention == "eager" and {shape[1] for shape in of_pairs} == {1}  # its mask reads an input


@pytest.mark.slow
def test_unrolled_layers_drop_by_streams_of_their_own():
    model = Transformers("gpt2", "sdpa", 0.1, layers=9)
    inputs = batch(LENGTH, "")
    whole, unrolled = (trace(model, inputs) for trace in (compiler.trace, traced_to_plan))
    assert fingerprint(whole.graph) == fingerprint(unrolled.graph) and unrolled.compact is not None


def traced_to_plan(model, inputs):
    return compiler.trace_to_plan(model, inputs, None, forms_of(model))


class Dropping(Decoder):
    """A layer of attention of some kind that drops weights."""

    def attend(self, q, k, v, mask, is_causal):
        return F.scaled_dot_product_attention(q, k, v, mask, 0.3, is_causal, enable_gqa=True)


KINDS = ("causal", "full", "padded", "window", "packed")
OF_KINDS = [("cp=2", "all_gather_kv"), ("cp=3", "ring"), ("cp=2", "ulysses"), ("dp=2,tp=2", "megatron")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind, kv_heads, cut", itertools.product(KINDS, (4, 2, 1), OF_KINDS))
def test_kinds(kind, kv_heads, cut):
    model, inputs = (
        Dropping(kind, 12, 3 * kv_heads if kv_heads > 1 else 1),
        batch(13, "left" if kind == "padded" else ""),
    )
    report = verify_model(model, inputs, cut[0], strategy=cut[1] if kv_heads > 1 else "all_gather_kv")
    assert report.match and max(report.errors.values()) <= 1e-10, report
    assert report.plan.packed == (kind == "packed")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind, kv_heads, strategy", itertools.product(
    ("causal", "padded", "packed"), (4, 2), ("all_gather_kv", "ring")))  # fmt: skip
def test_zigzag_is_of_gathered_keys(kind, kv_heads, strategy):
    """A ring's step in zigzag has two ranges of queries and keys: it goes round in plain blocks."""
    inputs = batch(16, "left" if kind == "padded" else "")
    report = verify_model(Dropping(kind, 4, kv_heads), inputs, "cp=2", strategy=strategy, pin={"input_ids": "cp:Z(1)"})
    assert report.match and max(report.errors.values()) <= 1e-10, report
    found = {node.choice for name, node in report.plan.sharding.nodes.items() if name.startswith("attention")}
    assert found == {("s/zigzag",) if strategy == "all_gather_kv" else ("ring",)}
