"""Losses in blocks are searched only where bytes of logits may be worth it; the bound holds for both kinds of plans."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from autopar.api import entry as api
from autopar.hardware.profile import load
from autopar.models.output import next_token_loss
from autopar.planner.problem.tiled_loss import may_save, with_tiled_losses
from autopar.planner.spmd import fixed_recompute


class Model(nn.Module):
    """Has a small vocabulary, whose logits hardly count."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Embedding(512, 256), nn.Linear(256, 512, bias=False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in "ab")

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
    problem = with_tiled_losses(solver.problem, hardware)
    cheap = replace(solver.free, byte_seconds=0.0, saved=True)
    dear = replace(cheap, byte_seconds=1.0)
    assert not may_save(problem, hardware, cheap) and may_save(problem, hardware, dear)
    assert not may_save(problem, hardware, replace(dear, saved=False))  # the price of what stays is no price of logits
