"""Plans and explanations say to which keys an attention attends."""

from __future__ import annotations

import pytest

import autopar
from autopar.planner.spmd.attention_text import attention_text

from ..helpers.sequences import Decoder, Packed, batch, packed_batch
from ..runtime.parity import planned


def test_a_plan_says_that_documents_are_packed(tmp_path):
    plan = planned(Packed("causal", 4, 2), "cp=2", packed_batch(8, 0, 3), strategy="ring")
    said = "documents packed into rows: an attention reads their numbers instead of a mask of all pairs"
    assert plan.packed == 1 and said in str(plan)
    plan.save(tmp_path / "plan.json")
    read = autopar.Plan.load(tmp_path / "plan.json")
    assert read == plan and str(read) == str(plan)
    other = planned(Decoder("causal", 4, 2), "cp=2", batch(8), strategy="ring")
    assert other.packed == 0 and "documents" not in str(other)


@pytest.mark.parametrize("kind, model, text", [
    ("causal", Decoder, "keys up to the query's own"), ("full", Decoder, "all keys"),
    ("window", Decoder, "keys up to the query's own, of these the last 3"),
    ("causal", Packed, "keys up to the query's own, keys of the query's document"),
    ("padded", Packed,
     "keys up to the query's own, keys of the query's document, what a mask (2, 1, 1, 8) says"),
])  # fmt: skip
def test_an_attention_says_what_it_attends_to(kind, model, text):
    inputs = packed_batch(8, 0, 3) if model is Packed else batch(8)
    graph = autopar.compiler.trace(model(kind, 4, 2), inputs).graph
    nodes = graph.find_nodes(op="call_function", target=autopar.ops.autopar.attention.default)
    assert [attention_text(node) for node in nodes] == [text]


def test_explanations_have_it():
    found = autopar.explain(Packed("causal", 4, 2), "attention", "cp=2", packed_batch(8, 0, 3), hardware="cpu-gloo",
                            alternatives=1)  # fmt: skip
    assert "attends to keys up to the query's own, keys of the query's document" in str(found)
