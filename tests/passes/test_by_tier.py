"""All-reduces over several tiers of links: the sums of one collective, with the fewest bytes between the nodes."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch

from autopar import Mesh
from autopar.compiler import lower
from autopar.cost.hierarchy import InSteps
from autopar.hardware.profile import load
from autopar.ir.layout import Layout
from autopar.models import build
from autopar.passes.distribute.by_tier import by_tier
from autopar.plans.plan import Plan
from autopar.simulate import step
from autopar.simulate.collectives import Simulator
from autopar.simulate.compare import verify_model
from tests.helpers.two_tiers import two_tiers

from .lowering import local_graphs, partial_values, redistribution

SMALL = "gpt:hidden=32,layers=2,heads=4,vocab=64,seq=16"
LARGEST = 2**40


def sent_along(graph, axis: str) -> float:
    """Bytes that a rank sends along one axis alone."""
    found = [n.meta["collective"] for n in graph.graph.nodes if n.meta.get("collective")]
    return sum(c.wire_bytes for c in found if c.axes == (axis,))


@pytest.mark.parametrize("mesh", ["a=2,b=2", "a=3,b=2", "a=2,b=3", "a=1,b=2,c=2", "a=2,b=2,c=3"])
def test_sums_and_maxima_are_those_of_one_collective(mesh):
    mesh, seed = Mesh.parse(mesh), Random().randrange(10**6)
    print("seed", seed)
    rng = Random(seed)
    for _ in range(12):
        shape = [rng.choice([1, 2, 3, 5, 8, 12]) for _ in range(rng.randint(0, 3))]
        reduction, lowering = rng.choice(["sum", "max"]), rng.choice(["native", "all_to_all"])
        axes = [a for a in mesh.names if mesh.size(a) > 1]
        source = Layout(tuple(() for _ in shape), tuple((axis, reduction) for axis in axes))
        inner = axes[rng.randint(1, len(axes) - 1) :]
        outer = axes[: len(axes) - len(inner)]
        hierarchy = {("all_reduce", tuple(axes)): InSteps("all_reduce", tuple(outer), tuple(inner), 0, LARGEST)}
        if len(outer) > 1:  # three tiers
            hierarchy["all_reduce", tuple(outer)] = InSteps("all_reduce", tuple(outer[:1]), tuple(outer[1:]), 0, LARGEST)
        joint, sharding = redistribution(shape, source, Layout.replicated(len(shape)), mesh)
        value, blocks = partial_values(shape, source, mesh, torch.Generator().manual_seed(seed))
        simulator = Simulator(mesh)
        graphs = [by_tier(g, mesh, hierarchy, lowering) for g in local_graphs(joint, sharding)]
        results = simulator.run(graphs, [[b] for b in blocks])
        for rank, (result,) in enumerate(results):
            torch.testing.assert_close(result, value(mesh.coordinate(rank)), rtol=1e-12, atol=1e-12)
            assert result.shape == torch.Size(shape)
        assert {call[1] for call in simulator.calls} >= {tuple(inner)} and ("a", "b") not in {
            call[1] for call in simulator.calls if len(axes) == 2
        }
        inside = math.prod(mesh.size(a) for a in inner)
        if math.prod(shape) % inside == 0 and len(outer) == 1 and reduction == "sum":
            nodes, bytes_ = mesh.size(outer[0]), 8 * math.prod(shape)
            assert sent_along(graphs[0], outer[0]) == pytest.approx(2 * (nodes - 1) / nodes * bytes_ / inside)
            assert simulator.bytes_sent[0] == pytest.approx(2 * (nodes * inside - 1) / (nodes * inside) * bytes_)


def test_too_few_bytes_go_at_once():
    mesh = Mesh.parse("a=2,b=2")
    joint, sharding = redistribution((4, 4), Layout.parse("a:P b:P", 2), Layout.parse("R", 2), mesh)
    (graph, *_) = local_graphs(joint, sharding)
    by_tier(graph, mesh, {("all_reduce", ("a", "b")): InSteps("all_reduce", ("a",), ("b",), 129, LARGEST)}, "native")
    assert [n.meta["collective"].axes for n in graph.graph.nodes if n.meta.get("collective")] == [("a", "b")]


def planned(mesh: str, strategy: str, hardware, model: str = SMALL, batch: int = 8, **options):
    module, inputs = build(model, batch=batch, seq=16, device="cpu")
    plan, captured = step.plan_and_capture(
        module, mesh, inputs, hardware=hardware, strategy=strategy, baselines=False, **options
    )
    return module, inputs, plan, captured


def test_what_is_priced_is_emitted():
    """DDP over two nodes of two: the gradients' bytes between nodes are the least, but for those too few to cut."""
    module, _, plan, captured = planned("dp=2,tp=2", "ddp", two_tiers())
    graph = lower(captured, plan, 0, check=True).local
    gradient_bytes = 4 * sum(p.numel() for p in module.parameters())
    assert sent_along(graph, "dp") == pytest.approx(2 / 2 * gradient_bytes / 2, rel=0.03)
    reduced = [c for c in plan.collectives if c.kind == "all_reduce" and set(c.axes) == {"dp", "tp"}]
    *_, one_tier, _ = planned("dp=2,tp=2", "ddp", load("cpu-gloo"))
    assert reduced and not one_tier.sharding.hierarchy
    steps = plan.sharding.hierarchy["all_reduce", ("dp", "tp")]
    assert (steps.outer, steps.inner) == (("dp",), ("tp",))


def test_an_axis_that_leaves_its_node_is_cut_in_two():
    """DDP over one axis of two nodes sends as few bytes between them as over two axes."""
    module, inputs, plan, captured = planned("dp=4", "ddp", two_tiers())
    graph = lower(captured, plan, 0, check=True).local
    gradient_bytes = 4 * sum(p.numel() for p in module.parameters())
    assert sent_along(graph, "dp//2") == pytest.approx(2 / 2 * gradient_bytes / 2, rel=0.03)
    assert verify_model(module, inputs, "dp=4", hardware=two_tiers(), strategy="ddp").match


@pytest.mark.parametrize(
    ("mesh", "micro_batches"), [("dp=2,tp=2", 1), ("dp=4", 1), ("pp=2,dp=2,tp=2", 2), ("pp=2,dp=4", 2)]
)
def test_a_plan_file_says_what_goes_by_tier(tmp_path, mesh, micro_batches):
    *_, plan, _ = planned(mesh, "ddp", two_tiers(), micro_batches=micro_batches)
    assert [*plan.sharding.hierarchy] == [("dp", "tp") if "tp" in mesh else ("dp",)]
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.sharding.hierarchy == plan.sharding.hierarchy and loaded.hash == plan.hash


@pytest.mark.sampled(2)
@pytest.mark.parametrize("batch", [8, 9])
@pytest.mark.parametrize(("mesh", "strategy", "options"), [
    ("dp=2,tp=2", "ddp", {}),
    ("dp=4", "ddp", {}),
    ("dp=6", "ddp", {}),
    ("dp=4,tp=2", "ddp", {}),
    ("dp=3,tp=2", "ddp", {}),
    ("dp=2,tp=2", "megatron", {}),
    ("dp=2,tp=2", "auto", {}),
    ("a=2,b=2,c=2", "ddp", {}),
    ("dp=2,tp=2", "ddp", {"micro_batches": 2}),
    ("pp=2,dp=2,tp=2", "ddp", {"micro_batches": 2}),
])  # fmt: skip
def test_gradients_are_those_of_one_device(mesh, strategy, options, batch):
    module, inputs = build(SMALL, batch=batch, seq=16, device="cpu")
    report = verify_model(module, inputs, mesh, hardware=two_tiers(), strategy=strategy, **options)
    assert report.match, str(report)
