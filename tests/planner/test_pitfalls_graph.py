"""Pitfalls met on real graphs, one test each: what the captured graph must look like for the planner to do well."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import fx

from autopar import compiler, rules
from autopar.cost.compute import flops_of
from autopar.ir.graph import is_op, tensor_arguments, values_of
from autopar.ir.mesh import Mesh

from .planning import captured, counts, make, toy

transformers = pytest.importorskip("transformers")
aten, autopar = torch.ops.aten, torch.ops.autopar
FLAT_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
BATCH, SEQ = 4, 16  # a batch that no axis of 8 divides
RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


def trace(kind: str):
    """A Hugging Face language model, as its users have it."""
    sizes = {"bos_token_id": 0, "eos_token_id": 0, "vocab_size": 64}
    if kind == "gpt2":
        sizes |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, n_positions=SEQ, **sizes)
        )
    else:
        sizes |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=32, **sizes))
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long)
    return compiler.trace(model, {"input_ids": ids, "labels": ids})


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def graph(request) -> fx.Graph:
    return trace(request.param).graph


def nodes(graph: fx.Graph, *targets) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function" and n.target in targets]


def shardable(node: fx.Node, dim: int, ways: int) -> bool:
    """Return whether some strategy of an op cuts this dim of its first output `ways` ways."""
    shapes = [a.meta["val"].shape for a in tensor_arguments(node)], [v.shape for v in values_of(node)]
    options = rules.strategies(rules.rule_of(node), *shapes, Mesh.parse(f"a={ways}"))
    return any(s.outputs[0].dims[dim] == ("a",) for s in options)


def test_linears_keep_batch_and_sequence_apart(graph):
    """1: with (batch, sequence) merged, 4 times 16 rows could not be cut by sequence over 8. GPT-2's Conv1D
    included."""
    assert not nodes(graph, *FLAT_PRODUCTS)
    linears = nodes(graph, autopar.linear.default, autopar.linear_dx.default)
    assert len(linears) >= 8 and all(n.args[0].meta["val"].shape[:2] == (BATCH, SEQ) for n in linears)
    assert all(shardable(n, 1, 8) and not shardable(n, 0, 8) for n in linears)


def test_sequence_is_cut_where_the_batch_cannot_be():
    """1, in a plan: 8 devices, a batch of 4."""
    plan = make(
        captured("gpt:hidden=32,layers=1,heads=4,vocab=64,seq=64", BATCH, 64), "a=8", toy(flops=1e8, memory=1e10)
    )
    plan_nodes = plan.sharding.nodes
    linears = [n for name, n in plan_nodes.items() if name.startswith("linear") and "dw" not in name]
    assert sum(n.outputs[0].dims[1] == ("a",) for n in linears) >= len(linears) / 2


def test_no_op_falls_back_to_a_form_that_cannot_be_sharded(graph):
    """2: products, attention, embedding and loss are canonical, every op has a rule."""
    names = Counter(str(n.target) for n in graph.nodes if n.op == "call_function")
    assert not [n for n in names if "log_softmax" in n or "nll_loss" in n or "scaled_dot" in n or "index_put" in n]
    assert not [n for n in graph.nodes if is_op(n) and values_of(n) and rules.rule_of(n) is None]


def test_loss_of_sharded_vocabulary(graph):
    """3: cut by vocabulary, the row maximum is partial by max, both sums by sum, and the logits stay where they are."""
    mesh = Mesh.parse("a=2")
    (loss,), (largest,) = nodes(graph, autopar.vocab_loss.default), nodes(graph, aten.amax.default)
    for node, reduction in ((loss, "sum"), (largest, "max")):
        shapes = [a.meta["val"].shape for a in tensor_arguments(node)], [v.shape for v in values_of(node)]
        cut = [s for s in rules.strategies(rules.rule_of(node), *shapes, mesh) if s.inputs[0].dims[-1] == ("a",)]
        assert [{o.partial for o in s.outputs} for s in cut] == [{(("a", reduction),)}]


def test_loss_of_sharded_vocabulary_in_a_plan():
    """3: with the head cut by vocabulary nothing of the logits' size is sent."""
    plan = make(captured("gpt:hidden=32,layers=1,heads=4,vocab=4096,seq=16,tied=false", BATCH), "a=2",
                toy(flops=1e8, memory=1e10), pin={"lm_head.weight": "a:S(0)", "input_ids": "R"})  # fmt: skip
    assert max(c.wire_bytes / c.count for c in plan.collectives) < BATCH * SEQ * 4096 * 4 / 8
    assert counts(plan, "forward")["all_reduce"] >= 3


def test_constant_mask_becomes_causal(graph):
    """8: libraries build a (batch, 1, S, S) mask that depends on no input."""
    (attention,) = nodes(graph, autopar.attention.default)
    mask, causal = attention.args[3:5]
    assert mask is None and causal is True


def test_repeated_heads_are_folded_into_attention():
    """10: keys and values are saved with their own 2 heads, not with the 4 of the queries."""
    (attention,) = nodes(trace("llama").graph, autopar.attention.default)
    assert [a.meta["val"].shape[1] for a in attention.args[:3]] == [4, 2, 2]


def test_nothing_is_left_that_changes_nothing(graph):
    """11: every slice, view, clone and cast changes a shape or a type."""
    assert not nodes(graph, aten.alias.default, aten.detach.default, aten._assert_tensor_metadata.default)
    for node in nodes(
        graph, aten.slice.Tensor, aten.clone.default, aten._to_copy.default, aten.expand.default, *RESHAPES
    ):
        before, after = node.args[0].meta["val"], node.meta["val"]
        assert (before.shape, before.dtype) != (after.shape, after.dtype), node


def test_views_of_views_are_one(graph):
    """12: in a chain of views the same move could sit at every link."""
    assert not [n for n in nodes(graph, *RESHAPES) if n.args[0] in nodes(graph, *RESHAPES)]


def test_attention_has_flops(graph):
    """18: two products forward and five backward, half of each under the causal mask."""
    (forward,), (backward,) = nodes(graph, autopar.attention.default), nodes(graph, autopar.attention_bw.default)
    one_product = 2 * BATCH * 32 * SEQ * SEQ  # batch, heads times head dim, queries, keys
    assert flops_of(forward) == 2 * one_product / 2 and flops_of(backward) == 5 * one_product / 2
