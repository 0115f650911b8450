"""Inputs that require a gradient: what passes through a compiled model to what computed them, however they are
passed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import autopar
from autopar.errors import StageError
from autopar.simulate.compare import verify_model
from tests.helpers import gloo

from . import tiny
from .parity import assert_close, assert_same_gradients, device_mesh, full, pair, planned


class Scorer(nn.Module):
    """x (B, 6), y (B, 6) -> scores (B,), or a loss beside them."""

    def __init__(self, loss: bool = False, frozen: bool = False):
        super().__init__()
        torch.manual_seed(2)
        self.up, self.down, self.loss = nn.Linear(6, 12), nn.Linear(12, 1), loss
        self.requires_grad_(not frozen)

    def forward(self, x, y):
        scores = self.down(torch.tanh(self.up(x)) * torch.tanh(self.up(2 * y))).squeeze(-1)
        return {"loss": scores.sigmoid().mean(), "scores": scores} if self.loss else scores


def batch(size: int = 8):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 6, generator=generator), torch.randn(size, 6, generator=generator)


def leaf(tensor):
    return tensor.detach().clone().requires_grad_()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "dp=2,tp=2", "dp=3"])
@pytest.mark.parametrize("strategy", [None, "fsdp", "megatron"])
def test_simulated(mesh, strategy):
    x, y = batch(7)
    for model, example in ((Scorer(True), (leaf(x), y)), (Scorer(frozen=True), (leaf(x), leaf(y)))):
        report = verify_model(model, example, mesh, strategy=strategy)
        assert report.match, str(report)
        assert {"input args[0]"} <= report.gradient_errors.keys()


def test_each_kind_of_call(alone):
    """The inputs that have a gradient are a part of a call's form; nothing has one under no_grad."""
    x, y = batch()
    parallel, reference = pair(Scorer(), alone, (x, y))
    for make in (
        lambda: (x, y),
        lambda: (leaf(x), y),
        lambda: (x, leaf(y)),
        lambda: (leaf(x), leaf(y)),
        lambda: [leaf(x)] * 2,
    ):
        mine, whole = make(), make()
        for _ in range(2):
            full(parallel(*mine)).square().sum().backward()
            reference(*whole).square().sum().backward()
        for a, b in zip(mine, whole):
            assert (a.grad is None) == (b.grad is None)
            if b.grad is not None:
                assert type(a.grad) is torch.Tensor and a.grad.dtype == b.grad.dtype
                assert_close(a.grad, b.grad)
        assert_same_gradients(parallel, reference)
    assert len(parallel.captures) == 4
    with torch.no_grad():
        assert not parallel(leaf(x), y).requires_grad
        parallel(x, y)
    assert (
        list(parallel.captures)[1].startswith("args[0] (8, 6) with gradient, args[1] (8, 6)")
        and len(parallel.captures) == 5
    )


def test_frozen_models_pass_gradients_on(alone):
    x, y = batch()
    for model in (Scorer(frozen=True), Scorer(True, frozen=True).eval()):
        parallel, reference = pair(model, alone, (x, y))
        assert not any(t.requires_grad for t in _outputs(parallel(x, y)))
        mine, whole = leaf(x), leaf(x)
        for _ in range(2):
            sum(full(o).sum() for o in _outputs(parallel(mine, y))).backward()
            sum(o.sum() for o in _outputs(reference(whole, y))).backward()
            assert_close(mine.grad, whole.grad)


def _outputs(value):
    return list(value.values()) if isinstance(value, dict) else [value]


def _adversarial(generator, critic, real, steps: int) -> list[float]:
    """A critic and a generator in turns; the critic is frozen while the generator learns."""
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        made = full(generator(real))
        loss = full(critic(made.detach(), real)).mean() - full(critic(real, real)).mean()
        loss.backward()
        of_critic.step(), of_critic.zero_grad()
        score = -full(critic(made, real)).mean()
        score.backward()
        of_generator.step(), of_generator.zero_grad(), of_critic.zero_grad()
        losses += [loss.item(), score.item()]
    return losses


def _fast_gradient(model, x, y) -> float:
    """Adversarial training: a step along the sign of the input's gradient."""
    attacked = leaf(x)
    (gradient,) = torch.autograd.grad(model(attacked, y)["loss"], attacked)
    loss = model((x + 0.1 * gradient.sign()).detach(), y)["loss"]
    loss.backward()
    return loss.item()


def _chained(encoder, projector, model, x, y):
    """Three modules after each other, with a loss on what is between them."""
    hidden = encoder(x)
    out = model(projector(hidden), y)
    (out["loss"] + 0.01 * full(out["scores"]).square().sum() + 0.1 * full(hidden).square().mean()).backward()


def _training(rank, mesh_text, strategy):
    mesh = device_mesh(mesh_text)
    x, y = batch(7)
    critics = pair(Scorer(), mesh, (x, y), strategy=strategy)
    generators = pair(tiny.Regressor(outputs=6), mesh, (x,), strategy=strategy)
    mine, whole = (_adversarial(g, c, x, 3) for g, c in zip(generators, critics))
    assert mine == pytest.approx(whole, rel=1e-4, abs=1e-6)
    attacked = pair(Scorer(True), mesh, (x, y), strategy=strategy)
    mine, whole = (_fast_gradient(m, x, y) for m in attacked)
    assert mine == pytest.approx(whole, rel=1e-4)
    assert_same_gradients(*attacked)
    encoders, projectors = (pair(tiny.Regressor(outputs=6), mesh, (x,), strategy=strategy) for _ in range(2))
    scorers = pair(Scorer(True), mesh, (x, y), strategy=strategy)
    for _ in range(2):
        for parts in zip(encoders, projectors, scorers):
            _chained(*parts, x, y)
        for models in (encoders, projectors, scorers):
            assert_same_gradients(*models)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("mesh, strategy", [("dp=2", "fsdp"), ("tp=2", None), ("dp=2,tp=2", "megatron")])
def test_training_on_processes(mesh, strategy):
    gloo.run(4 if "," in mesh else 2, _training, mesh, strategy)


def _forms(rank, plan):
    """Whole on every rank, this rank's part, and DTensors of several placements; accumulated inside of no_sync too."""
    mesh, (x, y) = device_mesh("dp=2,tp=2"), batch()
    reference, wanted = Scorer(True), leaf(x)
    reference(wanted, y)["loss"].backward()
    part = slice(4 * (rank // 2), 4 * (rank // 2) + 4)

    def check(model, mine, other, expected):
        for _ in range(2):
            mine.grad = None
            model.zero_grad()
            with model.no_sync():
                model(mine, other)["loss"].backward()
            assert_close(mine.grad, expected)
            model(mine, other)["loss"].backward()
            assert_close(mine.grad, 2 * expected)

    model = autopar.compile(Scorer(True), mesh, (x, y), plan=plan)
    check(model, leaf(x), y, wanted.grad)
    for placements in ([Shard(0), Shard(0)], [Shard(0), Shard(1)], plan_placements(model, x)):
        mine = distribute_tensor(x, mesh, placements).requires_grad_()
        check(model, mine, y, wanted.grad)
        assert mine.grad.placements == mine.placements
    of_rank = 2 * wanted.grad[part]  # the loss of the batch is the mean over two parts, whose own losses DDP has
    local = autopar.compile(Scorer(True), mesh, (x[part], y[part]), inputs="local")
    check(local, leaf(x[part]), y[part], of_rank)
    local = autopar.compile(Scorer(True), mesh, (leaf(x[part]), y[part]), inputs="local", strategy="fsdp")
    check(local, leaf(x[part]), y[part], of_rank)


def plan_placements(model, x):
    return model.shard_inputs(x)[0].placements


@pytest.mark.slow  # test_training_on_processes and the simulated ones run by default
@pytest.mark.gloo
def test_forms_of_inputs_on_four_processes():
    plan = planned(Scorer(True), "dp=2,tp=2", batch(), strategy="megatron")
    gloo.run(4, _forms, plan)


def test_inputs_without_a_way_to_the_output(alone):
    """Their gradient is None, as in eager torch."""

    class Detaching(Scorer):
        def forward(self, x, y, z):
            return {"loss": super().forward(x.detach(), y)["loss"], "other": z.square().sum()}

    def arguments():
        return [leaf(x) for x in (*batch(), batch()[0])]

    parallel, reference = pair(Detaching(True), alone, batch() + batch()[:1])
    for total in (lambda o: o["loss"], lambda o: o["other"], lambda o: o["loss"] + o["other"]):
        mine, whole = arguments(), arguments()
        total(parallel(*mine)).backward()
        total(reference(*whole)).backward()
        assert [x.grad is None for x in mine] == [x.grad is None for x in whole]
        assert_same_gradients(parallel, reference)


def test_an_input_in_another_type(alone):
    """The gradient of an input has the input's type, also where the model computes in another one."""
    x, y = batch()
    parallel, reference = pair(Scorer(True), alone, (x, y), precision="bf16")
    mine, whole = leaf(x), leaf(x)
    parallel(mine, y)["loss"].backward()
    reference(whole, y)["loss"].backward()
    assert mine.grad.dtype == torch.float32
    assert F.cosine_similarity(mine.grad.flatten(), whole.grad.flatten(), dim=0) > 0.99


def test_a_pipeline_says_no():
    x, y = batch()
    with pytest.raises(StageError, match=r"args\[0\] requires a gradient, and stages and micro-batches"):
        autopar.plan(Scorer(True), "pp=2", (leaf(x), y), hardware="cpu-gloo", micro_batches=2)
