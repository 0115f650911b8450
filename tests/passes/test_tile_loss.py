"""A loss without logits: found where a loss alone reads them, right on every mesh, chosen where memory is short."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.api import entry as api
from autopar.compiler import lower, trace
from autopar.errors import PlanIncompatible, StrategyError
from autopar.models import build
from autopar.models.output import Output, next_token_loss
from autopar.plans.plan import Plan
from autopar.plans.tiled import TiledRegion
from autopar.rules.loss_regions import loss_regions, unmade_outputs
from autopar.simulate.oracle import global_values
from autopar.simulate.step import plan_and_capture, simulate_step
from tests.helpers import kept

CPU = dict(hardware="cpu-gloo", baselines=False)


class Head(nn.Module):
    """The end of a language model. `kind` says what else happens to the logits."""

    def __init__(self, kind: str = "", hidden: int = 6, vocabulary: int = 13):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.body = nn.Embedding(vocabulary, hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=kind == "bias")
        if kind == "tied":
            self.head.weight = self.body.weight
        if kind == "frozen":
            self.head.weight.requires_grad_(False)

    def forward(self, ids, labels):
        logits = self.head(torch.tanh(self.body(ids)))
        if self.kind == "softcap":
            logits = 3 * torch.tanh(logits / 3)
        options = {"label_smoothing": 0.1} if self.kind == "smoothing" else {}
        if self.kind == "sum":
            options["reduction"] = "sum"
        if self.kind == "weights":
            options["weight"] = torch.arange(1.0, logits.shape[-1] + 1, dtype=logits.dtype)
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=3, **options)
        if self.kind == "read twice":
            loss = loss + logits.square().mean()
        return Output(loss, logits) if self.kind == "output" else loss


def call(rows: int = 6, length: int = 5, vocabulary: int = 13):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(0, vocabulary, (rows, length), generator=generator) for _ in range(2))


@pytest.mark.parametrize("kind", ["", "tied", "output", "sum"])
def test_regions(kind):
    (region,) = loss_regions(trace(Head(kind), call()).graph)
    assert region.hidden == 6 and region.linear.meta["module"] == "head"


@pytest.mark.parametrize("kind", ["bias", "softcap", "smoothing", "read twice", "frozen"])
def test_what_keeps_its_logits(kind):
    assert not loss_regions(trace(Head(kind), call()).graph)
    with pytest.raises(StrategyError, match="no last linear layer"):
        api.search(Head(kind), "tp=2", call(), tile="loss", **CPU)


def simulated(model, inputs, mesh, strategy=None, precision="fp32", **options):
    plan, captured = plan_and_capture(
        model, mesh, inputs, strategy=strategy, precision=precision, tile="loss", **CPU | options
    )
    assert plan.tiled and not any("vocab_loss" in str(n.target) for n in lower(captured, plan, 0).local.graph.nodes)
    return plan, captured, simulate_step(captured, plan, global_values(captured, model, inputs))


MESHES = [
    ("dp=2", "ddp"), ("dp=4", "fsdp"), ("tp=2", "megatron"), ("tp=3", "megatron_sp"), ("dp=2,tp=2", None),
    ("dp=2,tp=3", "megatron"), ("tp=4", None),
]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["", "tied", "output", "sum", "weights"])
@pytest.mark.parametrize("mesh, strategy", MESHES)
def test_gradients_are_those_of_eager(mesh, strategy, kind):
    """In fp64, with sizes that no mesh divides, and labels that are left out."""
    model, inputs = Head(kind).double(), call(rows=5)
    _, captured, step = simulated(model, inputs, mesh, strategy)
    found = model(*inputs)
    loss = found.loss if kind == "output" else found
    loss.backward()
    torch.testing.assert_close(step.loss, loss.detach(), rtol=1e-12, atol=1e-12)
    if kind == "output":
        torch.testing.assert_close(step.outputs[1], found.logits.detach(), rtol=1e-12, atol=1e-12)
        assert unmade_outputs(captured.graph, [r.linear.name for r in loss_regions(captured.graph)]) == {"1"}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(step.gradients[name], parameter.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("text, mesh, strategy", [
    ("llama-tiny:layers=1", "dp=2,tp=2", None),
    pytest.param("gpt2-tiny:layers=1,vocab=131", "dp=2,tp=3", "megatron_sp", marks=pytest.mark.slow),
])  # fmt: skip
def test_numbers_are_those_of_whole_logits(text, mesh, strategy):
    """Models, in bf16, and bytes sent."""
    model, inputs = build(text, batch=4, seq=8, device="cpu")
    plan, captured, step = simulated(model, inputs, mesh, strategy, "bf16", hardware="h100")
    whole = simulate_step(captured, replace(plan, tiled=()), global_values(captured, model, inputs))
    assert step.bytes_sent == whole.bytes_sent and step.collectives == whole.collectives
    torch.testing.assert_close(step.loss, whole.loss, rtol=1e-6, atol=1e-6)
    for name, gradient in whole.gradients.items():
        torch.testing.assert_close(step.gradients[name], gradient, rtol=2e-2, atol=2e-3)


def test_micro_batches_keep_logits_that_are_an_output():
    """Each of them cuts its own loss into blocks; outputs of all of them are joined, which needs them made."""
    assert api.plan(Head(), "dp=2", call(rows=4), tile="loss", micro_batches=2, **CPU).tiled
    with pytest.raises(StrategyError, match="no last linear layer"):
        api.plan(Head("output"), "dp=2", call(rows=4), tile="loss", micro_batches=2, **CPU)


class Large(nn.Module):
    """A vocabulary that outweighs the rest; on the meta device."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Embedding(65536, 256), nn.Linear(256, 65536, bias=False)

    def forward(self, ids, labels):
        return next_token_loss(self.head(self.body(ids)), labels)


@pytest.fixture(scope="module")
def large():
    with torch.device("meta"):
        ids = torch.empty(4, 8192, dtype=torch.int64)
        return Large(), (ids, ids)


def large_plan(large, **options) -> Plan:
    return kept.plan(large[0], "dp=2", large[1], hardware="h100", precision="bf16", baselines=False, **options)


def test_it_is_chosen_where_memory_is_short(large):
    free = large_plan(large)
    assert not free.tiled
    tight = large_plan(large, memory="6GiB")
    (loss,) = tight.tiled
    assert loss.layer == "head" and loss.bytes_ == 2 * 8192 * 65536 * 2
    assert tight.peak_bytes < 6 * 2**30 < free.peak_bytes
    asked = large_plan(large, tile="loss")
    assert 0 < asked.tiled[0].seconds <= asked.step_seconds - free.step_seconds + 1e-6
    assert "in blocks" in str(tight) and "in blocks" not in str(free)
    assert Plan.from_json(tight.to_json()) == tight


def test_a_plan_for_another_layer_is_refused():
    plan, captured = plan_and_capture(Head(), "tp=2", call(), tile="loss", **CPU)
    odd = replace(plan, tiled=(TiledRegion("linear_dx", "head", 0.0, 0.0),))
    with pytest.raises(PlanIncompatible, match="no last layer"):
        odd.check_fits(captured.graph, plan.mesh)
