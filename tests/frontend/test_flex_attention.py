"""flex_attention is what torch computes, output and all gradients, on one device and with the sequence cut; what its
functions say is found where it can be, and functions of more than numbers are refused."""

from __future__ import annotations

import random

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn.attention import flex_attention as flex

from autopar.compiler import trace
from autopar.errors import CaptureError
from autopar.ops import autopar
from autopar.simulate import step
from autopar.simulate.oracle import global_values


def causal(b, h, i, j):
    return i >= j


def strictly(b, h, i, j):  # nothing is open to the first query
    return i > j


def window(b, h, i, j):
    return (i >= j) & (i - j < 3)


def both_sides(b, h, i, j):
    return (i - j).abs() < 4


def prefix(b, h, i, j):
    return (j < 5) | (i >= j)


def by_head(b, h, i, j):
    return (i >= j) & ((h % 2 == 0) | (i - j < 3))


def documents(ids, b, h, i, j):
    return (i >= j) & (ids[b, i] == ids[b, j])


def one_after_the_other(ids, b, h, i, j):
    return ids[b][i] == ids[b][j + 0]


def padded(ids, b, h, i, j):
    return (i >= j) & (ids[b, j] < 3)  # numbers grow: what is on the right is closed


def capped(ids, bias, score, b, h, i, j):
    return 20.0 * torch.tanh(score / 20.0)


def alibi(ids, bias, score, b, h, i, j):
    return score + torch.exp2(-(h + 1.0)) * (j - i)


def learned(ids, bias, score, b, h, i, j):
    return score + bias[h, (i - j).clamp(-8, 8) + 8]


def scaled(ids, bias, score, b, h, i, j):
    return torch.where(i == j, 2.0 * score, score)


def closing(ids, bias, score, b, h, i, j):
    return torch.where((i >= j) & (ids[b, i] == ids[b, j]), score, float("-inf"))


OF_NUMBERS = {documents, one_after_the_other, padded}
MASKS = (None, causal, strictly, window, both_sides, prefix, by_head, documents, one_after_the_other, padded)
SCORES = (None, capped, alibi, learned, scaled, closing)


class Model(nn.Module):
    """Attention of grouped heads. `by_torch`: with the functions mapped by torch's own vmap, and written-out products,
    whose gradients are autograd's (flex_attention has none on a CPU)."""

    def __init__(self, mask, score, heads=4, kv_heads=2, by_torch=False):
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.kv_heads, self.by_torch, self.mask, self.score = heads, kv_heads, by_torch, mask, score
        self.qkv = nn.Linear(16, 8 * (heads + 2 * kv_heads), bias=False)
        self.bias = nn.Parameter(torch.randn(heads, 17))
        self.double()

    def forward(self, x, ids):
        sizes = [8 * self.heads, 8 * self.kv_heads, 8 * self.kv_heads]
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in self.qkv(x).split(sizes, -1))
        mask, score = self.mask, None
        if mask in OF_NUMBERS:
            mask = lambda b, h, i, j: self.mask(ids, b, h, i, j)  # noqa: E731
        if self.score is not None:
            score = lambda x, b, h, i, j: self.score(ids, self.bias, x, b, h, i, j)  # noqa: E731
        b, s = x.shape[:2]
        if self.by_torch:
            y = by_torch(q, k, v, mask, score)
        else:
            blocks = flex.create_block_mask(mask, b, self.heads, s, s, device=x.device) if mask else None
            y = flex.flex_attention(q, k, v, score_mod=score, block_mask=blocks, enable_gqa=True)
        return y.pow(3).sum() + 0.0 * self.bias.sum()


def by_torch(q, k, v, mask, score):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    b, h, s, t = scores.shape
    places = [torch.arange(size) for size in (b, h, s, t)]
    if score is not None:
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

        with TransformGetItemToIndex():
            scores = flex._vmap_for_bhqkv(score, prefix=(0,))(scores, *places)
    if mask is not None:
        scores = scores.masked_fill(~flex.create_mask(mask, b, h, s, t, device="cpu"), float("-inf"))
    closed = scores.isneginf().all(-1, keepdim=True)
    return scores.masked_fill(closed, 0.0).softmax(-1).masked_fill(closed, 0.0) @ v


def inputs_of(length: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = (torch.rand(2, length, generator=generator) < 0.3).cumsum(-1) - 1
    return {"x": torch.randn(2, length, 16, dtype=torch.float64, generator=generator), "ids": ids.clamp_min(0)}


def test_the_oracle_is_torchs_flex_attention():
    """Its outputs, that is: torch has no backward of it on CPUs."""
    inputs = inputs_of(16, 0)
    for mask in MASKS:
        for score in SCORES:
            with torch.no_grad():
                mine = Model(mask, score, by_torch=True)(**inputs)
                flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
                try:
                    torch.testing.assert_close(mine, Model(mask, score)(**inputs), rtol=1e-10, atol=1e-10)
                finally:
                    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = False


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", [None, *range(5)])
def test_gradients_are_those_of_all_pairs(seed):
    seed = random.randrange(2**32) if seed is None else seed
    print(f"seed {seed}")
    drawn = random.Random(seed)
    for mask in MASKS:
        score, length = drawn.choice(SCORES), drawn.choice((7, 8, 12, 13))
        strategy = drawn.choice((None, "all_gather_kv", "ring", "ulysses"))
        size = 2 if strategy == "ulysses" else drawn.choice((1, 2, 3))
        assert_same(mask, score, length, f"cp={size}", strategy, seed)


def assert_same(mask, score, length, mesh, strategy, seed):
    model, inputs = Model(mask, score), inputs_of(length, seed % 1000)
    plan, captured = step.plan_and_capture(model, mesh, inputs, hardware="cpu-gloo", baselines=False, strategy=strategy)
    found = step.simulate_step(captured, plan, global_values(captured, model, inputs))
    twin = Model(mask, score, by_torch=True)
    twin.load_state_dict(model.state_dict())
    twin(**inputs).backward()
    for name, parameter in twin.named_parameters():
        error = (found.gradients[name] - parameter.grad).norm() / (1 + parameter.grad.norm())
        assert error <= 1e-10, (mask, score, length, mesh, strategy, name, error)


@pytest.mark.parametrize("mask, score, says", [
    (causal, None, {"causal": True}), (window, None, {"causal": True, "window": 3}),
    (both_sides, None, {"window": 4}), (documents, None, {"causal": True, "documents": True}),
    (causal, capped, {"causal": True, "softcap": 20.0}),
])  # fmt: skip
def test_what_functions_say_needs_no_tensor_of_all_pairs(mask, score, says):
    graph = trace(Model(mask, score), ((), inputs_of(16, 0))).graph
    (node,) = [n for n in graph.nodes if n.target is autopar.attention.default]
    given = {a.name: x for a, x in zip(node.target._schema.arguments, node.args)} | node.kwargs
    assert given["mask"] is None
    assert bool(given.get("causal")) == says.get("causal", False)
    assert given.get("window", 0) == says.get("window", 0) and given.get("softcap", 0.0) == says.get("softcap", 0.0)
    assert (given.get("documents") is not None or given.get("q_documents") is not None) == ("documents" in says)


@pytest.mark.parametrize("score", SCORES)
def test_a_query_without_keys_gets_nothing(score):
    assert_same(strictly, score, 6, "cp=2", None, 0)


@pytest.mark.parametrize("mask, of", [
    (lambda b, h, i, j: torch.stack([i, j]).amin() >= j, "stack"),
    (lambda b, h, i, j: (i + j).cumsum(0) > 3, "cumsum"),
    (lambda b, h, i, j: torch.arange(8) > i, "gt"),
    (lambda b, h, i, j: i.add_(1) > j, "add_"),
    (lambda b, h, i, j: torch.ones(3, dtype=torch.bool), "not a number"),
])  # fmt: skip
def test_functions_of_more_than_numbers_are_refused(mask, of):
    with pytest.raises(CaptureError, match=of) as raised:
        trace(Model(mask, None), ((), inputs_of(8, 0)))
    assert "flex_attention" in str(raised.value) and raised.value.fix


def test_blocks_without_a_function_are_refused():
    class Blocks(Model):
        def forward(self, x, ids):
            q, k, v = self.qkv(x).reshape(2, 256, 8, 8).transpose(1, 2).split([4, 2, 2], 1)
            numbers = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
            blocks = flex.BlockMask.from_kv_blocks(*numbers, compute_q_blocks=False)
            return flex.flex_attention(q, k, v, block_mask=blocks, enable_gqa=True).sum()

    with pytest.raises(CaptureError, match="without a mask function"):
        trace(Blocks(None, None), ((), inputs_of(256, 0)))


def test_compiled_with_a_mask_of_before():
    """torch.compile(flex_attention) and a BlockMask that all calls share, as its documentation has them."""
    compiled = torch.compile(flex.flex_attention)
    shared = flex.create_block_mask(window, None, None, 16, 16, device="cpu")

    class Shared(Model):
        def forward(self, x, ids):
            q, k, v = self.qkv(x).unflatten(-1, (-1, 8)).transpose(1, 2).split([4, 2, 2], 1)
            return compiled(q, k, v, block_mask=shared, enable_gqa=True).sum()

    graph = trace(Shared(None, None), ((), inputs_of(16, 0))).graph
    (node,) = [n for n in graph.nodes if n.target is autopar.attention.default]
    assert node.args[3:5] == (None, True) and node.args[-1] == 3


@pytest.mark.parametrize("padding", [False, True])
def test_a_model_of_transformers(padding):
    sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2)  # fmt: skip
    ids = torch.randint(32, (2, 16), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "labels": ids}
    if padding:
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][0, 11:] = 0
    gradients = []
    for attention in ("flex_attention", "sdpa"):  # its norms compute in fp32: both are cut alike
        torch.manual_seed(0)
        config = hf.LlamaConfig(**sizes, attn_implementation=attention, use_cache=False)
        model = hf.LlamaForCausalLM(config).double()
        plan, captured = step.plan_and_capture(model, "cp=2", inputs, hardware="cpu-gloo", baselines=False)
        gradients.append(step.simulate_step(captured, plan, global_values(captured, model, inputs)).gradients)
    for name, gradient in gradients[1].items():
        assert (gradients[0][name] - gradient).norm() <= 1e-10 * (1 + gradient.norm()), name
