"""compile(..., reduce_dtype="bf16"): gradients of real processes that are added up in bfloat16, by the formula and by
the bytes that travel."""

from __future__ import annotations

import copy
import os
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch.amp import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode

from autopar import Plan
from autopar.runtime.stand_in import local_gradient
from tests.helpers import gloo

from . import tiny
from .parity import assert_close, device_mesh, full, pair, planned

X, Y = tiny.Regressor.batch()
CALL = dict(x=X, target=Y)


class Sent(TorchDispatchMode):
    """Counts the elements that collectives begin with, by type."""

    def __init__(self):
        super().__init__()
        self.elements: Counter = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "_c10d_functional" and "wait" not in function.name():
            self.elements[args[0].dtype] += args[0].numel()
        return function(*args, **(kwargs or {}))


def expected(model, sign: float = 1.0, parts: int = 2) -> dict[str, list[torch.Tensor]]:
    """Return what each rank adds to the gradients: those of its samples' part of the mean, in float32."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for rank in range(parts):
        part, one = slice(rank * len(X) // parts, (rank + 1) * len(X) // parts), copy.deepcopy(model)
        (one(x=sign * X[part], target=Y[part]).loss / parts).backward()
        for name, parameter in one.named_parameters():
            found[name].append(parameter.grad)
    return found


def sums(terms: dict[str, list[torch.Tensor]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: (a.to(dtype) + b.to(dtype)).float() for name, (a, b) in terms.items()}


def check(parallel, whole: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """A term may be a rounding away from eager torch's, which moves few of the sums, by a step of the narrow type."""
    for name, parameter in parallel.named_parameters():
        gradient = full(parameter.grad)
        assert gradient.dtype == torch.float32 and torch.equal(gradient.to(dtype).float(), gradient), name
        assert (gradient != whole[name]).float().mean() < 0.1, name
        assert_close(gradient, whole[name], name, 1e-2)


def _formula(rank: int, strategy: str, dtype: torch.dtype) -> None:
    model = tiny.Regressor(loss=True)
    parallel, reference = pair(model, device_mesh("dp=2"), CALL, strategy=strategy, reduce_dtype=dtype)
    whole = sums(expected(reference), dtype)
    loss = parallel(**CALL).loss
    with Sent() as sent:
        loss.backward()
    elements = sum(p.numel() for p in reference.parameters())
    assert sent.elements[dtype] == elements and sent.elements.total() - elements <= 64, sent.elements
    check(parallel, whole, dtype)

    parallel.zero_grad()  # gradients that wait are added up in their own type, and reduced in the narrow one
    for sign, context in ((1.0, parallel.no_sync()), (-1.0, nullcontext())):
        with context:
            parallel(x=sign * X, target=Y).loss.backward()
    first, second = expected(reference), expected(reference, -1.0)
    waited = sums({n: [a + b for a, b in zip(first[n], second[n])] for n in first}, dtype)
    check(parallel, waited, dtype)


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize(
    "strategy, dtype", [("ddp", torch.bfloat16), ("fsdp", torch.bfloat16), ("fsdp", torch.float16)]
)
def test_gradients_are_sums_of_rounded_terms(strategy, dtype):
    gloo.run(2, _formula, strategy, dtype)


def _pipeline(rank: int, plan: Plan) -> None:
    """Micro-batches add up in float32, the ranks of a stage in bfloat16; the plan comes from a file."""
    parallel, reference = pair(tiny.Regressor(loss=True), device_mesh("pp=2,dp=2"), CALL, plan=plan)
    reference(**CALL).loss.backward()
    whole = {name: p.grad for name, p in reference.named_parameters()}
    parallel(**CALL).loss.backward()
    for name, parameter in parallel.named_parameters():
        gradient = full(parameter.grad)
        assert torch.equal(gradient.bfloat16().float(), gradient) and not torch.equal(gradient, whole[name]), name
        assert_close(gradient, whole[name], name, 1e-2)


@pytest.mark.slow
@pytest.mark.gloo
def test_stages(tmp_path):
    plan = planned(tiny.Regressor(loss=True), "pp=2,dp=2", CALL, reduce_dtype="bf16", micro_batches=2, strategy="ddp")
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.reduce_dtype == "bf16"
    gloo.run(4, _pipeline, loaded)


def _later_calls_and_overflow(rank: int) -> None:
    """Calls of other shapes reduce as the first did; what overflows in float16 on its way skips the step everywhere."""
    parallel, _ = pair(tiny.Regressor(loss=True), device_mesh("dp=2"), CALL, strategy="fsdp", reduce_dtype="fp16")
    parallel(x=X[:4], target=Y[:4]).loss.backward()
    assert [plan.reduce_dtype for plan in parallel.captures.values()] == ["fp16"] * 2
    for parameter in parallel.parameters():
        gradient = local_gradient(parameter)
        assert torch.equal(gradient.half().float(), gradient)
    before = [p.to_local().clone() for p in parallel.parameters()]
    optimizer, scaler = torch.optim.SGD(parallel.parameters(), lr=0.1), GradScaler("cpu", init_scale=2.0**24)
    scaler.scale(parallel(**CALL).loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**23
    assert all(torch.equal(a, p.to_local()) for a, p in zip(before, parallel.parameters()))


@pytest.mark.gloo
def test_later_calls_and_overflow():
    gloo.run(2, _later_calls_and_overflow)


def _kept(rank: int, folder: str) -> list[tuple[str, str | None, str]]:
    os.environ["AUTOPAR_CACHE"] = folder
    found = []
    for precision, dtype in ((torch.bfloat16, None), ("bf16", "bf16"), ("bfloat16", None), (torch.float16, None)):
        parallel, _ = pair(
            tiny.Regressor(loss=True), device_mesh("dp=2"), CALL, strategy="ddp", precision=precision,
            reduce_dtype=dtype,
        )  # fmt: skip
        found.append((parallel.plan.precision, parallel.plan.reduce_dtype, parallel.plan.hash))
    return found


@pytest.mark.slow
@pytest.mark.gloo
def test_the_cache_tells_types_apart(tmp_path):
    found, other = gloo.run(2, _kept, str(tmp_path))
    assert found == other and [(p, r) for p, r, _ in found] == [
        ("bf16", None), ("bf16", "bf16"), ("bf16", None), ("fp16", None),
    ]  # fmt: skip
    assert found[0] == found[2] and len({plan for _, _, plan in found}) == 3 and any(tmp_path.rglob("*"))
