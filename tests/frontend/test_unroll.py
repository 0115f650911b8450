"""An unrolled graph is the graph of the whole model, node for node; what cannot be unrolled is traced in full."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from autopar import compiler, models
from autopar.frontend.block_lists import repeated_blocks_of
from autopar.frontend.fake_parameters import forms_of
from autopar.ir.graph import fingerprint, output_node
from tests.helpers import whole_batch

DEPTH = 9


def huggingface(name: str):
    import transformers

    torch.manual_seed(0)
    small = dict(vocab_size=96, hidden_size=32, num_hidden_layers=DEPTH, num_attention_heads=4, intermediate_size=64)
    ids = torch.randint(1, 90, (4, 16))
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=96,
            n_positions=64,
            n_embd=32,
            n_layer=DEPTH,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}
    if name == "bert":
        config = transformers.BertConfig(**small, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        return transformers.BertForMaskedLM(config), {"input_ids": ids, "labels": ids}
    if name == "mistral":  # a window shorter than the sequence: a mask that is a constant of all blocks
        config = transformers.MistralConfig(**small, num_key_value_heads=2, sliding_window=4)
        return transformers.MistralForCausalLM(config), {"input_ids": ids, "labels": ids}
    if name == "mixtral":  # its balance of experts is one of all layers
        config = transformers.MixtralConfig(
            **small, num_key_value_heads=2, num_local_experts=4, output_router_logits=True, use_cache=False
        )
        return transformers.MixtralForCausalLM(config), {"input_ids": ids, "labels": ids}
    config = transformers.LlamaConfig(**small, num_key_value_heads=2, tie_word_embeddings=name == "tied llama")
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def build(name: str):
    if ":" in name:
        return models.build(name, batch=4, seq=16)
    if name == "balances":  # every block adds to a number of the whole batch
        return whole_batch.Layered(DEPTH), (torch.randn(4, 5, 6),)
    if name == "gathered":  # what comes after the blocks adds up a part of each
        return whole_batch.Gathered(DEPTH), dict(x=torch.randn(4, 5, 6), mask=torch.ones(4, 5))
    return huggingface(name)


def traced_in_full(model, inputs, **options):
    """The capture of a model of which every block was exported and differentiated."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("equal_blocks_of", "shorten"):
            patch.setattr(compiler, name, lambda *given: None)
        return compiler.trace(model, inputs, **options)


def assert_same_capture(found, whole) -> None:
    assert fingerprint(found.graph) == fingerprint(whole.graph) and found.ties == whole.ties
    assert output_node(found.graph).meta["roles"] == output_node(whole.graph).meta["roles"]
    for ours, theirs in zip(found.graph.nodes, whole.graph.nodes, strict=True):
        for key in ("role", "module", "phase", "source"):
            assert ours.meta.get(key) == theirs.meta.get(key), (ours, key)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [
    f"llama:hidden=32,layers={DEPTH},heads=4,kv_heads=2,ffn=64,vocab=64", "gpt2", "tied llama", "bert", "mistral",
    f"gpt:hidden=32,layers={DEPTH},heads=4,vocab=64,seq=16", "mlp:hidden=16,layers=12",
    "balances",
])  # fmt: skip
def test_unrolled_is_whole(name, monkeypatch):
    model, inputs = build(name)
    assert repeated_blocks_of(model) is not None
    before = list(model.state_dict())
    whole = traced_in_full(model, inputs)
    traced = []
    trace = compiler.trace

    def counting(*arguments, **options):
        traced.append(len(list(model.parameters())))
        return trace(*arguments, **options)

    monkeypatch.setattr(compiler, "trace", counting)
    unrolled = compiler.trace_to_plan(model, inputs, None, forms_of(model))
    assert len(traced) == 1 and traced[0] < len(list(model.parameters())) and list(model.state_dict()) == before
    assert_same_capture(unrolled, whole)
    monkeypatch.setattr(compiler, "trace", trace)
    shortened = compiler.trace(model, inputs)
    assert shortened.compact is not None
    assert_same_capture(shortened, whole)
    assert [r.path for r in shortened.guards.reads] == [r.path for r in whole.guards.reads]


@pytest.mark.parametrize("name", ["gathered", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_what_is_summed_up_after_all_blocks_is_unrolled(name):
    """Every block makes an output as well. Of a trace of few blocks the number of rows would be another."""
    model, inputs = build(name)
    before = copy.deepcopy(model)(**inputs)
    whole = traced_in_full(copy.deepcopy(model), inputs)
    to_plan = compiler.trace_to_plan(model, inputs, None, forms_of(model))
    for found in (to_plan, compiler.trace(copy.deepcopy(model), inputs)):
        assert found.compact is not None and len(found.compact.graph.nodes) < len(whole.graph.nodes)
        assert_same_capture(found, whole)
        assert found.returns.outputs == whole.returns.outputs and found.returns.names == whole.returns.names
    assert model(**inputs)["loss"] == before["loss"]  # of all layers, which transformers hooks in the first forward


class Block(nn.Module):
    def __init__(self, index: int, scale: float = 1.0):
        super().__init__()
        self.index, self.scale = index, scale
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.scale * self.linear(x).relu()


class Tall(nn.Module):
    """Nine blocks; `kind` is how they differ from a list of equal ones."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        scales = [2.0 if kind == "settings" and i == 5 else 1.0 for i in range(DEPTH)]
        self.blocks = nn.ModuleList([Block(i, scale) for i, scale in enumerate(scales)])
        if kind == "shared":
            self.blocks[6].linear.weight = self.blocks[2].linear.weight
        if kind == "frozen":
            self.blocks[5].linear.weight.requires_grad_(False)
        if kind == "hook":
            self.blocks[5].register_forward_hook(lambda block, args, output: output.tanh())
        if kind == "shape":
            self.blocks[4].linear = nn.Linear(8, 8, bias=False)
        self.others = nn.ModuleList([nn.Linear(8, 8) for _ in range(DEPTH)]) if kind == "two lists" else None

    def forward(self, x):
        kept, first = [], x.cos()
        for i, block in enumerate(self.blocks):
            x = block(x)
            if self.kind == "two lists":
                x = x + self.others[i](x)
            if self.kind == "parity" and i % 2:
                x = x.sin()
            if self.kind == "one" and i == 5:
                x = x * 2
            if self.kind == "random":
                x = nn.functional.dropout(x, 0.1 if i != 6 else 0.2)
            if self.kind == "first":
                x = x + first
            kept.append(x)
        if self.kind == "counted":
            x = x + kept[8]
        if self.kind == "returned":
            return x.square().mean(), kept[4]
        if self.kind == "all read":
            x = sum(kept)
        return x.square().mean()


KINDS = ["equal", "settings", "shared", "shape", "two lists", "parity", "counted", "all read", "first"]
IN_A_CALL = ["one", "random", "returned", "frozen", "hook"]  # what a trace of five blocks could not know of


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_what_differs_is_traced_in_full(kind):
    torch.manual_seed(0)
    model, x = Tall(kind), torch.randn(4, 8)
    whole = traced_in_full(copy.deepcopy(model), (x,))
    found = compiler.trace_to_plan(model, (x,), None, forms_of(model))
    assert fingerprint(found.graph) == fingerprint(whole.graph)
    if kind in ("settings", "shared", "shape", "two lists"):
        assert repeated_blocks_of(model) is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [*IN_A_CALL, *KINDS])
def test_what_differs_is_differentiated_in_full(kind):
    torch.manual_seed(0)
    model, x = Tall(kind), torch.randn(4, 8)
    whole, found = traced_in_full(copy.deepcopy(model), (x,)), compiler.trace(model, (x,))
    assert_same_capture(found, whole)
    assert (found.compact is not None) == (kind in ("equal", "first", "counted"))


@pytest.mark.slow
def test_plan_of_an_unrolled_graph_fits_the_model():
    import autopar

    model, inputs = build("gpt2")
    plan = autopar.plan(model, "dp=2,tp=2", inputs, hardware="cpu-gloo", baselines=False)
    plan.check_fits(traced_in_full(model, inputs).graph, plan.mesh)
