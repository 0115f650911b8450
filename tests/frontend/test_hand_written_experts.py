"""Loops over experts as people write them are captured, and compute what they do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.errors import CaptureError
from autopar.ir.graph import is_op
from autopar.ops import autopar
from autopar.rules.expert_rows import PRODUCTS
from autopar.simulate import step
from autopar.simulate.compare import verify_plan

HIDDEN, EXPERTS, ACTIVE = 6, 4, 2


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(HIDDEN, 10), nn.Linear(HIDDEN, 10, bias=False)
        self.w2 = nn.Linear(10, HIDDEN)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Mixture(nn.Module):
    """Tokens (B, S, H) through a loop over experts, `loop(self, tokens, weights, chosen)`."""

    def __init__(self, loop, active: int = ACTIVE):
        super().__init__()
        torch.manual_seed(0)
        self.loop, self.active = loop, active
        self.gate = nn.Linear(HIDDEN, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 10) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 10, HIDDEN) / 3)
        self.double()

    def forward(self, x):
        tokens = torch.tanh(x).reshape(-1, HIDDEN)
        weights, chosen = self.gate(tokens).softmax(-1).topk(self.active, dim=-1)
        return (x + self.loop(self, tokens, weights, chosen).view_as(x)).square().mean()


def mistral(self, tokens, weights, chosen):
    results = torch.zeros_like(tokens)
    for i, expert in enumerate(self.experts):
        token, slot = torch.where(chosen == i)
        results[token] += weights[token, slot, None] * expert(tokens[token])
    return results


def old_mixtral(self, tokens, weights, chosen):
    final = torch.zeros(tokens.shape, dtype=tokens.dtype, device=tokens.device)
    mask = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
    for number in range(EXPERTS):
        slot, token = torch.where(mask[number])
        if token.shape[0] == 0:
            continue
        state = tokens[None, token].reshape(-1, HIDDEN)
        rows = self.experts[number](state) * weights[token, slot, None]
        final.index_add_(0, token, rows.to(tokens.dtype))
    return final


def places_by_nonzero(self, tokens, weights, chosen):
    y = torch.zeros_like(tokens)
    for i, expert in enumerate(self.experts):
        places = (chosen == i).nonzero()
        if places.numel() > 0:
            token, slot = places[:, 0], places[:, 1]
            y.index_add_(0, token, expert(tokens[token]) * weights[token, slot].unsqueeze(-1))
    return y


def masks_of_tokens(self, tokens, weights, chosen):
    y = torch.zeros_like(tokens)
    for i, expert in enumerate(self.experts):
        mask = (chosen == i).any(dim=-1)
        if mask.any():
            weight = (weights * (chosen == i)).sum(-1)
            y[mask] += expert(tokens[mask]) * weight[mask].unsqueeze(-1)
    return y


def stacked_parameters(self, tokens, weights, chosen):
    y = torch.zeros_like(tokens)
    for i in range(EXPERTS):
        token, slot = torch.where(chosen == i)
        rows = F.gelu(tokens[token] @ self.up[i]) @ self.down[i]
        y.index_add_(0, token, rows * weights[token, slot, None])
    return y


def one_of_them(self, tokens, weights, chosen):
    """Switch: a token has one expert, whose rows are set."""
    chosen, y = chosen.squeeze(-1), torch.zeros_like(tokens)
    for i, expert in enumerate(self.experts):
        mask = chosen == i
        y[mask] = expert(tokens[mask])
    return y * weights


def few_of_them(self, tokens, weights, chosen):
    """Tokens of the last expert get nothing."""
    y = torch.zeros_like(tokens)
    for i, expert in enumerate(list(self.experts)[:-1]):
        token, slot = torch.where(chosen == i)
        rows = expert(tokens[token])
        rows *= weights[token, slot, None]
        y[token] += rows
    return y


def through_a_view(self, tokens, weights, chosen):
    y = torch.zeros_like(tokens).view(2, -1, HIDDEN)
    rows = y.view(-1, HIDDEN)
    for i, expert in enumerate(self.experts):
        token, slot = torch.where(chosen == i)
        rows[token] += expert(tokens[token]) * weights[token, slot, None]
    return y


def of_three_dims(self, tokens, weights, chosen):
    tokens, weights, chosen = (t.view(4, 3, -1) for t in (tokens, weights, chosen))
    y = torch.zeros_like(tokens)
    for i, expert in enumerate(self.experts):
        sample, place, slot = torch.where(chosen == i)
        y[sample, place] += expert(tokens[sample, place]) * weights[sample, place, slot, None]
    return y


LOOPS = [
    mistral, old_mixtral, places_by_nonzero, masks_of_tokens, stacked_parameters, one_of_them, few_of_them,
    through_a_view, of_three_dims,
]  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
def test_a_loop_is_one_grouped_computation(loop):
    torch.manual_seed(1)
    model, given = Mixture(loop, 1 if loop is one_of_them else ACTIVE), (torch.randn(4, 3, HIDDEN).double(),)
    strategy = "expert" if loop is stacked_parameters else "ddp"
    plan, captured = step.plan_and_capture(
        model, "ep=2", given, hardware="cpu-gloo", baselines=False, strategy=strategy
    )
    products = [n for n in captured.graph.nodes if is_op(n) and n.target is autopar.grouped_mm.default]
    assert 2 <= len([n for n in products if n.meta["phase"] == "forward"]) <= 3
    assert any(n.target in PRODUCTS for n in captured.graph.nodes)
    report = verify_plan(captured, plan, model, given)
    assert max(report.errors.values()) <= 1e-10, (report.errors, report.diverging)
    if loop is stacked_parameters:
        assert plan.layouts["up"] == plan.layouts["down"] == "ep:S(0)"


def counted(self, tokens, weights, chosen):
    y = torch.zeros_like(tokens)
    for i, expert in enumerate(self.experts):
        token, slot = torch.where(chosen == i)
        y[token] += expert(tokens[token]) / token.shape[0]
    return y


def normed(self, tokens, weights, chosen):
    y = torch.zeros_like(tokens)
    for i, expert in enumerate(self.experts):
        token, slot = torch.where(chosen == i)
        y[token] += expert(tokens[token]).mean(0)
    return y


def one_other(self, tokens, weights, chosen):
    y = torch.zeros_like(tokens)
    for i, expert in enumerate(self.experts):
        token, slot = torch.where(chosen == i)
        y[token] += expert(tokens[token]) if i else tokens[token] * 2
    return y


def places_of_a_changed_mask(self, tokens, weights, chosen):
    y, wanted = torch.zeros_like(tokens), weights > 0.3
    for i, expert in enumerate(self.experts):
        mask = chosen == i
        mask &= wanted
        token, slot = torch.where(mask)
        y[token] += expert(tokens[token]) * weights[token, slot, None]
    return y


def numbers_changed_meanwhile(self, tokens, weights, chosen):
    y, masks = torch.zeros_like(tokens), [chosen == i for i in range(EXPERTS)]
    chosen.clamp_(0, 1)
    for mask, expert in zip(masks, self.experts):
        token, slot = torch.where(mask)
        y[token] += expert(tokens[token])
    return y


def tokens_changed_before_the_result_is_read(self, tokens, weights, chosen):
    tokens = tokens.clone()
    y = few_of_them(self, tokens, weights, chosen)
    tokens.mul_(0.5)
    return y + tokens


def rows_changed_in_place(self, tokens, weights, chosen):
    y = torch.zeros_like(tokens)
    for i, expert in enumerate(self.experts):
        token, slot = torch.where(chosen == i)
        rows = expert(tokens[token])
        rows.relu_()
        y[token] += rows
    return y


def rows_of_two_names(self, tokens, weights, chosen):
    y = torch.zeros_like(tokens)
    for i, expert in enumerate(self.experts):
        token, slot = torch.where(chosen == i)
        rows = same = expert(tokens[token])
        rows *= 2
        y[token] += same
    return y


def rows_of_a_part(self, tokens, weights, chosen):
    y = torch.zeros_like(tokens)
    for i, expert in enumerate(self.experts):
        token, slot = torch.where(chosen == i)
        rows = expert(tokens[token])
        part = rows.unsqueeze(1)
        part *= 2
        y[token] += rows
    return y


def rows_of_the_result(self, tokens, weights, chosen):
    y = tokens.clone()
    for i, expert in enumerate(self.experts):
        token, slot = torch.where(chosen == i)
        y[token] += expert(y[token])
    return y


WRITTEN = [
    places_of_a_changed_mask, numbers_changed_meanwhile, tokens_changed_before_the_result_is_read,
    rows_changed_in_place, rows_of_two_names, rows_of_a_part, rows_of_the_result,
]  # fmt: skip


class Alone(nn.Module):
    """Returns what a loop has added up."""

    def __init__(self):
        super().__init__()
        self.layer = Mixture(mistral)

    def forward(self, x):
        weights, chosen = self.layer.gate(x).softmax(-1).topk(ACTIVE)
        return mistral(self.layer, x, weights, chosen)


def test_a_result_that_the_model_returns():
    model, x = Alone(), torch.randn(6, HIDDEN).double()

    def loss(y):
        return y.square().sum()

    plan, captured = step.plan_and_capture(model, "dp=2", (x,), hardware="cpu-gloo", baselines=False, loss_fn=loss)
    report = verify_plan(captured, plan, model, (x,), loss)
    assert max(report.errors.values()) <= 1e-10, (report.errors, report.diverging)


@pytest.mark.parametrize("loop", [counted, normed, one_other, *WRITTEN], ids=lambda f: f.__name__)
def test_what_mixes_rows_or_writes_to_what_is_read_is_refused(loop):
    with pytest.raises(CaptureError, match="loop over experts|could not be traced|depend on the values"):
        step.plan_and_capture(Mixture(loop), "ep=2", (torch.randn(4, 3, HIDDEN).double(),), hardware="cpu-gloo")
