"""Plans name the scheme of each attention, its pairs and bytes; explanations also what the other schemes would cost."""

from __future__ import annotations

import itertools
import random
import types

import pytest
import torch

import autopar
from autopar import compiler, models
from autopar.api import entry as api
from autopar.ir.layout import ZIGZAG, Layout
from autopar.ir.mesh import Mesh
from autopar.ops import autopar as ops
from autopar.planner.spmd.attention_schemes import pairs
from autopar.view.report import report_page

from ..helpers import kept
from ..helpers.attention_kinds import HEADS as KINDS_HEADS
from ..helpers.attention_kinds import Model, inputs_of
from ..helpers.sequences import Decoder, Mixed, batch
from ..runtime.parity import planned
from .test_sequence import HEADS, KV_HEADS, LAYERS, LENGTH, SAMPLES, WIDTH, inputs, llama


def attention_of(kind: str, length: int):
    graph = compiler.trace(Decoder(kind, 4, 2), batch(length)).graph
    return next(iter(graph.find_nodes(op="call_function", target=ops.attention.default)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind, size, length", itertools.product(("causal", "full", "window"), (2, 3, 4), (12, 16, 7)))
def test_pairs_are_those_that_a_mask_opens(kind, size, length):
    """Rows dealt out to devices in blocks or in zigzag, the second axis cuts samples or heads: pairs are counted one by
    one."""
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    mesh, node, dim = Mesh.parse(f"cp={size},x=2"), attention_of(kind, length), rng.choice((0, 1))
    zigzag = length % (2 * size) == 0 and rng.random() < 0.5
    dims = [(), (), ("cp",), ()]
    dims[dim] = ("x",)
    query = Layout(tuple(dims), parts=(1, 1, ZIGZAG if zigzag else 1, 1))
    strategy = types.SimpleNamespace(inputs=(query,) * 4)
    open_ = torch.ones(length, length)
    rows = {"causal": open_.tril(), "full": open_, "window": open_.tril().triu(-2)}[kind]
    block = length // (2 * size) if zigzag else -(-length // size)
    held = [
        [*range(r * block, (r + 1) * block), *range(length - (r + 1) * block, length - r * block)]
        if zigzag
        else range(min(r * block, length), min((r + 1) * block, length))
        for r in range(size)
    ]
    counted = [(2 * 4 // 2) * rows[list(of)].sum().item() for of in held]  # of two samples and four heads half
    assert pairs(node, strategy, mesh) == (max(counted), sum(counted) / size)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy, mesh, scheme", [
    ("all_gather_kv", "cp=2", "all_gather_kv over cp"), ("ring", "cp=4", "ring over cp"),
    ("ulysses", "cp=2", "ulysses over cp"), ("ring+ulysses", "cp=2,up=2", "ring over cp + ulysses over up"),
    ("ring+megatron_sp", "cp=2,tp=2", "ring over cp + heads over tp"), ("ddp", "cp=2", "whole"),
])  # fmt: skip
def test_schemes_have_the_names_of_strategies(strategy, mesh, scheme):
    pin = {"input_ids": "cp:S(1)"} if "cp" in scheme else {}
    plan = planned(llama(), mesh, inputs(), strategy=strategy, pin=pin)
    (found,) = plan.attentions  # two equal ones
    assert (found.copies, found.scheme) == (LAYERS, scheme) and f"{scheme} " in str(plan)
    assert found.name == "model.layers.*.self_attn"


def test_meshes_without_a_sequence_say_nothing():
    plan = planned(llama(), "dp=2,tp=2", inputs(), strategy="megatron_sp")
    assert not plan.attentions and "most / mean" not in str(plan) and "attentions" not in plan.to_json()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("strategy", ["ring", "all_gather_kv", "ulysses"])
def test_bytes_are_those_of_the_formula(strategy, micro_batches):
    """Forward and backward; keys and values may be moved once more for the backward."""
    size, item = 2, 4
    plan = planned(llama(), f"cp={size}", inputs(), strategy=strategy, micro_batches=micro_batches)
    (found,) = plan.attentions
    keys = LAYERS * 2 * SAMPLES * LENGTH * KV_HEADS * WIDTH * (size - 1) / size * item
    queries = keys / KV_HEADS * HEADS
    if strategy == "ulysses":
        assert 0 <= found.sent_bytes - 2 * (queries + keys) / size <= keys / size
    elif strategy == "all_gather_kv":
        assert 0 <= found.sent_bytes - 2 * keys <= keys
    else:
        # keys forward; backward those or their gradients, in zigzag both, of which the first half is sent one way
        blocks = 2.5 if "in zigzag" in found.scheme else 2
        exchanged = sum(c.wire_bytes for c in plan.collectives if c.kind == "all_to_all")
        assert found.sent_bytes == blocks * keys == exchanged


def test_the_balance_of_blocks_and_of_a_zigzag():
    """The last of P devices has 2 - 1 / P times the mean in blocks, all as much in zigzag."""
    length = {"input_ids": batch(128)["input_ids"], "labels": batch(128)["labels"]}
    model = llama(1)
    found = {
        pin: planned(model, "cp=4", length, strategy="ring", pin={"input_ids": pin}).attentions[0].balance
        for pin in ("cp:S(1)", "cp:Z(1)")
    }
    assert found["cp:S(1)"] == pytest.approx(2 - 1 / 4, rel=0.01) and found["cp:Z(1)"] == 1.0


def test_attentions_that_differ_have_a_line_each():
    plan = planned(Mixed("full", 4, 2), "cp=2", batch(16), strategy="all_gather_kv")
    assert sorted(one.balance for one in plan.attentions)[0] == 1.0 and len(plan.attentions) == 2


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_attention_that_stays_written_out_is_listed(strategy):
    """Its keys and values are gathered for the products, forward and backward, and their gradients scattered."""
    length, size, item = 12, 2, 8
    model = Model(("squared",), *KINDS_HEADS["gqa"])
    plan = planned(model, f"cp={size}", inputs_of("squared", length), strategy=strategy)
    (found,) = plan.attentions
    rows = [c.wire_bytes for c in plan.collectives if c.kind in ("all_gather", "reduce_scatter")]
    labels = 2 * length * (size - 1) // size * item
    assert found.scheme == "all_gather_kv over cp, written out" and found.balance == 1.0
    assert found.sent_bytes == sum(rows) - labels
    assert found.pairs == 2 * 8 * length * length / size


@pytest.fixture(scope="module")
def searched():
    options = dict(hardware="h100", strategy="ring+zero1", name="llama", baselines=True)
    return api.search(*built(), **options, cache=kept.captures())


def built():
    model, tokens = models.build("llama:hidden=512,layers=2,heads=8,kv_heads=2,ffn=1024,vocab=512", batch=1, seq=4096,
                                 device="meta")  # fmt: skip
    return model, "cp=4", tokens


def test_the_text_of_a_plan(searched, golden):
    golden(str(searched.plan))


def test_explanations_price_the_other_schemes(searched, golden):
    """Each is the plan that is found if its strategy is asked for."""
    explanation = autopar.explain(searched, "attention", alternatives=1)
    golden(str(explanation))
    rows = {row.text.split()[0]: row.step_seconds for row in explanation.schemes}
    assert set(rows) == {"all_gather_kv", "ulysses"}
    for name, seconds in rows.items():
        alone = kept.plan(*built(), hardware="h100", baselines=False, strategy=f"{name}+zero1")
        assert seconds == pytest.approx(alone.step_seconds, rel=0.02)


def test_schemes_without_a_plan_say_why():
    explanation = autopar.explain(llama(), "attention", "cp=16", inputs(), strategy="all_gather_kv", alternatives=1,
                                  hardware="cpu-gloo", cache=kept.captures())  # fmt: skip
    (without,) = [row for row in explanation.schemes if row.note]
    assert "8 of queries and 2 of keys" in without.note and f"  {without.text}: " in str(explanation)


def test_plan_files_and_reports_have_it(searched, tmp_path):
    plan = searched.plan
    plan.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json") == plan and plan.attentions
    page = report_page(searched)
    assert all(text in page for text in ("most / mean", plan.attentions[0].scheme, "pairs of a device"))
