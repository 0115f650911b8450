"""From a global batch to micro-batches."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from autopar.errors import InputError, MemoryInfeasibleError
from autopar.ir.mesh import Mesh
from autopar.planner.spmd.batch import data_ways, fewest, micro_batches_of
from autopar.planner.spmd.planned import Planned


@pytest.mark.parametrize("mesh, strategy, ways", [
    ("dp=8,tp=4", None, 8), ("dp=8,tp=4", "megatron_sp", 8), ("dp=8,tp=4", "fsdp", 32), ("tp=8", None, 1),
    ("tp=8", "megatron", 1), ("a=2,b=4", "megatron", 2), ("dp=2,cp=2,tp=2", None, 2),
    ("dp=8,tp=4", "megatron_sp+zero1", 8),
])  # fmt: skip
def test_replicas(mesh, strategy, ways):
    assert data_ways(Mesh.parse(mesh), strategy) == ways


def test_passes():
    mesh = Mesh.parse("dp=8,tp=4")
    assert micro_batches_of(64, mesh, None, None, None) == 1
    assert micro_batches_of(64, mesh, None, 4, None) == 4 and micro_batches_of(64, mesh, None, 5, None) == 5
    assert micro_batches_of(64, mesh, None, None, 2) == 4
    for arguments, fix in [
        ((64, mesh, None, None, 3), "a micro-batch of 2 or 4"),
        ((6, mesh, None, None, 1), "a batch that 8 divides"), ((64, mesh, None, 4, 2), "leave one out"),
        ((64, None, None, None, 2), "the number of micro-batches"),
    ]:  # fmt: skip
        with pytest.raises(InputError, match=fix):
            micro_batches_of(*arguments)


def searches(saved: float, limit: float, impossible: int = 0):
    """A search whose activations are `saved` bytes over the passes, and the passes that it was asked for."""
    asked = []

    def search(passes: int) -> Planned:
        asked.append(passes)
        if passes <= impossible:
            raise MemoryInfeasibleError("no plan fits")
        here = saved / passes
        step = SimpleNamespace(freed_bytes=max(here - limit, 0.0))
        e = SimpleNamespace(
            recomputed={"h.0": {"full": (step, 1)}} if here > limit else {}, resident_bytes=0.0, gradient_bytes=0.0,
            whole_gradient_bytes=0.0, saved_bytes=min(here, limit),
        )  # fmt: skip
        return _Found(passes, e, limit)

    return search, asked


class _Found(Planned):
    def __init__(self, passes, evaluation, limit):
        vars(self).update(
            passes=passes, chosen=SimpleNamespace(evaluation=evaluation),
            solver=SimpleNamespace(limit_bytes=limit, problem=SimpleNamespace(reserve_bytes=0.0)),
        )  # fmt: skip


@pytest.mark.parametrize("saved, limit, passes, asked", [
    (10, 10, 1, [1]), (10, 4, 4, [1, 4, 2]), (100, 10, 16, [1, 16, 8]), (6.5, 1, 8, [1, 8, 4]),
])  # fmt: skip
def test_the_fewest_passes(saved, limit, passes, asked):
    search, calls = searches(saved, limit)
    assert fewest(search, 64).passes == passes and calls == asked


def test_replicas_stay_whole_and_what_never_fits_is_said():
    search, _ = searches(100, 10)
    assert (
        fewest(search, 64, ways=16).passes == 4
    )  # more would leave replicas without samples: the best there is recomputes
    search, calls = searches(100, 10, impossible=8)
    assert fewest(search, 64).passes == 16 and calls == [1, 4, 16]
    search, _ = searches(100, 10, impossible=64)
    with pytest.raises(MemoryInfeasibleError):
        fewest(search, 64)
