"""Whole models with their default dropout: a sharded step draws and learns what one device running autopar does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar import compiler
from autopar.frontend.fake_parameters import forms_of
from autopar.ir.graph import fingerprint
from autopar.ops.streams import stream_of
from autopar.planner.problem.symmetry import fold
from autopar.planner.problem.vertices import vertices_of
from autopar.simulate.compare import verify_model
from autopar.simulate.oracle import global_values
from autopar.simulate.step import plan_and_capture, simulate_step

from ..runtime import tiny


def convnext():
    """Drop-path: whole samples of a branch."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    torch.manual_seed(0)
    config = ConvNextConfig(
        patch_size=4, num_stages=2, hidden_sizes=[8, 12], depths=[1, 1], drop_path_rate=0.3, num_labels=3
    )
    return ConvNextForImageClassification(config), dict(
        pixel_values=torch.randn(6, 3, 16, 16), labels=torch.arange(6) % 3
    )


CASES = {
    "gpt2": lambda: tiny.gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, n_layer=1),
    "bert": lambda: tiny.bert(dropout=0.1, layers=1),
    "convnext": convnext,
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name, mesh, strategy", [
    ("gpt2", "dp=2,tp=2", "fsdp"), ("gpt2", "dp=2,tp=2", "megatron_sp"), ("bert", "dp=3", "auto"),
    ("convnext", "tp=2", "megatron"), ("convnext", "dp=2", "ddp"),
])  # fmt: skip
def test_one_step(name, mesh, strategy):
    model, inputs = CASES[name]()
    report = verify_model(model.train(), inputs, mesh, strategy=strategy)
    draws = [n for n in report.plan.sharding.nodes if n.startswith(("dropout", "uniform"))]
    assert draws and report.match, str(report)
    if name == "gpt2":
        split = [n for n in draws if report.plan.sharding.nodes[n].outputs[0].sharding_axes]
        assert split, "no mask was sharded"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.first, self.second = nn.Linear(8, 8), nn.Dropout(0.2), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.second(self.linear(self.first(x)).relu())


class Tall(nn.Module):
    def __init__(self, depth: int = 9):
        super().__init__()
        self.drop, self.blocks, self.head = (
            nn.Dropout(0.1),
            nn.ModuleList([Block() for _ in range(depth)]),
            nn.Linear(8, 1),
        )

    def forward(self, x):
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def test_unrolled_blocks_draw_from_streams_of_their_own():
    model, inputs = Tall(), (torch.randn(4, 8),)
    whole = compiler.trace(model, inputs)
    unrolled = compiler.trace_to_plan(model, inputs, None, forms_of(model))
    assert fingerprint(whole.graph) == fingerprint(unrolled.graph)
    streams = [stream_of(n) for n in unrolled.graph.nodes if stream_of(n) is not None]
    assert streams[:19] == list(range(19)) and sorted(streams[19:]) == list(range(2, 19))  # x needs no gradient


def test_planning_ties_the_masks_of_equal_blocks():
    """Stream numbers differ from block to block and change no price."""
    vertices, uses = vertices_of(compiler.trace(Tall(6), (torch.randn(4, 8),)).graph)
    folded = fold(vertices, uses)
    masks = [folded[v.index] for v in vertices if v.kind == "op" and v.node.target is torch.ops.autopar.dropout.default]
    assert len(masks) == 2 * 13 - 2 and len(set(masks)) < 20


def test_recomputed_blocks_draw_the_same_masks():
    model, inputs = Tall(4), (torch.randn(4, 8),)
    options = {"strategy": "ddp", "hardware": "cpu-gloo", "baselines": False}
    plan, captured = plan_and_capture(model, "dp=2", inputs, **options)
    again, captured = plan_and_capture(model, "dp=2", inputs, **options, recompute="full")
    assert {"blocks.1", "blocks.2"} <= set(again.recomputed)
    values = global_values(captured, model, inputs)
    steps = [simulate_step(captured, p, values) for p in (plan, again)]
    dropouts = [sum(stream_of(n) is not None for n in s.programs[0].parts.backward.graph.nodes) for s in steps]
    assert dropouts[1] > dropouts[0]
    for name, gradient in steps[0].gradients.items():
        assert torch.equal(gradient, steps[1].gradients[name]), name
