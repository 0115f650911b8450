"""Training of sharded models is training of one process: losses, gradients, optimizers, clipping, accumulation."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import gloo

from . import tiny
from .parity import assert_close, assert_same_gradients, assert_same_values, device_mesh, pair, planned

MESH = "dp=2,tp=2"


def _fit(rank, plan, steps):
    """AdamW with clipping: the first gradients, the loss and the norm of every step. Returns how many parameters are
    sharded."""
    model, batch = tiny.gpt2(n_layer=1)
    parallel, reference = pair(model, device_mesh(str(plan.mesh)), batch, plan=plan)
    names = list(reference.state_dict())
    assert list(parallel.state_dict()) == names and "lm_head.weight" in names
    assert [n for n, _ in parallel.named_parameters()] == [n for n, _ in reference.named_parameters()]
    assert parallel.lm_head.weight is parallel.transformer.wte.weight
    assert_same_values(parallel, reference, tolerance=0.0)
    sharded = sum(p.to_local().numel() < p.numel() for p in parallel.parameters())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (parallel, reference)]
    for step in range(steps):
        batch = {"input_ids": torch.randint(1, 96, (4, 12), generator=torch.Generator().manual_seed(step))}
        batch["labels"] = batch["input_ids"]
        loss, expected = parallel(**batch).loss, reference(**batch).loss
        assert_close(loss, expected, f"loss of step {step}", 1e-4)
        loss.backward()
        expected.backward()
        if step == 0:
            assert_same_gradients(parallel, reference)
        norms = parallel.clip_grad_norm_(0.5), torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        assert_close(*norms, f"norm of step {step}", 1e-4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert all(p.grad is None for p in parallel.parameters())
    assert_close(parallel(**batch).loss, reference(**batch).loss, "last loss", 1e-4)
    return sharded


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("mesh, strategy", [(MESH, "megatron"), ("dp=4", "zero1")])
def test_steps_of_adamw(mesh, strategy):
    model, batch = tiny.gpt2(n_layer=1)
    assert min(gloo.run(4, _fit, planned(model, mesh, batch, strategy=strategy), 2)) > 0


def _loop(rank, plan, pinned):
    """A user's ways to call backward and step, on a mix of layouts."""
    mesh = device_mesh(MESH)
    x, y = tiny.Regressor.batch()

    def build(**options):
        return pair(tiny.Regressor(loss=True), mesh, dict(x=x, target=y), plan=plan, **options)

    # several backward passes accumulate, also with both forwards first
    parallel, reference = build()
    for m in (parallel, reference):
        m(x=x, target=y).loss.backward()
        m(x=x, target=y).loss.backward()
        first, second = m(x=x, target=y).loss, m(x=x + 1, target=y).loss
        (2 * second).backward()
        first.backward(retain_graph=True)
        first.backward()
    assert_same_gradients(parallel, reference)
    # no_grad and eval leave everything as it is
    with torch.no_grad():
        for m in (parallel, reference):
            m.eval()
        out = parallel(x=x, target=y)
        assert not out.loss.requires_grad
        assert_close(out.loss, reference(x=x, target=y).loss)
        assert_close(out.logits, reference(x=x, target=y).logits)
        parallel.train()
    assert_same_gradients(parallel, reference)
    # optimizers
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    ):
        optimizers = [make(m.parameters()) for m in (parallel, reference)]
        for _ in range(3):
            for m, optimizer in zip((parallel, reference), optimizers):
                optimizer.zero_grad()
                m(x=x, target=y).loss.backward()
                optimizer.step()
        assert_same_values(parallel, reference, 1e-4)
    # values written into the model are the ones it computes with
    before = {name: p.full_tensor() for name, p in parallel.named_parameters()}
    with torch.no_grad():
        for m in (parallel, reference):
            for p in m.parameters():
                p.mul_(0.5)
    assert_close(parallel(x=x, target=y).loss, reference(x=x, target=y).loss)
    parallel.load_state_dict({n: p.detach() * 2 for n, p in parallel.named_parameters()})
    for name, p in parallel.named_parameters():
        assert_close(p, before[name], name)
    return {name: str(p.placements) for name, p in parallel.named_parameters()}


@pytest.mark.slow
@pytest.mark.gloo
def test_loops_on_a_mix_of_layouts():
    x, y = tiny.Regressor.batch()
    pins = {"up.weight": "dp:S(0) tp:S(1)", "up.bias": "tp:S(0)", "down.weight": "R"}
    plan = planned(tiny.Regressor(loss=True), MESH, dict(x=x, target=y), pin=pins)
    placements = gloo.run(4, _loop, plan, pins)[0]
    assert len(set(placements.values())) >= 3, placements
