"""Ops that are moved between the start of an exchange of rows and its wait, and what cannot be."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from torch import fx

from autopar import compiler
from autopar._torch import c10d
from autopar.errors import PlanIncompatible, VerifyError
from autopar.ir.mesh import Mesh
from autopar.ops import autopar
from autopar.passes.distribute.beside_exchange import beside_exchange
from autopar.passes.distribute.exchange_rows import started_by
from autopar.planner.spmd.plan import search
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.plans.check import check_decisions
from autopar.plans.sharding import BesideExchange

from ..helpers.shared_experts import SharedExperts, gpus, inputs


@cache
def planned(first: bool):
    captured = compiler.trace(SharedExperts(1, first=first), inputs())
    return search(captured, Mesh.parse("ep=2"), PlanOptions(gpus(), strategy="expert", baselines=False))


def local_graph(first: bool) -> fx.GraphModule:
    """A rank's graph in which all exchanges are waited for at once."""
    found = planned(first)
    plan = replace(found.plan, sharding=replace(found.plan.sharding, exchanges=()))
    return compiler.lower(found.captured, plan, 0).local


def places(local: fx.GraphModule) -> dict[str, int]:
    return {node.name: i for i, node in enumerate(local.graph.nodes)}


@pytest.mark.parametrize("first", [False, True])
def test_products_move_between_start_and_wait(first):
    """Those that come before with what reads them that early, those that come after with what they are made from;
    exchanges keep their order."""
    found = planned(first)
    local = local_graph(first)
    starts = [n.name for n in local.graph.nodes if n.target is autopar.exchange_rows.default]
    beside_exchange(local, found.plan.sharding.exchanges)
    at = places(local)
    for one in found.plan.sharding.exchanges:
        start = next(n for n in local.graph.nodes if n.name == started_by(one.exchange))
        (wait,) = start.users
        assert wait.target is c10d.wait_tensor.default
        assert all(at[start.name] < at[name] < at[wait.name] for name in one.products)
    assert [n.name for n in local.graph.nodes if n.target is autopar.exchange_rows.default] == starts
    beside = {name for one in found.plan.sharding.exchanges for name in one.products}
    alone = [n for n in starts if n not in {started_by(one.exchange) for one in found.plan.sharding.exchanges}]
    assert beside and all(at[list(local.graph.nodes)[at[n]].next.name] == at[n] + 1 for n in alone)


def test_what_makes_rows_or_reads_them_cannot_be_beside_them():
    local = local_graph(False)
    dispatched = next(n for n in local.graph.nodes if n.target is autopar.exchange_rows.default and
                      n.meta["collective"].tensor.startswith("dispatch_tokens"))  # fmt: skip
    exchange = dispatched.name.removesuffix("_exchange_start")
    for name in ("linear", "grouped_mm"):
        with pytest.raises(VerifyError, match=f"{dispatched.name} is not independent of {name}"):
            beside_exchange(local, [BesideExchange(exchange, (name,))])


def test_what_is_not_there():
    """An exchange of another stage is none of this one's business; one without its products is."""
    local = local_graph(False)
    before = [*places(local)]
    beside_exchange(local, [BesideExchange("elsewhere", ("linear",))])
    assert [*places(local)] == before
    (exchange, *_) = [one.exchange for one in planned(False).plan.sharding.exchanges]
    with pytest.raises(VerifyError, match="has not all of nowhere beside it"):
        beside_exchange(local, [BesideExchange(exchange, ("nowhere",))])
    sharding = replace(planned(False).plan.sharding, exchanges=(BesideExchange(exchange, ("nowhere",)),))
    with pytest.raises(PlanIncompatible, match="nowhere, an unknown op"):
        check_decisions(planned(False).captured.graph, sharding)
