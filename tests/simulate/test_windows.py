"""Attention within a window, as transformers' models and users write it: the op has the window, nothing of all pairs is
left, and a step equals one device's to 1e-10 however the sequence is cut."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers as hf

from autopar import compiler
from autopar.ops import autopar
from autopar.rules.reading import bound
from autopar.simulate.compare import verify_model

from ..helpers.attention_kinds import Model, inputs_of
from ..helpers.sequences import VOCABULARY
from .test_sequence import OPEN, WithLoss

LENGTH, WINDOW = 20, 5
EXACT, ROUNDED = 1e-10, 1e-6  # of Gemma, whose norms and softmax are in fp32
SIZES = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=32, head_dim=8, use_cache=False)  # fmt: skip
FAMILIES = {
    "Mistral": dict(sliding_window=WINDOW),
    "Gemma2": dict(sliding_window=WINDOW, query_pre_attn_scalar=8, attn_implementation="eager"),
    "Gemma3Text": dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]),
    "ModernBert": dict(local_attention=2 * WINDOW, global_attn_every_n_layers=2, pad_token_id=0, cls_token_id=1),
}
WINDOWS = {"Mistral": [(True, WINDOW)] * 2, "Gemma2": [(True, WINDOW), (True, 0)],
           "Gemma3Text": [(True, WINDOW), (True, 0)], "ModernBert": [(False, 0), (False, WINDOW + 1)]}  # fmt: skip
MESHES = [("dp=2", "ddp"), ("tp=2", "megatron_sp"), ("cp=2", "all_gather_kv"), ("cp=2", "ring"), ("cp=2", "ulysses")]


def family(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return a small model of transformers in fp64, and inputs."""
    torch.manual_seed(0)
    config = getattr(hf, f"{name.removesuffix('Text')}{'TextConfig' if name.endswith('Text') else 'Config'}")
    others = ("head_dim", "use_cache", "num_key_value_heads") if name == "ModernBert" else ()
    sizes = {name: of for name, of in (SIZES | OPEN).items() if name not in others}
    task = "ForMaskedLM" if name == "ModernBert" else "ForCausalLM"
    model = getattr(hf, f"{name.removesuffix('Text')}{task}")(config(**sizes | FAMILIES[name])).double().train()
    ids = torch.randint(2, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    return model, dict(input_ids=ids, labels=ids.clone())


def attentions(captured) -> list[tuple[bool, int]]:
    """Return of every attention whether it is causal, and its window."""
    nodes = captured.graph.find_nodes(op="call_function", target=autopar.attention.default)
    return [(bound(n)["causal"], bound(n)["window"]) for n in nodes]


def pairs(graph) -> list:
    """Return the nodes that have a number for every pair of places."""
    return [n for n in graph.nodes if tuple(getattr(n.meta.get("val"), "shape", ())[-2:]) == (LENGTH, LENGTH)]


@pytest.mark.parametrize("name", FAMILIES)
def test_models_of_a_library(name):
    captured = compiler.trace(*family(name))
    assert attentions(captured) == WINDOWS[name] and not pairs(captured.graph)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name, at", itertools.product(FAMILIES, MESHES))
def test_steps_of_models(name, at):
    model, inputs = family(name)
    mesh, strategy = at
    report = verify_model(WithLoss(model), inputs, mesh, strategy=strategy)
    most = ROUNDED if name.startswith("Gemma") else EXACT
    assert report.match and max(report.errors.values()) <= most, report


class Within(Model):
    """Attention under a mask that a user writes: both sides of a query, or one beside padding on the left."""

    def mask(self, kind, input_ids, attention_mask):
        place = torch.arange(input_ids.shape[1])
        behind = place[:, None] - place
        if kind == "both":
            return behind.abs() < WINDOW
        if kind == "left":
            return (behind >= 0) & (behind < WINDOW) & attention_mask[:, None, None, :].bool()
        return super().mask(kind, input_ids, attention_mask)


CUTS = [
    ("cp=2", "all_gather_kv"),
    ("cp=3", "ring"),
    ("cp=4", "ring"),
    ("cp=2", "ulysses"),
    ("cp=2,up=2", "ring+ulysses"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind, at, length", itertools.product(("both", "left"), CUTS, (16, 13)))
def test_masks_of_users(kind, at, length):
    """Blocks of a ring are in front of the queries, behind them, or beyond the window."""
    mesh, strategy = at
    report = verify_model(Within((kind,), 12, 6), inputs_of(kind, length), mesh, strategy=strategy)
    assert report.match and max(report.errors.values()) <= EXACT, report


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["all_gather_kv", "ring"])
def test_windows_beside_zigzag(strategy):
    """Rows in zigzag are two ranges of queries; a ring has its windows in plain blocks."""
    model, pin = Within(("causal", "window", "both"), 8, 4), {"input_ids": "cp:Z(1)"}
    report = verify_model(model, inputs_of("both", 16), "cp=2", strategy=strategy, pin=pin)
    assert report.match and max(report.errors.values()) <= EXACT, report
    schemes = [one.scheme for one in report.plan.attentions]
    assert all("in zigzag" in scheme for scheme in schemes) == (strategy == "all_gather_kv"), schemes
