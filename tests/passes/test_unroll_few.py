"""The graph of a micro-batch that is written out from few blocks is the one that is cut from the whole graph."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from autopar import compiler
from autopar.frontend.fake_parameters import forms_of
from autopar.ir.graph import output_node, values_of
from autopar.passes.pipeline import micro_batch as passes
from tests.frontend.test_unroll import DEPTH, build


@cache
def deep(name: str):
    model, inputs = build(name)
    return compiler.trace_to_plan(model, inputs, None, forms_of(model))


def assert_same_graph(found, whole) -> None:
    for ours, theirs in zip(found.graph.nodes, whole.graph.nodes, strict=True):
        assert str((ours.name, ours.target, ours.args, ours.kwargs)) == str(
            (theirs.name, theirs.target, theirs.args, theirs.kwargs)
        )
        assert ours.meta.keys() == theirs.meta.keys(), ours
        for key in ours.meta.keys() - {"val"}:
            assert ours.meta[key] == theirs.meta[key], (ours, key)
        for a, b in zip(values_of(ours), values_of(theirs), strict=True):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype), ours
    for (name, a), (other, b) in zip(found.graph_module.named_buffers(), whole.graph_module.named_buffers()):
        assert name == other and torch.equal(a, b)
    assert (found.compact is None) == (whole.compact is None)
    if found.compact is not None:
        ours, theirs = ({key: n.name for key, n in one.compact.whole.items()} for one in (found, whole))
        assert ours == theirs


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [2, 3])  # of four samples: equal micro-batches, and one of two samples
@pytest.mark.parametrize("name", [
    f"llama:hidden=32,layers={DEPTH},heads=4,kv_heads=2,ffn=64,vocab=64", "gpt2", "tied llama", "bert", "mistral",
    f"gpt:hidden=32,layers={DEPTH},heads=4,vocab=64,seq=16",
])  # fmt: skip
def test_written_out_is_cut(name, count, monkeypatch):
    captured = deep(name)
    written, unrolled = [], passes._unrolled
    monkeypatch.setattr(passes, "_unrolled", lambda *given: written.append(unrolled(*given)) or written[-1])
    found = passes.micro_batch(captured, count)
    assert written[0] is not None and len(written[0]) == len(set(found.sizes))
    monkeypatch.setattr(passes, "_unrolled", lambda *given: None)
    whole = passes.micro_batch(captured, count)
    assert_same_graph(found.captured, whole.captured)
    if found.smaller is not None:
        assert_same_graph(found.smaller, whole.smaller)
    assert (found.joins, found.total_inputs, found.input_dims) == (whole.joins, whole.total_inputs, whole.input_dims)
    totals = [str(one.totals.graph) if one.totals is not None else "" for one in (found, whole)]
    assert totals[0] == totals[1]


def test_what_blocks_have_of_their_own_is_cut_from_the_whole_graph():
    """Every block of one model gives an output, every one of the other draws random numbers."""
    gathered = deep("gathered")
    assert gathered.compact is not None and passes.micro_batch(gathered, 2).joins
    assert passes._unrolled(gathered, [passes.few_blocks(gathered, 2)]) is None
    model, inputs = build("gpt2")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    dropout = compiler.trace_to_plan(model, inputs, None, forms_of(model))
    assert dropout.compact is not None
    assert passes._unrolled(dropout, [passes.few_blocks(dropout, 2)]) is None


def test_a_node_that_reads_another_is_not_written_out():
    captured = deep(f"llama:hidden=32,layers={DEPTH},heads=4,kv_heads=2,ffn=64,vocab=64")
    few = passes.few_blocks(captured, 2)
    small = few.captured.graph_module
    assert passes._unrolled(captured, [few]) is not None
    op = next(
        n for n in reversed(small.graph.nodes) if len(n.all_input_nodes) == 2 and n is not output_node(small.graph)
    )
    op.args = (op.all_input_nodes[1], op.all_input_nodes[0], *op.args[2:])
    assert passes._unrolled(captured, [few]) is None
