"""Collectives over several tiers of links: the values of one collective, with the fewest bytes between the nodes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import Mesh
from autopar._torch import c10d, storage_key
from autopar.codegen.verify_graph import check_ranks
from autopar.compiler import lower
from autopar.cost.collectives import CollectiveCost
from autopar.cost.hierarchy import STEPS, InSteps
from autopar.hardware.profile import load
from autopar.ir.graph import bytes_of
from autopar.ir.layout import Layout, local_part
from autopar.ir.mesh import joined
from autopar.models import build
from autopar.passes.distribute.by_tier import by_tier
from autopar.plans.plan import Plan
from autopar.simulate import step
from autopar.simulate.collectives import Simulator
from autopar.simulate.compare import verify_model, verify_plan
from tests.helpers import gloo, kept
from tests.helpers.two_tiers import two_tiers

from .lowering import local_graphs, partial_values, random_layout, redistribution

SMALL = "gpt:hidden=32,layers=2,heads=4,vocab=64,seq=16"
SHALLOW = SMALL.replace("layers=2", "layers=1")
LARGEST = 2**40
aten = torch.ops.aten


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
            hierarchy["all_reduce", tuple(outer)] = InSteps(
                "all_reduce", tuple(outer[:1]), tuple(outer[1:]), 0, LARGEST
            )
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


def hierarchies(mesh: Mesh) -> dict:
    """Every collective over several axes, or over one of four or more devices, in steps: of three tiers where it can
    be."""
    found = {}

    def add(kind: str, parts: list[str]) -> None:
        if len(parts) > 1:
            found[kind, joined(parts)] = InSteps(kind, joined(parts[:-1]), (parts[-1],), 0, LARGEST)
            add(kind, parts[:-1])

    for kind, n in itertools.product(STEPS, range(1, len(mesh.names) + 1)):
        for axes in itertools.combinations(mesh.names, n):
            parts = [[f"{a}//2", f"{a}%2"] if mesh.size(a) in (4, 6) else [a] for a in axes]
            add(kind, [*itertools.chain(*parts)])
    return found


def expected_bytes(graphs, mesh: Mesh, hierarchy: dict) -> Counter:
    """Return by axes the bytes that all devices send, in closed form: gathers and reduce-scatters by their tiers."""
    found: Counter = Counter()
    for node in (n for g in graphs for n in g.graph.nodes if n.meta.get("collective")):
        kind, axes = node.meta["collective"].kind, node.meta["collective"].axes
        held = bytes_of(node.args[0].meta["val"])
        while (kind, axes) in hierarchy and kind == "reduce_scatter":
            steps = hierarchy[kind, axes]
            n = math.prod(map(mesh.size, steps.inner))
            found[steps.inner] += (n - 1) / n * held
            held, axes = held / n, steps.outer
        count = math.prod(map(mesh.size, axes))
        if kind == "all_gather":
            rest = [axes]
            while (kind, rest[0]) in hierarchy:
                steps = hierarchy[kind, rest[0]]
                rest[:1] = [steps.outer, steps.inner]
            for some in rest:
                n = math.prod(map(mesh.size, some))
                found[some] += (n - 1) * held
                held *= n
        else:
            found[axes] += held * {"reduce_scatter": (count - 1) / count, "all_to_all": (count - 1) / count}[kind]
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("mesh", ["a=4", "a=6", "a=2,b=2", "a=3,b=2", "a=4,b=2", "a=2,b=2,c=2"])
def test_gathers_and_reduce_scatters_are_those_of_one_collective(mesh, dtype):
    mesh, seed, seen = Mesh.parse(mesh), Random().randrange(10**6), Counter()
    print("seed", seed)
    rng, generator, hierarchy = Random(seed), torch.Generator().manual_seed(seed), hierarchies(mesh)
    while sum(seen.values()) < 4 or len(seen) < 2:
        shape = [rng.choice([1, 2, 3, 5, 8, 12]) for _ in range(rng.randint(1, 3))]
        reduction = rng.choice([None, "sum", "max"])
        source, target = random_layout(rng, shape, mesh, reduction), random_layout(rng, shape, mesh)
        joint, sharding = redistribution(shape, source, target, mesh, seed, dtype)
        if sharding.redistributor(source, target) is None:
            continue
        plain = local_graphs(joint, sharding)
        kinds = {n.meta["collective"].kind for n in plain[0].graph.nodes if n.meta.get("collective")}
        if "all_reduce" in kinds or not kinds & {"all_gather", "reduce_scatter"}:
            continue
        seen.update(kinds & {"all_gather", "reduce_scatter"})
        wanted = expected_bytes(plain, mesh, hierarchy)
        lowering = rng.choice(["native", "all_to_all"])
        graphs = [by_tier(g, mesh, hierarchy, lowering) for g in local_graphs(joint, sharding)]
        check_ranks(graphs)
        values = torch.randint(-4, 5, (mesh.devices, *shape), generator=generator).to(dtype)  # sums are exact
        blocks = [
            [local_part(x, source, mesh, mesh.coordinate(rank))] if source.partial else
            [local_part(values[0], source, mesh, mesh.coordinate(rank))] for rank, x in enumerate(values)
        ]  # fmt: skip
        one, several = Simulator(mesh), Simulator(mesh)
        for expected, found in zip(one.run(plain, blocks), several.run(graphs, blocks), strict=True):
            assert torch.equal(expected[0], found[0]) and found[0].is_contiguous(), f"{shape} {source} -> {target}"
        assert several.bytes_sent == pytest.approx(one.bytes_sent)
        sent: Counter = Counter()
        for node in (n for g in graphs for n in g.graph.nodes if n.meta.get("collective")):
            sent[node.meta["collective"].axes] += node.meta["collective"].wire_bytes
        assert {a: b for a, b in sent.items() if b} == pytest.approx({a: b for a, b in wanted.items() if b})


def test_too_few_bytes_go_at_once():
    mesh = Mesh.parse("a=2,b=2")
    joint, sharding = redistribution((4, 4), Layout.parse("a:P b:P", 2), Layout.parse("R", 2), mesh)
    (graph, *_) = local_graphs(joint, sharding)
    by_tier(graph, mesh, {("all_reduce", ("a", "b")): InSteps("all_reduce", ("a",), ("b",), 129, LARGEST)}, "native")
    assert [n.meta["collective"].axes for n in graph.graph.nodes if n.meta.get("collective")] == [("a", "b")]


def planned(mesh: str, strategy: str, hardware, model: str = SMALL, batch: int = 8, **options):
    module, inputs = build(model, batch=batch, seq=16, device="cpu")
    plan, captured = step.plan_and_capture(
        module, mesh, inputs, hardware=hardware, strategy=strategy, baselines=False, cache=kept.captures(), **options
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
    assert verify_plan(captured, plan, module, inputs).match


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mesh", "micro_batches"), [("dp=2,tp=2", 1), ("dp=4", 1), ("pp=2,dp=2,tp=2", 2), ("pp=2,dp=4", 2)]
)
def test_a_plan_file_says_what_goes_by_tier(tmp_path, mesh, micro_batches):
    *_, plan, _ = planned(mesh, "ddp", two_tiers(), SHALLOW, micro_batches=micro_batches)
    axes = ("dp", "tp") if "tp" in mesh else ("dp",)
    assert [*plan.sharding.hierarchy] == [(kind, axes) for kind in STEPS]
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.sharding.hierarchy == plan.sharding.hierarchy and loaded.hash == plan.hash


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("strategy", "shares", "lowering"),
    [("zero1", 2, "native"), ("zero1", 2, "all_to_all"), ("fsdp", 3, "all_to_all"), ("fsdp", 3, "native")],
)
def test_sharded_parameters_cross_between_nodes_once_a_pass(strategy, shares, lowering):
    """ZeRO-1 gathers once and reduces once, FSDP gathers twice: of each a device sends a quarter of the parameters to
    its peer in the other node, by whatever collectives reductions are, and nothing goes over the axis at once but what
    is too little to cut."""
    hardware = replace(two_tiers(), reduce_scatter_lowering=lowering)
    module, _, plan, captured = planned("dp=4", strategy, hardware)
    graph = lower(captured, plan, 0, check=True).local
    parameter_bytes = 4 * sum(p.numel() for p in module.parameters())
    assert sent_along(graph, "dp//2") == pytest.approx(shares / 4 * parameter_bytes, rel=0.05)
    assert sent_along(graph, "dp") < 0.06 * parameter_bytes
    targets = {n.target for n in graph.graph.nodes if n.meta.get("collective")}
    assert (c10d.reduce_scatter_tensor.default in targets) == (lowering == "native")


def copied_bytes(graph) -> int:
    """Bytes of values that lie in memory of their own, without what collectives bring and what they add up."""
    found = 0
    for node in graph.graph.nodes:
        if node.target in (aten.reshape.default, aten.clone.default, aten.cat.default, aten.permute.default):
            value = node.meta["val"]
            sources = [a.meta["val"] for a in node.all_input_nodes]
            found += bytes_of(value) if all(storage_key(value) != storage_key(s) for s in sources) else 0
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["fsdp", "zero1"])
def test_buckets_are_put_in_order_by_the_copies_that_pack_and_unpack_them(strategy):
    _, _, plan, captured = planned("dp=4", strategy, replace(two_tiers(), reduce_scatter_lowering="native"))
    at_once = replace(plan, sharding=replace(plan.sharding, hierarchy={}))
    by_tiers, flat = (lower(captured, p, 0, check=True).local for p in (plan, at_once))
    assert sent_along(by_tiers, "dp//2") and not sent_along(flat, "dp//2")
    assert copied_bytes(by_tiers) <= copied_bytes(flat)


@pytest.mark.slow
def test_what_other_code_gathers_is_priced_at_once(monkeypatch):
    """DTensors gather updates of Muon, and outputs, with one collective."""
    *_, plan, _ = planned("dp=4", "fsdp", two_tiers(), optimizer="muon")
    monkeypatch.setattr(CollectiveCost.__init__, "__defaults__", ("auto", False))
    *_, at_once, _ = planned("dp=4", "fsdp", two_tiers(), optimizer="muon")
    assert plan.sharding.hierarchy and not at_once.sharding.hierarchy
    updates, flat = ([c for c in p.collectives if c.phase == "optimizer"] for p in (plan, at_once))
    assert updates and updates == flat and plan.outputs == at_once.outputs and plan.outputs
    assert plan.communication_seconds < at_once.communication_seconds


def test_on_their_way_are_one_collective_a_tier():
    """A bucket's last gather travels with the next one's first, but before the first product; on CPUs a reduction's
    slow step is behind."""
    _, inputs, plan, captured = planned("dp=4", "fsdp", two_tiers())
    plan = replace(plan, bucket_bytes=2.0**15)
    programs = []
    for ahead in (False, True):
        ranks = [lower(captured, replace(plan, overlaps=ahead), rank) for rank in (0, 3)]
        texts = [[(group, what) for group, what, _ in rank.collectives()] for rank in ranks]
        assert texts[0] == texts[1]
        programs.append(ranks[0])
    at_once, ahead = programs
    for program, deep in ((at_once, 1), (ahead, 2)):
        for part in (program.parts.forward, program.parts.backward):
            for kind in ("all_gather", "reduce_scatter"):
                open_, most, tiers = set(), 0, set()
                for node in part.graph.nodes:
                    if node.meta.get("collective") and node.meta["collective"].kind == kind:
                        open_.add(node)
                        axes = [n.meta["collective"].axes for n in open_]
                        assert kind == "reduce_scatter" or len(axes) == len({*axes})  # never two over one tier
                        tiers.add(frozenset(axes))
                    elif node.target is c10d.wait_tensor.default:
                        open_ -= set(node.all_input_nodes)
                    most = max(most, len(open_))
                assert most <= max(deep, 2 if kind == "reduce_scatter" else 1)
                if kind == "all_gather" and deep == 2:
                    assert frozenset({("dp//2",), ("dp%2",)}) in tiers
    graph = at_once.local.graph
    place = {node: i for i, node in enumerate(graph.nodes)}
    slow = [n for n in graph.nodes if n.meta.get("collective") and n.meta["collective"].axes == ("dp//2",)]
    behind = [place[next(iter(n.users))] - place[n] > 1 for n in slow if n.meta["collective"].kind == "reduce_scatter"]
    assert len(behind) > 2 and all(behind[:-1])


def gradients_of(rank: int, folder: str) -> list[list[torch.Tensor]]:
    """Return loss and local gradients of a step of each of two plans, on processes of gloo."""
    found = []
    for file in ("by_tier.json", "at_once.json"):
        torch.manual_seed(0)
        model, inputs = build(SMALL, batch=8, seq=16, device="cpu")
        module = autopar.compile(model, init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), inputs,
                                 plan=f"{folder}/{file}")  # fmt: skip
        loss = module(**inputs).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad.to_local().clone() for p in module.parameters())])
    return found


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_on_processes(strategy, tmp_path):
    _, _, plan, _ = planned("dp=4", strategy, two_tiers())
    plan.save(tmp_path / "by_tier.json")
    replace(plan, sharding=replace(plan.sharding, hierarchy={})).save(tmp_path / "at_once.json")
    for by_tiers, at_once in gloo.run(4, gradients_of, str(tmp_path)):
        for value, expected in zip(by_tiers, at_once, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("batch", [8, 9])
@pytest.mark.parametrize(("mesh", "strategy", "options"), [
    ("dp=2,tp=2", "ddp", {}),
    ("dp=4", "ddp", {}),
    ("dp=4", "fsdp", {}),
    ("dp=6", "fsdp", {}),
    ("dp=4,tp=2", "fsdp", {}),
    ("dp=4", "zero1", {}),
    ("dp=4", "zero2", {"micro_batches": 2}),
    ("dp=4", "zero1", {"micro_batches": 2}),
    ("dp=4", "fsdp", {"precision": "bf16"}),
    ("dp=4,tp=2", "hsdp", {}),
    ("dp=6", "ddp", {}),
    ("dp=4,tp=2", "ddp", {}),
    ("dp=3,tp=2", "ddp", {}),
    ("dp=2,tp=2", "megatron", {}),
    ("dp=2,tp=2", "auto", {}),
    ("a=2,b=2,c=2", "ddp", {}),
    ("dp=2,tp=2", "ddp", {"micro_batches": 2}),
    ("pp=2,dp=2,tp=2", "ddp", {"micro_batches": 2}),
    ("pp=2,dp=4", "fsdp", {"micro_batches": 2}),
])  # fmt: skip
def test_gradients_are_those_of_one_device(mesh, strategy, options, batch):
    module, inputs = build(SHALLOW, batch=batch, seq=16, device="cpu")
    options = dict(hardware=two_tiers(), strategy=strategy, cache=kept.captures()) | options
    report = verify_model(module, inputs, mesh, **options)
    assert report.match, str(report)
