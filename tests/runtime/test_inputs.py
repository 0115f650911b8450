"""Tests of how batches reach the model: whole on every rank, in parts, as DTensors; first calls without an example."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

import autopar
from autopar.errors import InputError
from tests.helpers import gloo

from . import tiny
from .parity import assert_close, assert_same_gradients, device_mesh, full, pair, planned


def _error(run) -> str:
    try:
        run()
    except autopar.AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _check(parallel, reference, mine, whole):
    """One step of each; `mine` and `whole` are keyword arguments."""
    for model, batch in ((parallel, mine), (reference, whole)):
        model.zero_grad()
        model(**batch).loss.backward()
    assert_close(parallel(**mine).loss, reference(**whole).loss)
    assert_same_gradients(parallel, reference)


def _ways(rank, plan, other_plan):
    """Returns the messages of calls that must fail, by what is wrong with them."""
    mesh, errors = device_mesh("dp=2,tp=2"), {}
    x, y = tiny.Regressor.batch()
    batch, part = dict(x=x, target=y), slice(4 * (rank // 2), 4 * (rank // 2) + 4)
    mine = dict(x=x[part], target=y[part])
    # global: the same everywhere, checked at the first call
    parallel, reference = pair(tiny.Regressor(loss=True), mesh, batch, plan=plan)
    errors["other batch"] = _error(lambda: parallel(x=x + (rank == 3), target=y))
    errors["other shape on one rank"] = _error(lambda: parallel(x=x[: 8 - (rank == 3)], target=y))
    _check(parallel, reference, batch, batch)
    _check(parallel, reference, dict(target=y, x=x), batch)  # in another order
    assert len(parallel.captures) == 1
    # DTensors, whatever the plan wants
    for placements in ([Shard(0), Shard(0)], [Shard(0), Shard(1)]):
        _check(parallel, reference, dict(x=distribute_tensor(x, mesh, placements), target=y), batch)
    errors["other mesh"] = _error(lambda: parallel(x=distribute_tensor(x, device_mesh("a=4"), [Shard(0)]), target=y))
    parts = {k: distribute_tensor(v, mesh, [Shard(0), Shard(1)]) for k, v in batch.items()}
    parallel, reference = pair(tiny.Regressor(loss=True), mesh, parts)
    assert parallel.plan.layouts["x"] == "dp:S(0) tp:S(1)"
    _check(parallel, reference, parts, batch)
    # local: each its own part
    parallel, reference = pair(tiny.Regressor(loss=True), mesh, mine, inputs="local")
    errors["other part"] = _error(lambda: parallel(x=mine["x"] + (rank == 3), target=mine["target"]))
    assert parallel.plan.layouts["x"] == "dp:S(0)"
    _check(parallel, reference, mine, batch)
    # local parts under a plan that wants another layout
    parallel, reference = pair(tiny.Regressor(loss=True), mesh, mine, inputs="local", plan=other_plan)
    assert parallel.plan.layouts["x"] != "dp:S(0)"
    _check(parallel, reference, mine, batch)
    # examples that differ
    errors["other example"] = _error(lambda: autopar.compile(tiny.Regressor(), mesh, (x[: 8 - (rank == 1)],)))
    return errors


@pytest.mark.gloo
def test_global_local_and_dtensor_inputs():
    x, y = tiny.Regressor.batch()
    model, batch = tiny.Regressor(loss=True), dict(x=x, target=y)
    plan = planned(model, "dp=2,tp=2", batch, strategy="megatron")
    other = planned(model, "dp=2,tp=2", batch, strategy="fsdp")
    results = gloo.run(4, _ways, plan, other)
    expected = {
        "other batch": "InputError: rank 3 passes another x than rank 0",
        "other shape on one rank": "InputError: rank {} is called with target (8, 4), x ({}, 6); train and rank",
        "other part": "InputError: rank 3 passes another x than rank 2, but inputs='local' wants one part of the batch "
        "for all",
        "other mesh": "InputError: x is a DTensor of another mesh",
        "other example": "InputError: rank 1 compiles for args[0] (7, 6) and rank 0 for args[0] (8, 6)",
    }
    for rank, errors in enumerate(results):
        for what, text in expected.items():
            text = text.format(0, 8) if rank == 3 else text.format(3, 7)
            assert errors[what].startswith(text), f"{what}: {errors[what]}"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "example",
    [lambda x: (x,), lambda x: [x], lambda x: x, lambda x: ((x,), {}), lambda x: {"x": x}, lambda x: ((), {"x": x})],
    ids=["tuple", "list", "tensor", "pair", "dict", "keyword pair"],
)
def test_examples(alone, example):
    x, _ = tiny.Regressor.batch()
    parallel, reference = pair(tiny.Regressor(), alone, example(x))
    args, kwargs = autopar.frontend.call_signature.split_example(example(x))
    assert_close(parallel(*args, **kwargs), reference(x))


def test_a_tensor_passed_twice(alone):
    """labels=input_ids are two inputs, and need not be one at the next call."""
    model, batch = tiny.gpt2(n_layer=1)
    assert batch["labels"] is batch["input_ids"]
    parallel, reference = pair(model, alone, batch)
    assert_close(parallel(**batch).loss, reference(**batch).loss)
    batch["labels"] = torch.roll(batch["labels"], 3, 1)
    assert_close(parallel(**batch).loss, reference(**batch).loss)


def test_first_call_compiles(alone):
    x, y = tiny.Regressor.batch()
    parallel = autopar.compile(tiny.Regressor(loss=True), alone)
    own = parallel.parameters, parallel.state_dict, parallel.named_parameters
    for early in (*own, lambda: torch.optim.SGD(parallel.parameters())):
        with pytest.raises(InputError, match="compiled at its first call(.|\n)*pass example_inputs"):
            list(early())
    with torch.no_grad():
        expected = tiny.Regressor(loss=True)(x, y).loss
        assert_close(parallel(x, y).loss, expected)
    assert [n for n, _ in parallel.named_parameters()] == ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert list(parallel.state_dict()) == [n for n, _ in parallel.named_parameters()]
    assert "dp=1,tp=1" in str(parallel.plan)
    parallel(x, y).loss.backward()
    assert all(full(p.grad).abs().sum() > 0 for p in parallel.parameters())
    failing = autopar.compile(tiny.Regressor(), alone)
    with pytest.raises(autopar.AutoparError):
        failing(torch.randn(8, 7))
    assert_close(failing(x), tiny.Regressor()(x))  # the failure left it as it was
