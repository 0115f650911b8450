"""Tensor parallelism as its authors draw it comes out of the search: column then row, two all-reduces a block and
phase.

Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3. Blocks are found by meta["module"] in the lowered graph;
outside of them are embedding, last norm and loss.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from autopar import compiler
from autopar.compiler import lower
from autopar.ir.block_order import block_of

from .planning import captured, counts, make, toy

COLUMN, ROW = "tp:S(0)", "tp:S(1)"  # weights are (out, in)
SLOW = toy(
    flops=1e9, memory=1e10, latency=1e-4
)  # where a collective costs a wait, one all-reduce beats gather and scatter
FAST = toy(flops=1e10, memory=1e10, latency=1e-9)
GPT = "gpt:hidden=64,layers=2,heads=4,vocab=256,seq=32"
LLAMA = "llama:hidden=64,layers=2,heads=4,kv_heads=2,ffn=192,vocab=256,seq=32"


def hugging_face_gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=256, n_positions=32, resid_pdrop=0,
                                     embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)  # fmt: skip
    ids = torch.zeros(4, 32, dtype=torch.long)
    return compiler.trace(transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids})


def collectives_of_blocks(graph, plan) -> dict[tuple[str, str], list]:
    """Return by (block, phase) the collectives that one rank runs there."""
    found: dict[tuple[str, str], list] = {}
    for node in lower(graph, plan, 0, check=True).local.graph.nodes:
        collective = node.meta.get("collective")
        block = block_of(node.meta.get("module", "")) if collective else ""
        if block:
            found.setdefault((block, collective.phase), []).append(collective)
    return found


def mlp(strategy: str | None = "megatron", pin: dict[str, str] | None = None):
    """Three blocks without biases; 3 times 3 rows are too few to cut over 4 devices, so only tensors can be."""
    dear = toy(flops=1e9, memory=1e10, latency=1e-5, link=1e9)
    return make("mlp:hidden=64,layers=3,bias=false", "tp=4", dear, batch=3, seq=3, strategy=strategy, pin=pin or {})


@pytest.fixture(scope="module")
def pinned() -> dict[tuple[str, str], float]:
    """Step seconds of the MLP with both weights of its blocks pinned, in all four ways."""
    return {
        (up, down): mlp(pin={"*.up.weight": up, "*.down.weight": down}).step_seconds
        for up, down in itertools.product((COLUMN, ROW), repeat=2)
    }


def test_column_then_row_is_the_best_of_four(pinned):
    assert min(pinned, key=pinned.get) == (COLUMN, ROW)
    assert sorted(pinned.values())[1] > 1.05 * pinned[COLUMN, ROW]


def test_mlp_has_one_all_reduce_a_block_and_phase(pinned):
    """Forward: one for each of three blocks. Backward: one for the gradient of each block's input, which the first
    lacks, as its input is data."""
    plan = mlp()
    assert counts(plan, "forward") == {"all_reduce": 3} and counts(plan, "backward") == {"all_reduce": 2}
    assert plan.step_seconds <= pinned[COLUMN, ROW] * 1.001
    for i in range(3):
        assert plan.layouts[f"blocks.{i}.up.weight"] == COLUMN and plan.layouts[f"blocks.{i}.down.weight"] == ROW


def test_free_search_finds_column_then_row(pinned):
    """Without a strategy, with data that every device has whole."""
    whole = {"x": "R", "target": "R"}
    plan = mlp(None, whole)
    assert plan.step_seconds <= pinned[COLUMN, ROW] * 1.001
    for up, down in itertools.product((COLUMN, ROW), repeat=2):
        other = mlp(None, whole | {"*.up.weight": up, "*.down.weight": down})
        assert plan.step_seconds <= other.step_seconds * 1.001


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["gpt", "llama", "hugging face gpt2"])
def test_transformer_block_has_two_all_reduces_a_phase(name):
    graph = hugging_face_gpt2() if name == "hugging face gpt2" else captured(GPT if name == "gpt" else LLAMA, 4, 32)
    plan = make(graph, "tp=2", SLOW, strategy="megatron")
    found = collectives_of_blocks(graph, plan)
    assert len(found) == 4
    for here, collectives in found.items():
        assert Counter(c.kind for c in collectives) == {"all_reduce": 2}, here
        assert all(c.wire_bytes == 4 * 32 * 64 * 4 for c in collectives), here
    weights = {k: v for k, v in plan.layouts.items() if ".0." in k and k.endswith("weight")}
    column, row = ("tp:S(1)", "tp:S(0)") if name == "hugging face gpt2" else (COLUMN, ROW)  # Conv1D stores (in, out)
    for key, layout in weights.items():
        if "c_attn" in key:  # query, key and value in one: cut inside of each
            assert layout == column.replace(")", "/3)")
        elif any(part in key for part in ("c_fc", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            assert layout == column, key
        elif any(part in key for part in ("c_proj", "o_proj", "down_proj")):
            assert layout == row, key


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", [GPT, LLAMA])
@pytest.mark.parametrize("strategy", ["megatron", "megatron_sp"])
def test_a_block_sends_what_two_all_reduces_send(model, strategy):
    """An all-reduce may be split into reduce-scatter and all-gather where waiting is free; the bytes stay."""
    graph = captured(model, 4, 32)
    plan = make(graph, "tp=2", FAST, batch=4, seq=32, strategy=strategy)
    all_reduce_bytes = 4 * 32 * 64 * 4  # 2 (n - 1) / n times batch, sequence, hidden, fp32
    for here, collectives in collectives_of_blocks(graph, plan).items():
        sent = sum(c.wire_bytes for c in collectives if c.wire_bytes > all_reduce_bytes / 8)  # others are of norms
        assert sent == pytest.approx(2 * all_reduce_bytes, rel=0.02), here


def test_sequence_parallelism_scatters_and_gathers():
    """Korthikanti et al., arXiv 2205.05198: no all-reduce of an activation is left in a block."""
    graph = captured(LLAMA, 4, 32)
    plan = make(graph, "tp=2", FAST, strategy="megatron_sp")
    for (block, phase), collectives in collectives_of_blocks(graph, plan).items():
        large = Counter(c.kind for c in collectives if c.wire_bytes > 4 * 32 * 64)
        looked_up = (block, phase) == ("layers.0", "forward")  # which the first norm scatters
        assert large == {"all_gather": 2, "reduce_scatter": 2 + looked_up}, (block, phase)
