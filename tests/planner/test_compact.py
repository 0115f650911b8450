"""A deep model planned by eight of its blocks: costs, layouts and decisions are those of the whole graph."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest
import torch

from autopar import compiler
from autopar.frontend.export import Captured
from autopar.frontend.fake_parameters import forms_of
from autopar.frontend.repeated_blocks import FIRST, LAST
from autopar.ir.mesh import Mesh
from autopar.models import registry
from autopar.planner.objective.checkpoint_min_cut import FULL
from autopar.planner.objective.evaluate import evaluate
from autopar.planner.objective.memory_timeline import live_bytes
from autopar.planner.problem.multipliers import Prices
from autopar.planner.problem.recipes import Restriction
from autopar.planner.spmd.plan import search, solvers_of
from autopar.planner.spmd.plan_options import PlanOptions
from tests.helpers import whole_batch

from .planning import Instance, toy

MODELS = {
    "gpt": "gpt:hidden=32,layers=11,heads=4,vocab=64,seq=16",
    "llama": "llama:hidden=32,layers=9,heads=4,kv_heads=2,ffn=64,vocab=64,seq=16",
    "vit": "vit:hidden=32,layers=10,heads=4,image=32,patch=8,classes=10",
}


@functools.cache
def deep(model: str) -> Captured:
    if model == "gathered":  # a sum after all blocks, and an output of each
        inputs = torch.randn(8, 5, 6), torch.ones(8, 5)
        return compiler.trace_to_plan(module := whole_batch.Gathered(11), inputs, None, forms_of(module))
    module, inputs = registry.build(MODELS[model], batch=8, seq=16)
    return compiler.trace_to_plan(module, inputs, None, forms_of(module))


def whole_choice(small: Instance, whole: Instance, choice: dict[int, int], first: int) -> dict[int, int]:
    """A choice by vertex of the small problem as one of the whole problem."""
    by_node = {v.node: v for v in whole.problem.vertices if v.kind != "output"}
    outputs = {v.name: v for v in whole.problem.vertices if v.kind == "output"}
    given = {v.node: v for v in outputs.values() if v.signature[1] == "output"}
    result = {}
    for v in small.problem.vertices:
        if v.kind == "output" and v.block is None:
            twins = [outputs[v.name]]
        else:
            of_nodes = given if v.kind == "output" else by_node
            twins = [of_nodes[n] for n in small.problem.whole_nodes(v.node, first)]
        assert len(twins) == small.problem.copies(first)[v.index]
        for twin in twins:
            assert small.problem.choices(v.index).strategies == whole.problem.choices(twin.index).strategies
            result[twin.index] = choice[v.index]
    assert result.keys() == {v.index for v in whole.problem.vertices}
    return result


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("model", "mesh"), [("gpt", "a=4"), ("gpt", "a=2,b=2"), ("llama", "a=2,b=2"), ("vit", "a=4"),
                                             ("gathered", "a=2,b=2")])  # fmt: skip
def test_costs_are_those_of_the_whole_graph(model, mesh):
    """Random choices by class, and the first blocks one way and the last another: seconds, bytes and transfers are
    equal."""
    graph, seed = deep(model), random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    small, whole = Instance(graph, mesh), Instance(replace(graph, compact=None), mesh)
    assert len(small.problem.vertices) < len(whole.problem.vertices)
    prices = Prices(1e-9, True, 0.5, 0.4, ((0.7,), (0.5,)))
    found = [small.minimize(p).choice for p in (Prices(), Prices(1e-6, True))]
    for first in rng.sample(range(1, small.problem.compact.most), 2):
        for one, other in ((found[0], found[0]), (found[0], found[1]), (found[1], found[0])):
            choice = {
                v.index: (one if v.block is None or v.block <= FIRST + 1 else other)[v.cls]
                for v in small.problem.vertices
            }
            a = evaluate(small.problem, choice, small.pricer, prices, first=first)
            b = evaluate(whole.problem, whole_choice(small, whole, choice, first), whole.pricer, prices)
            for field in (
                "seconds",
                "compute_seconds",
                "communication_seconds",
                "bytes_",
                "saved_bytes",
                "resident_bytes",
            ):
                assert getattr(a, field) == pytest.approx(getattr(b, field), rel=1e-9), field
            assert a.priced(prices) == pytest.approx(b.priced(prices), rel=1e-9)
            assert sum(t.copies for t in a.transfers) == len(b.transfers)
            few, all_ = (
                live_bytes(small.problem, a, small.pricer).peak_bytes,
                live_bytes(whole.problem, b, whole.pricer).peak_bytes,
            )
            assert few == pytest.approx(all_, rel=0.03)


def test_classes_are_those_of_the_whole_graph():
    graph = deep("gpt")
    small, whole = Instance(graph, "a=2"), Instance(replace(graph, compact=None), "a=2")
    members = [sorted((c.copies, len(c.strategies)) for c in i.problem.classes.values()) for i in (small, whole)]
    assert members[0] == members[1]
    hyperedges = [
        sorted((h.hyperedge.copies, len(h.sources), len(h.targets)) for h in i.hyperedges) for i in (small, whole)
    ]
    assert hyperedges[0] == hyperedges[1]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("mesh", "limit"), [("a=2,b=2", None), ("a=4", 0.6)])
def test_plans_are_those_of_the_whole_graph(mesh, limit):
    """The plan fits the whole graph, and a search on all of it finds nothing better but for the gaps."""
    graph, mesh = deep("gpt"), Mesh.parse(mesh)
    machine = toy(flops=1e11, memory=1e10, latency=1e-6, bucket=1 << 16)
    options = PlanOptions(machine, baselines=False)
    free = search(graph, mesh, options).plan
    if limit:
        options = replace(options, memory_bytes=limit * free.peak_bytes)
    small, whole = search(graph, mesh, options).plan, search(replace(graph, compact=None), mesh, options).plan
    small.check_fits(graph.graph, mesh)
    assert small.fingerprint == whole.fingerprint and small.layouts.keys() == whole.layouts.keys()
    assert small.sharding.nodes.keys() == whole.sharding.nodes.keys()
    assert small.step_seconds <= whole.step_seconds * 1.01 and whole.bound <= small.step_seconds * (1 + 1e-9)
    if not limit:
        assert small.sharding == whole.sharding
        for a, b in zip(small.collectives, whole.collectives, strict=True):
            assert (a.kind, a.axes, a.phase, a.count) == (b.kind, b.axes, b.phase, b.count)
            assert (a.wire_bytes, a.seconds) == pytest.approx((b.wire_bytes, b.seconds))


def test_outputs_of_blocks_are_those_of_the_whole_graph():
    graph, mesh = deep("gathered"), Mesh.parse("a=2")
    options = PlanOptions(toy(flops=1e9, memory=1e9, latency=1e-6), baselines=False)
    small, whole = search(graph, mesh, options).plan, search(replace(graph, compact=None), mesh, options).plan
    small.check_fits(graph.graph, mesh)
    assert small.step_seconds == pytest.approx(whole.step_seconds, rel=0.01)
    assert small.layouts.keys() == whole.layouts.keys() and len(small.outputs) == len(whole.outputs) == 13


def test_numbers_of_blocks():
    compact = deep("gpt").compact
    for first in range(1, compact.most):
        ranges = [compact.stands_for(block, first) for block in range(8)]
        assert [n for r in ranges for n in r] == list(range(11))
        assert len(ranges[FIRST]) == first and len(ranges[LAST]) == compact.most - first


def test_what_a_block_frees_has_its_copies():
    """A sum between two blocks, scattered before the second one reads it, has the copies of the first: the second may
    not free it for all."""
    mesh = Mesh.parse("dp=2,tp=4")
    solver = solvers_of(deep("gpt"), mesh, PlanOptions(toy(link=1e7, latency=1e-6)))[0]
    problem, prices = solver.problem, replace(solver.free, byte_seconds=solver.unit_price, saved=True)
    e = solver.run(Restriction.of(None, mesh)).at(prices).evaluation
    copies = problem.copies(e.first)
    steps = solver.blocks.recomputation(e) + solver.blocks.recomputation(e, levels=(FULL,))
    assert problem.compact is not None and steps
    for step in steps:
        for v, output, layout in (key for key, _ in step.freed if key in e.saved):  # not what a step before has added
            assert copies[v] == step.copies, (step.block, problem.vertices[v].name, output, layout)
