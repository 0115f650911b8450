"""Outputs of micro-batches: written to their place in the whole, or let go of and made again when they are read."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from autopar.errors import InputError, StageError
from autopar.plans.pipeline import sizes_of
from autopar.runtime.joined_outputs import JoinedOutputs
from autopar.runtime.unmade import UnmadeTensor
from tests.helpers import gloo

from . import tiny
from .parity import assert_close, device_mesh, pair, planned

X, Y = tiny.Regressor.batch()
CALL = dict(x=torch.cat([X, X + 1]), target=torch.cat([Y, 2 * Y]))


@pytest.mark.parametrize("seed", range(8))
def test_parts_are_where_cat_puts_them(seed):
    generator = torch.Generator().manual_seed(seed)
    samples, many, dim, each = (int(torch.randint(low, 7, (), generator=generator)) for low in (6, 2, 0, 1))
    samples, dim = samples * 3 + seed % 2, dim % 3
    sizes = sizes_of(samples, many)
    uneven = sizes[0] > sizes[-1]
    starts = [sum(sizes[:i]) if uneven else i for i in range(many)]
    micro = SimpleNamespace(
        joins={"0": dim, "1": "sum", "2": "same"}, micro_batches=many, samples=samples, start=starts.__getitem__,
        smaller=object() if uneven else None, chunks=(),
    )  # fmt: skip
    micro.of_rows = micro
    shape = [2, 3, 4]
    parts = [torch.randn([*shape[:dim], each * n, *shape[dim + 1 :]], generator=generator) for n in sizes]
    whole = torch.cat(parts, dim)
    for gathered in ((), ("0",)):
        outputs, doubled = JoinedOutputs(micro, {"0": whole.to("meta")}, gathered), bool(gathered)
        for i in reversed(range(many)):  # schedules end micro-batches in any order
            outputs.take("0", i, parts[i]), outputs.take("1", i, parts[i].sum()), outputs.take("2", i, torch.ones(2))
        found = outputs.joined(lambda name, i, part: 2 * part)
        assert torch.equal(found["0"], whole * (2 if doubled else 1)), seed
        torch.testing.assert_close(found["1"], whole.sum())
        assert torch.equal(found["2"], torch.ones(2)) and not outputs.joined(None)


def _unmade(rank, mesh, plan, outputs):
    mesh = device_mesh(mesh)
    parallel, reference = pair(tiny.Regressor(loss=True), mesh, CALL, plan=plan, outputs=outputs)
    out, wanted = parallel(**CALL), reference(**CALL)
    assert isinstance(out.logits, UnmadeTensor) and out.logits.shape == wanted.logits.shape
    assert_close(out.loss, wanted.loss), assert_close(out.logits + 0, wanted.logits)
    out.loss.backward(), wanted.loss.backward()
    whole = dict(reference.named_parameters())
    for name, parameter in parallel.named_parameters():  # of this rank's stages
        assert_close(parameter.grad, whole[name].grad, name)
    late, unread = parallel(**CALL).logits, parallel(**CALL).logits
    assert_close(late + 0, wanted.logits)
    torch.optim.SGD(parallel.parameters(), lr=0.1).step()
    assert_close(late + 0, wanted.logits)  # made before
    with pytest.raises(InputError, match="modified by an inplace operation"):
        unread + 0
    with torch.no_grad():
        assert not isinstance(parallel(**CALL).logits, UnmadeTensor)


@pytest.mark.gloo
@pytest.mark.parametrize("mesh, outputs", [
    pytest.param("dp=2", "stage", marks=pytest.mark.slow), ("pp=2", "everywhere"),
])  # fmt: skip
def test_outputs_that_are_not_kept_are_made_when_they_are_read(mesh, outputs):
    plan = planned(tiny.Regressor(loss=True), mesh, CALL, micro_batches=3)
    assert plan.unmade_bytes == 0
    gloo.run(2, _unmade, mesh, replace(plan, unmade_bytes=1.0), outputs)


def _alone(rank, plan):
    parallel, _ = pair(tiny.Regressor(loss=True), device_mesh("pp=2"), CALL, plan=plan)
    logits = parallel(**CALL).logits
    if logits is not None:
        with pytest.raises(StageError, match="logits of all micro-batches.*one stage cannot make it"):
            logits + 0
    return logits is None


@pytest.mark.gloo
def test_one_stage_alone_says_that_it_cannot_make_an_output():
    plan = planned(tiny.Regressor(loss=True), "pp=2", CALL, micro_batches=3)
    assert gloo.run(2, _alone, replace(plan, unmade_bytes=1.0)) == [True, False]
