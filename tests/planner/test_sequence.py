"""Strategies that cut the sequence: the roles of axes, what is sent, and what is refused."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import transformers as hf

import autopar
from autopar import models
from autopar.errors import StrategyError
from autopar.ir.mesh import Mesh
from autopar.planner.problem.recipes import Restriction, may_cut_sequence
from autopar.rules.layers import QUERY_HEADS

from ..helpers import kept
from ..helpers.sequences import batch
from ..runtime.parity import planned

LAYERS, HEADS, KV_HEADS, WIDTH, SAMPLES, LENGTH = 2, 8, 2, 4, 2, 16


def llama(layers: int = LAYERS) -> hf.LlamaForCausalLM:
    return hf.LlamaForCausalLM(hf.LlamaConfig(
        vocab_size=24, hidden_size=HEADS * WIDTH, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=32,
        bos_token_id=None, eos_token_id=None,
    ))  # fmt: skip


def sent(plan, phase: str, kind: str) -> float:
    return sum(c.wire_bytes for c in plan.collectives if (c.phase, c.kind) == (phase, kind))


def inputs():
    found = batch(LENGTH, samples=SAMPLES)
    return {name: found[name] for name in ("input_ids", "labels")}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [2, 4])
def test_gathered_keys_send_what_the_formula_says(size):
    """2 N d_kv (P - 1) / P elements a layer forward, as much of gradients, and at most as much again backward."""
    plan = planned(llama(), f"cp={size}", inputs(), strategy="all_gather_kv")
    keys = LAYERS * 2 * SAMPLES * LENGTH * KV_HEADS * WIDTH * (size - 1) // size * 4
    labels = SAMPLES * LENGTH * (size - 1) // size * 8
    assert sent(plan, "forward", "all_gather") == keys + labels
    assert sent(plan, "backward", "reduce_scatter") == keys
    assert sent(plan, "backward", "all_gather") <= keys
    assert all(layout == "R" for name, layout in plan.layouts.items() if name.endswith("weight"))
    assert plan.layouts["input_ids"] == "cp:S(1)" and "its name gives it no part" not in str(plan)


def test_exchanged_heads_send_what_the_formula_says():
    """(2 d_q + 2 d_kv) N / P (P - 1) / P elements a layer and direction; backward keys and values at most once more."""
    plan, size = planned(llama(), "cp=2", inputs(), strategy="ulysses"), 2
    row_bytes = LAYERS * 2 * WIDTH * SAMPLES * LENGTH / size * (size - 1) / size * 4
    assert sent(plan, "forward", "all_to_all") == (HEADS + KV_HEADS) * row_bytes
    assert 0 <= sent(plan, "backward", "all_to_all") - (HEADS + KV_HEADS) * row_bytes <= KV_HEADS * row_bytes


@pytest.mark.parametrize("mesh, strategy, roles, sharded", [
    ("dp=2,cp=4", "all_gather_kv", ["data", "sequence"], ()),
    ("cp=2,x=2", "ulysses", ["sequence, heads in attention", "data"], ()),
    ("x=2,y=2", "all_gather_kv", ["data", "sequence"], ()),
    ("dp=2,cp=2,tp=2", "all_gather_kv+megatron_sp", ["data", "sequence", "tensor with sequence"], ("tp",)),
    ("dp=2,cp=2,tp=2", "all_gather_kv+megatron+fsdp", ["data", "sequence", "tensor"], ("dp", "cp", "tp")),
    ("dp=2,cp=2", "ulysses+zero1", ["data", "sequence, heads in attention"], ("dp", "cp")),
    ("cp=2", "all_gather_kv+fsdp", ["sequence"], ("cp",)),
    ("dp=2,cp=2", "all_gather_kv+ddp", ["data", "sequence"], ()),
    ("dp=2,cp=4", "ring", ["data", "sequence, keys go round"], ()),
    ("dp=2,cp=2,up=2", "ring+ulysses", ["data", "sequence, keys go round", "sequence, heads in attention"], ()),
])  # fmt: skip
def test_roles(mesh, strategy, roles, sharded):
    found = Restriction.of(strategy, Mesh.parse(mesh))
    assert [*found.roles.values()] == roles and found.sharded_axes == sharded and found.name == strategy
    assert {*found.whole_axes} == {*found.roles} - {*sharded} and list(found.roles) == list(Mesh.parse(mesh).names)


@pytest.mark.parametrize("mesh, strategy", [
    ("cp=2", "all_gather_kv+megatron"), ("cp=2", "ulysses+hsdp"), ("dp=2,cp=2", "fsdp+ulysses"),
    ("cp=4", "ring+ulysses"), ("dp=2,cp=2", "ulysses+"), ("dp=2,cp=2", "all_gather_kv+none"),
])  # fmt: skip
def test_what_does_not_go_together(mesh, strategy):
    with pytest.raises(StrategyError, match="as two strategies"):
        Restriction.of(strategy, Mesh.parse(mesh))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kv_heads, size", [(8, 2), (8, 4), (2, 4)])
def test_long_sequences_are_cut_without_a_strategy(kv_heads, size):
    """One sample has no batch to cut. A causal attention that is cut along its queries is cut in zigzag, and then takes
    about as long as one cut by heads."""
    model = f"llama:hidden=1024,layers=1,heads=8,kv_heads={kv_heads},ffn=2048,vocab=1024,seq=16384"
    made, tokens = models.build(model, batch=1, seq=16384, device="meta")

    def plan(strategy):
        return kept.plan(made, f"cp={size}", tokens, strategy=strategy, hardware="h100", precision="bf16",
                         baselines=False)  # fmt: skip

    free, gathered, ring = plan(None), plan("all_gather_kv"), plan("ring")
    values = [node.outputs[0].dims for node in free.sharding.nodes.values() if node.outputs]
    assert any(len(dims) == 3 and dims[1] == ("cp",) for dims in values)
    assert _of_attention(gathered) == {"s/zigzag"} and _of_attention(ring) == {"ring/zigzag"}
    assert gathered.layouts["input_ids"] == "cp:Z(1)" and "cp:Z(2)" in str(gathered)
    assert f"in zigzag over cp: of {2 * size} blocks device r has r and {2 * size - 1} - r" in str(ring)
    assert free.step_seconds <= min(gathered.step_seconds, ring.step_seconds)
    if kv_heads % size == 0:
        exchanged = plan("ulysses")
        assert free.step_seconds <= exchanged.step_seconds
        assert gathered.compute_seconds == pytest.approx(exchanged.compute_seconds, rel=0.06)
    else:
        assert _of_attention(free) <= {"s/zigzag", "ring/zigzag", QUERY_HEADS}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv_heads, size, length, hardware", itertools.product(
    (8, 2, 1), (2, 4, 8), (4096, 16384, 65536), ("h100", "rtx4090")))  # fmt: skip
def test_no_scheme_is_faster(kv_heads, size, length, hardware):
    """A free plan takes, by the played clock, no longer than the best scheme that there are heads for."""
    text = f"llama:hidden=1024,layers=1,heads=8,kv_heads={kv_heads},ffn=2048,vocab=1024,seq={length}"
    made, tokens = models.build(text, batch=1, seq=length, device="meta")
    options = dict(hardware=hardware, precision="bf16", baselines=False)
    free = kept.plan(made, f"cp={size}", tokens, **options)
    schemes = []
    for strategy in ("all_gather_kv", "ring", "ulysses"):
        with contextlib.suppress(StrategyError):  # fewer heads than devices
            schemes.append(kept.plan(made, f"cp={size}", tokens, strategy=strategy, **options).step_seconds)
    assert len(schemes) >= 2 and free.step_seconds <= min(schemes) * (1 + 1e-9)


def _of_attention(plan) -> set[str]:
    return {node.choice[0] for name, node in plan.sharding.nodes.items() if "attention" in name}


def test_plan_files_keep_zigzag(tmp_path):
    plan = planned(llama(1), "cp=2", inputs(), strategy="ring", pin={"input_ids": "cp:Z(1)"})
    plan.save(tmp_path / "plan.json")
    read = autopar.Plan.load(tmp_path / "plan.json")
    assert read.sharding == plan.sharding and str(read) == str(plan) and "cp:Z(1)" in str(read)


def test_where_zigzag_is_looked_at():
    """Zigzag is looked at where a sequence may be cut: every op between inputs and an attention has more ways then."""
    asked = [("dp=2,tp=2", None, 2), ("dp=4", None, 2), ("cp=2", None, 2), ("dp=2,cp=2", "fsdp", 2),
             ("dp=2,cp=2", "ring+fsdp", 2), ("cp=2", "ulysses", 2), ("cp=2,up=2", "ring+ulysses", 2)]  # fmt: skip
    found = [may_cut_sequence(strategy, Mesh.parse(mesh), samples) for mesh, strategy, samples in asked]
    assert found == [False, True, True, False, True, True, True]


def test_lengths_that_zigzag_cannot_cut():
    """Without 2 P equal blocks the sequence is in plain blocks, and a pin says that it cannot be otherwise."""
    given = batch(15, samples=SAMPLES)
    given = {name: given[name] for name in ("input_ids", "labels")}
    assert _of_attention(planned(llama(1), "cp=2", given, strategy="ring")) == {"ring"}
    with pytest.raises(StrategyError, match="no layout of input_ids follows the pin"):
        planned(llama(1), "cp=2", given, strategy="ring", pin={"input_ids": "cp:Z(1)"})


def test_too_few_heads():
    with pytest.raises(StrategyError, match="among cp=16: 8 of queries and 2 of keys"):
        planned(llama(1), "cp=16", inputs(), strategy="ulysses")
    with pytest.raises(StrategyError, match="among cp=4, tp=4: 8 of queries and 2 of keys"):
        planned(llama(1), "cp=4,tp=4", inputs(), strategy="ulysses+megatron")
