"""Pieces of a plan add up to the plan; cuts are where little passes; links of a stage are those of the whole mesh."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar import compiler
from autopar.frontend.fake_parameters import forms_of
from autopar.hardware.profile import load
from autopar.ir.mesh import Mesh
from autopar.ir.stage_placement import StagePlacement
from autopar.models import registry
from autopar.passes.pipeline.micro_batch import micro_batch
from autopar.planner.pipeline import segments as segments_module
from autopar.planner.pipeline.evaluate import besides, evaluate_pipeline
from autopar.planner.pipeline.plan import plan_pipeline
from autopar.planner.pipeline.segments import chain
from autopar.planner.pipeline.stage_costs import INPUT, WEIGHT, Parts
from autopar.planner.spmd.plan import search, solvers_of
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.plans.pipeline import Pipeline, inside
from autopar.schedule import KINDS
from tests.families import FAMILIES
from tests.planner.planning import captured, toy

GPT = "gpt:hidden=32,layers=4,heads=4,vocab=64,seq=16"


def planned(model, mesh: str = "pp=2,dp=2", micro_batches: int = 4, hardware=None, **options):
    mesh, graph = Mesh.parse(mesh), captured(model) if isinstance(model, str) else model
    options = PlanOptions(hardware or toy(), within=mesh, micro_batches=micro_batches, baselines=False, **options)
    return search(micro_batch(graph, micro_batches).captured, inside(mesh), options)


def free(bytes_: float) -> float:
    return 0.0


def chain_of(found, stages: int = 2):
    return chain(*found.whole, found.pricer, stages, free)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [
    {}, {"mesh": "pp=2,dp=2,tp=2", "strategy": "megatron_sp"}, {"strategy": "fsdp"},
    {"precision": "bf16", "strategy": "zero1"}, {"recompute": "full"}, {"recompute": "selective"},
    {"micro_batches": 1, "strategy": "zero2"}, {"hardware": load("h100")},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("model", [GPT, "llama:hidden=32,layers=2,heads=4,kv_heads=2,ffn=64,vocab=64,seq=16"])
def test_segments_add_up_to_the_plan(model, options):
    graph = captured(model)
    if options.get("precision"):
        graph = compiler.trace(*registry.build(model, batch=8, seq=16, device="meta"), precision="bf16")
    found = planned(graph, **options)
    (problem, e), passes = found.whole, found.options.micro_batches
    parts = Parts(problem, e, found.pricer, chain_of(found).starts).found
    works = [work for part in parts for work in part.work.values()]
    assert sum(w.compute for w in works) == pytest.approx(e.compute_seconds)
    assert sum(w.recompute for w in works) == pytest.approx(e.recompute_seconds)
    once = sum(part.once_moved + part.parameter_seconds for part in parts) / passes
    assert sum(w.moved for w in works) + once == pytest.approx(e.communication_seconds + e.parameter_seconds)
    assert sum(part.saved_bytes + part.retained_bytes for part in parts) == pytest.approx(e.saved_bytes)
    assert sum(part.resident_bytes for part in parts) == pytest.approx(e.resident_bytes)
    assert sum(part.gradient_bytes for part in parts) == pytest.approx(e.gradient_bytes)
    assert sum(part.whole_bytes for part in parts) == pytest.approx(e.whole_gradient_bytes)
    alone = Parts(problem, e, found.pricer, ()).found[0]
    assert alone.forward_seconds + alone.backward_seconds + alone.once_seconds / passes >= e.seconds * (1 - 1e-9)


@pytest.mark.slow
def test_equal_blocks_are_equal_pieces_cut_beside_attention_and_mlp(monkeypatch):
    plan = planned("gpt:hidden=32,layers=6,heads=4,vocab=64,seq=16")
    fine = chain_of(plan, stages=3)  # few segments for three stages: blocks may be cut inside too
    monkeypatch.setattr(segments_module, "ENOUGH", 1)
    found = chain_of(plan, stages=3)
    assert {*found.starts} < {*fine.starts}
    least = max(segment.boundary_bytes for segment in found.segments)
    assert all(
        segment.boundary_bytes >= least for name, segment in zip(fine.starts, fine.segments) if name not in found.starts
    )
    kinds = [segment.kind for segment in found.segments]
    assert len(kinds) == 2 * 6 + 1 and len(set(kinds)) < len(kinds) - 4
    assert kinds[3:9:2].count(kinds[3]) == 3 and kinds[4:10:2].count(kinds[4]) == 3
    assert len({segment.boundary_bytes for segment in found.segments[:-1]}) == 1


def test_tied_embeddings_are_shared_by_the_first_and_the_last_piece():
    found = chain_of(planned(GPT, strategy="ddp"))
    (shared,) = found.shared
    assert (shared.first, shared.second) == (0, len(found.segments) - 1)
    assert shared.bytes_ == 64 * 32 * 16


def test_weight_gradients_are_apart_from_what_the_stage_before_waits_for():
    found = planned(GPT)
    parts = Parts(*found.whole, found.pricer, chain_of(found).starts).found
    for part in parts[1:]:
        assert 0 < part.weight_seconds < part.backward_seconds
        assert part.input_seconds + part.weight_seconds == pytest.approx(part.backward_seconds)
        assert part.work[INPUT].compute > 0 and part.work[WEIGHT].compute > 0


class Skips(nn.Module):
    """A U-Net of linear layers: what each level of the way down makes, the same level of the way up reads."""

    def __init__(self, width: int = 32, depth: int = 3):
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(depth))

    def forward(self, x):
        skips = []
        for layer in self.down:
            x = torch.relu(layer(x))
            skips.append(x)
        for layer in self.up:
            x = torch.relu(layer(torch.cat([x, skips.pop()], -1)))
        return x.square().mean()


def test_skips_pass_every_cut_between_their_ends():
    graph = compiler.trace(Skips(), {"x": torch.randn(8, 32)})
    found = planned(graph, micro_batches=2)
    starts = chain_of(found).starts
    assert len(starts) >= 4
    parts = Parts(*found.whole, found.pricer, starts[2:3]).found
    passing = [
        n for n in found.problem.graph.nodes if StagePlacement(found.problem.graph, starts[2:3]).read_at.get(n, 0) >= 2
    ]
    assert len(parts[0].sent) >= 3 and len(passing) >= 3


def test_stages_stand_as_far_apart_as_on_the_whole_mesh():
    """With pp as the last axis, the ranks of the axis before it are a node's size apart."""
    hardware, graph = load("h100"), captured(GPT)
    near, far = (
        solvers_of(graph, inside(Mesh.parse(m)), PlanOptions(hardware, within=Mesh.parse(m)))[0].pricer
        for m in ("pp=8,dp=8", "dp=8,pp=8")
    )  # fmt: skip
    seconds = [p.prices.collectives.seconds("all_reduce", ("dp",), 2.0**28) for p in (near, far)]
    assert seconds[1] > 3 * seconds[0]
    assert near.redistribute.links["dp"].bytes_per_second > 3 * far.redistribute.links["dp"].bytes_per_second
    assert far.prices.collectives.seconds("send", ("pp",), 2.0**28) < near.prices.collectives.seconds(
        "send", ("pp",), 2.0**28
    )


def test_a_rank_with_two_stages_holds_a_tied_parameter_once():
    found = planned(GPT, strategy="ddp")
    segments = chain_of(found, 4)
    cuts = segments.cuts((0, 2, 4, 6))
    v = evaluate_pipeline(
        *found.whole, found.pricer, Pipeline("pp", 2, "zbv", 4, 2, cuts), free
    )  # stages 0 and 3 are on rank 0
    looped = evaluate_pipeline(*found.whole, found.pricer, Pipeline("pp", 2, "interleaved_1f1b", 4, 2, cuts), free)
    embedding = 64 * 32 * 4
    assert sum(m["parameters"] for m in looped.memory) - sum(m["parameters"] for m in v.memory) == embedding


@pytest.mark.slow
@pytest.mark.parametrize("mesh, asked", [
    ("pp=2,dp=2", {}),
    ("pp=2,dp=2", {"recompute": "selective"}),
    ("pp=2,tp=2", {"recompute": "full", "strategy": "megatron"}),
    # each block makes again what it reads from the one before
])  # fmt: skip
def test_a_deep_model_is_planned_by_few_blocks(mesh, asked):
    model, inputs = registry.build("gpt:hidden=32,layers=20,heads=4,vocab=64,seq=16", batch=8, seq=16, device="meta")
    micro = micro_batch(compiler.trace_to_plan(model, inputs, None, forms_of(model), "bf16"), 4).captured
    assert micro.compact is not None and len(micro.compact.graph.nodes) < len(micro.graph.nodes) / 2
    mesh = Mesh.parse(mesh)
    options = PlanOptions(toy(), within=mesh, micro_batches=4, baselines=False, precision="bf16", **asked)
    few, every = (search(c, inside(mesh), options) for c in (micro, replace(micro, compact=None)))
    assert few.evaluation.seconds == pytest.approx(every.evaluation.seconds)
    assert few.plan.peak_bytes == pytest.approx(
        every.plan.peak_bytes, rel=1e-3
    )  # which of two equal blocks holds an input
    few_parts, all_parts = (Parts(*p.whole, p.pricer, chain_of(p).starts).found for p in (few, every))
    assert [part.saved_bytes for part in few_parts] == pytest.approx([part.saved_bytes for part in all_parts])
    prices = None if asked else few.solver.free
    one, other = (
        chain(p.problem, p.evaluation, p.pricer, 4, free, prices=prices) for p in (few, every)
    )  # of few blocks alone
    assert one.starts == other.starts and len(one.segments) > 2 * 20
    assert any(len(segment.levels) > 1 for segment in one.segments) == (not asked)
    for mine, its in zip(one.segments, other.segments):
        assert len(mine.levels) == len(its.levels)
        for level, same in zip(mine.levels, its.levels):
            assert level.seconds == pytest.approx(same.seconds)
            assert level.activation_bytes == pytest.approx(same.activation_bytes, abs=2)
        assert mine.state_bytes == pytest.approx(its.state_bytes, abs=2)


def test_outputs_and_reductions_are_held_beside_a_micro_batch_or_after_all():
    held = Counter({"activations": 10.0, "values between ops": 20.0})
    assert besides(held, 16.0, [0.0]) == 16.0 == besides(held, 16.0, [30.0, 0.0])
    assert besides(held, 16.0, [100.0, 0.0]) == 16.0 + 100.0 - 30.0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("micro_batches", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_no_stage_begins_where_rows_are_with_their_experts(kind, micro_batches):
    """The stage that would receive them does not know how many a device has there."""
    captured = compiler.trace(*FAMILIES["mixtral"](8, 8))
    options = PlanOptions(load("cpu-gloo"), strategy="expert", baselines=False)
    mesh = Mesh.parse("pp=2,ep=2")
    plan = plan_pipeline(captured, mesh, options, schedule=kind, micro_batches=micro_batches).plan
    _, stages = compiler.stages_of(captured, plan)
    passing = [s.sharding(plan.sharding).leaves[n] for s in stages for n in (*s.received, *s.arriving)]
    assert passing and not any(layout.owned_axes for layout in passing)
