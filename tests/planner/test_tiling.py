"""Pieces are searched only where bytes may be worth them; the bound holds for both kinds of plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.api import entry as api
from autopar.errors import MemoryInfeasibleError
from autopar.hardware.profile import load
from autopar.models import build
from autopar.models.output import next_token_loss
from autopar.planner.problem.tiled import LOSS, may_save, with_tiles
from autopar.planner.spmd import fixed_recompute
from autopar.plans.plan import Plan


class Model(nn.Module):
    """Has a small vocabulary, whose logits hardly count."""

    def __init__(self, width: int = 1024, layers: int = 2):
        super().__init__()
        self.body, self.head = nn.Embedding(512, 256), nn.Linear(256, 512, bias=False)
        mlps = (nn.Sequential(nn.Linear(256, width), nn.GELU(), nn.Linear(width, 256)) for _ in range(layers))
        self.layers = nn.ModuleList(mlps)

    def forward(self, ids, labels):
        x = self.body(ids)
        for layer in self.layers:
            x = x + layer(x)
        return next_token_loss(self.head(x), labels)


def short_of_memory(tile: str):
    with torch.device("meta"):
        model, ids = Model(), torch.empty(4, 8192, dtype=torch.int64)
    return api.search(model, "dp=2", (ids, ids), hardware="h100", precision="bf16", baselines=False,
                      memory="2.05GiB", tile=tile)  # fmt: skip


def test_blocks_that_gain_nothing_are_not_searched(monkeypatch):
    searches, fastest = [], fixed_recompute.fastest
    monkeypatch.setattr(fixed_recompute, "fastest", lambda *args: searches.append(args) or fastest(*args))
    found = short_of_memory("auto")
    assert found.chosen.is_limited and not found.plan.tiled and len(searches) == 1
    assert found.plan.bound <= min(found.plan.step_seconds, short_of_memory("loss").plan.step_seconds)


def test_logits_are_worth_blocks_at_a_high_price_of_what_waits_alone():
    solver, hardware = short_of_memory("none").solver, load("h100")
    problem = with_tiles(solver.problem, hardware, (LOSS,))
    cheap = replace(solver.free, byte_seconds=0.0, saved=True)
    dear = replace(cheap, byte_seconds=1.0)
    assert not may_save(problem, hardware, cheap) and may_save(problem, hardware, dear)
    assert not may_save(problem, hardware, replace(dear, saved=False))  # the price of what stays is no price of logits


def wide_mlps(tile: str, memory: str | None = None, layers: int = 2, **options):
    with torch.device("meta"):
        model, ids = Model(16384, layers), torch.empty(1, 32768, dtype=torch.int64)
    return api.search(model, "dp=1", (ids, ids), hardware="h100", precision="bf16", baselines=False, memory=memory,
                      tile=tile, **options)  # fmt: skip


@pytest.mark.slow
def test_mlps_run_in_pieces_where_memory_is_short():
    free = wide_mlps("auto")
    tight = wide_mlps("auto", "4.5GiB")
    assert not free.plan.tiled and tight.plan.peak_bytes <= 4.5 * 2**30 < free.plan.peak_bytes
    rows = [region for region in tight.plan.tiled if not region.is_loss]
    assert [region.pieces for region in rows] == [8, 8] and rows[0].bytes_ == 2 * 32768 * 16384 * 2
    assert "in 8 pieces" in str(tight.plan) and Plan.from_json(tight.plan.to_json()) == tight.plan


@pytest.mark.slow
def test_no_plan_fits_so_little_without_pieces():
    with pytest.raises(MemoryInfeasibleError):
        wide_mlps("loss", "4.5GiB")


def test_pieces_are_priced_as_they_run():
    """The backward runs the wide ops again; every launch, write and sum of a piece has its price. Peaks fall by what is
    wide inside, and the play of the plan takes what is priced."""
    whole, tiled = wide_mlps("none"), wide_mlps("mlp")
    more = tiled.plan.step_seconds - whole.plan.step_seconds
    again = sum(region.seconds for region in tiled.plan.tiled)
    assert again < more < 1.3 * again
    runs = [run for run in tiled.live_bytes.order.runs if run.recomputed]
    assert [tiled.whole[0].vertices[run.vertex].phase for run in runs] == ["forward"] * 6  # two products in each MLP
    assert tiled.timeline.seconds == pytest.approx(tiled.plan.step_seconds, rel=0.01)
    held = whole.plan.peak_bytes - tiled.plan.peak_bytes
    assert held > 0.6 * sum(region.bytes_ for region in tiled.plan.tiled)


def test_a_refusal_tells_the_smallest_plan_with_a_loss_in_blocks_too():
    missing = {}
    for tile in ("none", "auto"):
        model, inputs = build("gpt:hidden=64,layers=1,heads=4,vocab=8192,seq=64", batch=16, seq=64)
        options = {"hardware": "cpu-gloo", "baselines": False, "fixes": False, "memory": 1e6}
        with pytest.raises(MemoryInfeasibleError) as error:
            api.search(model, "dp=2", inputs, tile=tile, **options)
        missing[tile] = error.value.missing_bytes
    assert missing["auto"] < missing["none"] / 2
