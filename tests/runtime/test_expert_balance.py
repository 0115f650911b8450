"""Rows that devices got of their experts, against a count of the eager model's own routing."""

from __future__ import annotations

import math

import pytest
import torch

from autopar import compile as compile_
from autopar.errors import StrategyError
from autopar.ir.layout import chunk
from autopar.plans.expert_balance import balance_of
from tests.helpers import gloo
from tests.planner.planning import toy
from tests.simulate.test_experts import ROUTINGS, Mixture, inputs

EXPERTS, STEPS = 7, 3
CASES = [({"ep": 2}, "expert", 1), ({"ep": 4}, "expert", 1), ({"ep": 2}, "expert", 2),
         ({"ep": 2, "tp": 2}, "expert+megatron_sp", 1), ({"pp": 2, "ep": 2}, "expert", 2)]  # fmt: skip


def test_layers_are_compared_over_the_devices_that_have_them():
    balance = balance_of([{"a": [3, 1]}, {"a": [1, 1]}, {"b": [0]}, {"b": [0]}], 1.5)
    first, second = balance.layers
    assert (first.layer, first.forwards, first.mean_rows, first.busiest_rows, first.load) == ("a", 2, 3.0, 4, 4 / 3)
    assert (second.layer, second.mean_rows, second.load) == ("b", 0.0, 1.0)
    assert balance.load == 4 / 3 and balance.assumed == 1.5
    assert str(balance).startswith("experts: the busiest device got 1.33 times the mean of the rows, 1.50 assumed")


def routed(model: Mixture, x: torch.Tensor, ways: int) -> list[int]:
    """Return how many rows the eager model's router sends to the experts of each of so many devices."""
    which = model.router(model.first(x).reshape(-1, x.shape[-1])).softmax(-1).topk(model.active)[1].flatten()
    counts = which.bincount(minlength=EXPERTS)
    return [int(counts[slice(*chunk(EXPERTS, ways, i))].sum()) for i in range(ways)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("mesh", "strategy", "micro_batches"), CASES)
def test_counts_are_those_of_the_routing(mesh, strategy, micro_batches, routing):
    gloo.run(math.prod(mesh.values()), _counted, mesh, strategy, micro_batches, routing, seconds=200)


def _counted(rank: int, sizes: dict[str, int], strategy: str, micro_batches: int, routing: str) -> None:
    given, source = inputs(8, 3), Mixture(EXPERTS, 2, routing)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (*sizes.values(),), mesh_dim_names=(*sizes,))
    parallel = compile_(
        Mixture(EXPERTS, 2, routing), mesh, example_inputs=given, hardware=toy(link=1e6), expert_load=1.2,
        strategy=strategy, micro_batches=micro_batches,
    )  # fmt: skip
    with pytest.raises(StrategyError, match="no rows of experts were counted yet"):
        parallel.expert_balance()
    for _ in range(STEPS):
        parallel(*given).backward()
    balance = parallel.expert_balance()
    counts = [routed(source, part, sizes["ep"]) for part in given[0].chunk(micro_batches)] * STEPS
    (layer,) = balance.layers
    assert layer.forwards == len(counts) and balance.assumed == 1.2
    assert layer.busiest_rows == sum(map(max, counts))
    assert layer.mean_rows == sum(map(sum, counts)) / sizes["ep"]


def test_without_experts_nothing_is_told():
    gloo.run(2, _whole)


def _whole(rank: int) -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    given = inputs(4, 2)
    parallel = compile_(Mixture(EXPERTS), mesh, example_inputs=given, strategy="ddp")
    parallel(*given).backward()
    with pytest.raises(StrategyError, match="no experts are cut over devices"):
        parallel.expert_balance()
