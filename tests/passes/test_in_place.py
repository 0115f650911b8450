"""All-reduces in place: only where nothing else reads the memory, and with the same numbers."""

from __future__ import annotations

import torch

from autopar._torch import c10d
from autopar.compiler import lower
from autopar.passes.distribute.in_place import in_place
from autopar.passes.distribute.localize import localize
from autopar.simulate.compare import verify_model
from tests.passes.test_bucket import SMALL, planned

aten = torch.ops.aten


def reductions(graph) -> list[str]:
    return [n.target.overloadpacket.__name__ for n in graph.nodes if "all_reduce" in str(n.target)]


def test_gradients_and_activations_are_reduced_in_their_own_memory():
    for model, mesh, strategy in ((SMALL, "dp=2", "ddp"), ("mlp-tiny", "tp=2", "megatron")):
        module, inputs, plan, captured = planned(model, mesh, strategy)
        found = reductions(lower(captured, plan, 0, check=True).local.graph)
        assert found and set(found) == {"all_reduce_"}, (strategy, found)
        assert verify_model(module, inputs, mesh, strategy=strategy).match  # the simulator writes in place too


def test_what_is_read_again_or_shared_is_copied():
    """Three values before an all-reduce: one that another op reads, a view of one, a fresh one."""
    _, _, plan, captured = planned("mlp-tiny", "dp=2", "ddp", batch=8)
    local = localize(captured.graph_module, plan.sharding, 0, plan.reduce_scatter)
    graph = local.graph
    first = next(n for n in graph.nodes if n.target is c10d.all_reduce.default and n.meta["val"].dim() == 2)
    value, group = first.args[0], first.args[-1]
    with value.meta["val"].fake_mode, graph.inserting_before(first):
        view = graph.call_function(aten.view.default, (value, [-1]))
        view.meta["val"] = value.meta["val"].view(-1)
        fresh = graph.call_function(aten.neg.default, (view,))
        fresh.meta["val"] = -view.meta["val"]
    made = {}
    for source in (view, fresh):
        with value.meta["val"].fake_mode, graph.inserting_after(first):
            made[source] = graph.call_function(c10d.all_reduce.default, (source, "sum", group))
            made[source].meta["val"] = torch.empty_like(source.meta["val"])
    in_place(local)
    assert first.target is c10d.all_reduce.default
    assert made[view].target is c10d.all_reduce.default
    assert made[fresh].target is c10d.all_reduce_.default
