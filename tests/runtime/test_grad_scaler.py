"""torch.amp.GradScaler around the loop of a compiled model: every rank takes a step or none does, and what steps are
is what they are for one process."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import SGD, AdamW

import autopar
from autopar.errors import StrategyError
from autopar.frontend.precision import computing_in, narrowed, upcast
from tests.helpers import gloo

from . import tiny
from .parity import assert_close, device_mesh, full, pair

X, Y = tiny.Regressor.batch()
CALL = dict(x=X, target=Y)
MIXED = {"up.weight": "R", "up.bias": "R", "down.weight": "dp:S(0)", "down.bias": "R"}  # the first is on all ranks
CASES = {
    "fsdp": ("dp=2", dict(strategy="fsdp")), "ddp": ("dp=2", dict(strategy="ddp")), "mixed": ("dp=2", dict(pin=MIXED)),
    "tp": ("tp=2", dict(strategy="megatron")), "pp": ("pp=2", dict(micro_batches=2)),
    "micro-batches": ("dp=2", dict(strategy="fsdp", micro_batches=2)),
}  # fmt: skip
OPTIMIZERS = {
    "foreach": lambda p: AdamW(p, lr=1e-2, foreach=True), "fused": lambda p: AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9),
}  # fmt: skip


def local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def poison(model, name: str) -> None:
    """Put an infinity into the gradient of one parameter, of a compiled model into the last rank's part of it alone."""
    parameter = dict(model.named_parameters()).get(name)
    is_whole = parameter is not None and local(parameter.grad) is parameter.grad
    if parameter is not None and (is_whole or dist.get_rank() == dist.get_world_size() - 1):
        local(parameter.grad).flatten()[-1] = torch.inf


def equal_everywhere(value: float) -> bool:
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return len({*values}) == 1


def clip(model, is_compiled: bool, how: str):
    if how == "model" and is_compiled:
        return model.clip_grad_norm_(0.1)
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def _one_shard_overflows(rank: int, mesh: str, options: dict, optimizers: tuple[str, ...], how: str | None) -> None:
    parallel, reference = pair(tiny.Regressor(loss=True), device_mesh(mesh), CALL, **options)
    start = [{n: p.detach().clone() for n, p in m.named_parameters()} for m in (parallel, reference)]
    for kind in optimizers:
        losses, scales = [], []
        for m, values in zip((parallel, reference), start):
            with torch.no_grad():
                for n, p in m.named_parameters():
                    p.copy_(values[n])
            optimizer, scaler = OPTIMIZERS[kind](m.parameters()), GradScaler("cpu", init_scale=2.0**10)
            losses.append([])
            scales.append([])
            for step in range(5):
                loss = m(**CALL).loss
                scaler.scale(loss).backward()
                if step == 2:
                    poison(m, "down.weight")
                if how is not None:
                    scaler.unscale_(optimizer)
                    if step != 2:
                        norm = clip(m, m is parallel, how)
                        losses[-1].append(full(norm).item())
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                losses[-1].append(loss.item())
                scales[-1].append(scaler.get_scale())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5), kind
        assert scales[0] == scales[1] == [1024.0] * 2 + [512.0] * 3 and equal_everywhere(losses[0][-1])
        whole = dict(reference.named_parameters())
        for name, parameter in parallel.named_parameters():  # under a pipeline those of its stage
            assert_close(parameter, whole[name], f"{kind} {name}", 1e-4)


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize(
    "case, optimizers, how",
    [
        ("fsdp", tuple(OPTIMIZERS), None), ("mixed", ("foreach",), "torch"), ("tp", ("fused",), "model"),
        ("pp", ("foreach", "sgd"), "model"), ("fsdp", ("foreach",), "torch"),
    ],
)  # fmt: skip
def test_all_ranks_skip_the_step_of_a_gradient_that_one_shard_overflows_in(case, optimizers, how):
    mesh, options = CASES[case]
    gloo.run(2, _one_shard_overflows, mesh, options, optimizers, how)


def eager_loss(model, dtype: torch.dtype) -> torch.Tensor:
    """The loss as precision="fp16" means it, on one device without a compiler."""
    with computing_in(model, dtype):
        return upcast(model(**{name: narrowed(x, dtype) for name, x in CALL.items()}).loss)


def _mixed_precision(rank: int, mesh: str, options: dict, scale: float, tolerance: float) -> list[float]:
    model = tiny.Regressor(loss=True)
    with torch.no_grad():
        model.down.weight.mul_(30)
    parallel, reference = pair(model, device_mesh(mesh), CALL, precision="fp16", **options)
    assert parallel.plan.precision == "fp16" and {p.dtype for p in parallel.parameters()} == {torch.float32}
    found, scales = [], []
    for m in (parallel, reference):
        # a rank's part of a batch overflows a little later than the whole one, by less than a factor of 16
        optimizer, scaler = AdamW(m.parameters(), lr=1e-3), GradScaler("cpu", init_scale=scale, backoff_factor=1 / 16)
        found.append([])
        scales.append([])
        for _ in range(8):
            loss = m(**CALL).loss if m is parallel else eager_loss(m, torch.float16)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            gradients = {n: full(p.grad).clone() for n, p in m.named_parameters()}
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found[-1].append((loss.detach(), gradients))
            scales[-1].append(scaler.get_scale())
    for (mine, gradients), (whole, expected) in zip(*found):
        assert_close(mine, whole, "loss", tolerance)
        for name, gradient in gradients.items():
            assert torch.equal(gradient.isfinite().all(), expected[name].isfinite().all()), name
            if expected[name].isfinite().all():
                assert_close(gradient, expected[name], name, tolerance)
    assert scales[0] == scales[1] and all(map(equal_everywhere, scales[0]))
    return scales[0]


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("case", ["fsdp", "tp", "ddp"])
def test_fp16_with_a_scale_that_is_too_large_at_first(case):
    mesh, options = CASES[case]
    (scales, *_) = gloo.run(2, _mixed_precision, mesh, options, 2.0**16, 1e-2)
    assert scales[0] < 2.0**16 and scales[-1] == scales[-2], scales


def _small_gradients(rank: int, mesh: str, options: dict) -> None:
    """At a scale of one most gradients of this loss are zero in float16."""

    class Small(tiny.Regressor):
        def with_loss(self, x, target):
            out = super().with_loss(x, target)
            return type(out)(out.loss * 2.0**-18, out.logits)

    parallel, reference = pair(Small(loss=True), device_mesh(mesh), CALL, precision="fp16", **options)
    scaler = [GradScaler("cpu", init_scale=2.0**16), GradScaler("cpu", init_scale=2.0**16)]
    whole = dict(reference.named_parameters())
    for step in range(3):
        for m, s in zip((parallel, reference), scaler):
            m.zero_grad()
            s.scale(m(**CALL).loss if m is parallel else eager_loss(m, torch.float16)).backward()
        for name, parameter in parallel.named_parameters():
            assert_close(parameter.grad, whole[name].grad, f"{step} {name}", 1e-2)
            assert parameter.grad.dtype == torch.float32


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("case", ["pp", "micro-batches"])
def test_fp16_in_micro_batches_computes_with_the_scaled_loss(case):
    mesh, options = CASES[case]
    gloo.run(2, _small_gradients, mesh, options)


def _accumulated(rank: int, mesh: str, options: dict) -> None:
    """Two micro-batches of the loop's own, whose gradients wait for their reduction; unscaled before a plain
    optimizer's step, or by torch's ShardedGradScaler."""
    parallel, reference = pair(tiny.Regressor(loss=True), device_mesh(mesh), CALL, **options)
    whole = dict(reference.named_parameters())
    for kind in (GradScaler, ShardedGradScaler):
        optimizers = [AdamW(m.parameters(), lr=1e-2) for m in (parallel, reference)]
        scalers = [kind("cpu", init_scale=2.0**10), GradScaler("cpu", init_scale=2.0**10)]
        for step in range(4):
            for m, optimizer, scaler in zip((parallel, reference), optimizers, scalers):
                with parallel.no_sync() if m is parallel else nullcontext():
                    scaler.scale(m(x=X, target=Y).loss / 2).backward()
                is_last = nullcontext() if step != 3 else parallel.no_sync()  # whose sums nobody has reduced yet
                with is_last if m is parallel else nullcontext():
                    scaler.scale(m(x=-X, target=Y).loss / 2).backward()
                if step == 1:
                    poison(m, "up.weight")
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale() == 512.0
        for name, parameter in parallel.named_parameters():
            assert_close(parameter, whole[name], f"{kind.__name__} {name}", 1e-4)


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("case", ["fsdp", "mixed", "ddp"])
def test_accumulated_gradients(case):
    mesh, options = CASES[case]
    gloo.run(2, _accumulated, mesh, options)


def _refused(rank: int) -> str:
    with pytest.raises(StrategyError) as error:
        autopar.AsynchronousPipeline(
            tiny.Regressor(loss=True), device_mesh("pp=2"), CALL, "pipedream_2bw", precision=torch.float16,
            optimizer=OPTIMIZERS["sgd"],
        )  # fmt: skip
    return str(error.value)


@pytest.mark.gloo
def test_asynchronous_pipelines_have_no_scale():
    first, second = gloo.run(2, _refused)
    assert first == second and 'precision="bf16"' in first
