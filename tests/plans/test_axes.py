"""A plan says of an axis what it carries: nothing, or something else than its name promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar.errors import StrategyError
from autopar.models import build
from autopar.plans.axes import BATCH, carried, unsharded_lines
from autopar.utils.format import ms
from tests.runtime import tiny

NAMES = ("dp", "fsdp", "data", "tp", "cp", "sp", "ep", "other")


class Small(nn.Module):
    """A layer of odd sizes, so that an axis of two devices can only cut the batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))

    def forward(self, x):
        return self.layer(x).square().mean()


def plan(mesh: str, samples: int, **options):
    return autopar.plan(Small(), mesh, (torch.randn(samples, 1),), hardware="cpu-gloo", baselines=False, **options)


@settings(max_examples=5, deadline=None)
@given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True), st.booleans())
def test_every_axis_is_told_of(names, is_cut):
    """With strategy ddp the batch is cut over all axes, where it can be; a batch of one is whole, and then nothing is
    cut."""
    mesh, samples = ",".join(f"{name}=2" for name in names), 4 if is_cut else 1
    found = plan(mesh, samples, strategy="ddp")
    text = str(found)
    for name in names:
        assert (BATCH in carried(found)[name]) == is_cut
        assert (f"axis {name} carries nothing: its 2 devices all do the same" in text) == (not is_cut)
        assert (f"axis {name} carries the batch" in text) == (is_cut and name in ("ep", "cp", "sp"))
    if not is_cut:
        with pytest.raises(StrategyError, match="would carry nothing") as caught:
            plan(mesh, samples, strategy="ddp", strict=True)
        assert "mesh" in caught.value.fix or "one device" in caught.value.fix


def test_experts_have_no_axis_of_their_own():
    """The name ep gives an axis nothing, in a model without experts and in one with them."""
    model, batch = tiny.own("mlp:layers=2,hidden=256", 4096)
    text = str(autopar.plan(model, "dp=2,ep=2", batch, hardware="cpu-gloo", baselines=False))
    assert "axis ep carries" in text and ("nothing" in text or "no part of experts" in text)
    assert "axis dp" not in text


def test_inside_of_stages():
    model, batch = tiny.own("mlp:layers=4,hidden=16", 8)
    found = autopar.plan(model, "pp=2,cp=2", batch, hardware="cpu-gloo", baselines=False)
    assert "axis cp carries" in str(found) and "axis pp" not in str(found)
    with pytest.raises(StrategyError, match="axis dp would carry nothing"):
        autopar.plan(Small(), "pp=2,dp=2", (torch.randn(1, 1),), hardware="cpu-gloo", strategy="ddp", strict=True)


def test_a_model_too_small_to_shard_says_why():
    model, inputs = build("mlp-tiny", batch=8, seq=64)
    found = autopar.plan(model, "dp=2,tp=2", inputs, hardware="l40s", optimizer="none")  # no update to share
    line = next(line for line in str(found).splitlines() if line.startswith("neither batch nor parameters are sharded"))
    best = min((a for a in found.alternatives if a.step_seconds), key=lambda a: a.step_seconds)
    more = best.communication_seconds - found.communication_seconds
    assert f": {best.name}, the next fastest, saves " in line and f"adds {ms(more)} of communication" in line
    assert unsharded_lines(replace(found, alternatives=()))[0].endswith("less than its collectives take")
    cut = replace(plan("dp=2", 4, strategy="ddp"), strategy="auto")  # the batch is
    assert not unsharded_lines(replace(found, strategy="ddp")) and not unsharded_lines(cut)
