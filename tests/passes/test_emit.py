"""Every redistribution gives every rank the block that its layout says, with the bytes that the planner was told."""

import itertools
import random

import pytest
import torch

from autopar.ir.layout import Layout, is_even, is_legal, local_part
from autopar.ir.mesh import Mesh
from autopar.passes.distribute.emit import Collective
from autopar.passes.distribute.localize import localize
from autopar.simulate.collectives import Simulator

from .lowering import local_graphs, partial_values, random_layout, redistribution

MESHES = [Mesh.parse(m) for m in ("a=2", "a=3", "a=4", "a=2,b=2", "a=2,b=3", "a=2,b=2,c=2", "a=1,b=2")]


def check(shape, source, target, mesh, reduce_scatter="native", seed=0):
    """Run one redistribution on all ranks and compare every block with the one cut from the combined value."""
    case = f"{shape} on {mesh}: {source} -> {target}, {reduce_scatter}, seed {seed}"
    joint, sharding = redistribution(shape, source, target, mesh, seed)
    moves = sharding.redistributor(source, target)
    value, blocks = partial_values(shape, source, mesh, torch.Generator().manual_seed(seed))
    simulator = Simulator(mesh)
    if target.partial:  # what the verifier forbids, but a step on the way may be so
        graphs = [localize(joint, sharding, rank, reduce_scatter) for rank in range(mesh.devices)]
    else:
        graphs = local_graphs(joint, sharding, reduce_scatter)
    results = simulator.run(graphs, [[b] for b in blocks])
    still_partial = [axis for axis, _ in target.partial]
    for rank, (result,) in enumerate(results):
        coordinate = mesh.coordinate(rank)
        expected = local_part(value(coordinate, still_partial), target, mesh, coordinate)
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12, msg=f"rank {rank}, {case}")
        assert result.is_contiguous(), f"rank {rank}, {case}"
    if all(is_even(shape, layout, mesh) for s in moves.steps for layout in (s.before, s.after)):
        predicted = moves.wire_fraction * torch.tensor(shape).prod().item() * 8
        assert simulator.bytes_sent == pytest.approx([predicted] * mesh.devices), case
    return simulator


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_random_pairs(mesh):
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(40):
        shape = [rng.choice([4, 5, 6, 7, 9, 12, 24]) for _ in range(rng.randint(1, 3))]
        source = random_layout(rng, shape, mesh, rng.choice(["sum", "max", None]))
        target = random_layout(rng, shape, mesh)
        if source.partial and rng.random() < 0.3:  # some axes stay partial
            axis, reduction = source.partial[0]
            if axis not in target.sharding_axes:
                target = Layout(target.dims, ((axis, reduction),), target.parts)
        check(shape, source, target, mesh, rng.choice(["native", "all_to_all"]), rng.randrange(10**6))


def all_layouts(mesh, ndim):
    """Every layout of one part, in every order of axes."""
    for choice in itertools.product(range(-2, ndim), repeat=len(mesh.names)):
        partial = tuple((axis, "sum") for axis, c in zip(mesh.names, choice) if c == -2)
        on = [[axis for axis, c in zip(mesh.names, choice) if c == d] for d in range(ndim)]
        for dims in itertools.product(*(itertools.permutations(axes) for axes in on)):
            yield Layout(tuple(dims), partial)


@pytest.mark.slow
def test_all_pairs_on_two_axes():
    mesh, shape = Mesh.parse("a=2,b=2"), (5, 7)
    layouts = [l for l in all_layouts(mesh, 2) if is_legal(shape, l, mesh)]
    assert len(layouts) == 18
    for source, target in itertools.product(layouts, repeat=2):
        if set(target.partial) <= set(source.partial):
            check(shape, source, target, mesh)


def parse(text, ndim=2):
    return Layout.parse(text, ndim)


def targets(graph):
    return [str(n.target).split(".")[1] for n in graph.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("devices", [2, 8])
def test_graph_does_not_grow_with_the_group(devices):
    mesh = Mesh.parse(f"a={devices}")
    joint, sharding = redistribution((16, 16), parse("a:S(1)"), parse("R"), mesh)
    graph = local_graphs(joint, sharding)[0]
    assert targets(graph) == ["all_gather_into_tensor", "wait_tensor", "reshape", "permute", "reshape"]


def test_moves_on_dim_0_need_no_reshape():
    mesh = Mesh.parse("a=2")
    for source, target, op in [
        ("a:S(0)", "R", "all_gather_into_tensor"),
        ("a:P", "a:S(0)", "reduce_scatter_tensor"),
        ("a:P", "R", "all_reduce"),
    ]:
        joint, sharding = redistribution((4, 4), parse(source), parse(target), mesh)
        assert targets(local_graphs(joint, sharding)[0]) == [op, "wait_tensor"]


def test_blocks_of_one_element_give_contiguous_results():
    """The reshape that joins them is a view with strange strides, which some kernels do not look at."""
    check((3, 4), parse("a:S(1)"), parse("R"), Mesh.parse("a=4"))


def test_only_the_short_rank_pads():
    mesh = Mesh.parse("a=3")
    joint, sharding = redistribution((7, 2), parse("a:S(0)"), parse("R"), mesh)
    padded = ["constant_pad_nd" in targets(graph) for graph in local_graphs(joint, sharding)]
    assert padded == [False, False, True]


def test_all_reduce_over_two_axes_is_one_collective():
    mesh = Mesh.parse("a=2,b=2")
    simulator = check((4, 4), parse("a:P b:P"), parse("R"), mesh)
    assert simulator.calls == [("all_reduce", ("a", "b"), (0, 1, 2, 3))]


@pytest.mark.parametrize("source", ["a:S(0) b:S(0)", "b:S(0) a:S(0)", "a:S(1) b:S(1)"])
@pytest.mark.parametrize("shape", [(8, 12), (7, 11), (2, 3)])
def test_a_gather_over_two_axes_is_one_collective(source, shape):
    """Blocks of either order of the axes, even and uneven."""
    mesh = Mesh.parse("a=2,b=2")
    layout = Layout.parse(source, 2) if source[0] == "a" else Layout((("b", "a"), ()))
    simulator = check(shape, layout, parse("R"), mesh)
    assert simulator.calls == [("all_gather_into_tensor", ("a", "b"), (0, 1, 2, 3))]


@pytest.mark.parametrize("reduce_scatter", ["native", "all_to_all"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(12, 24), (11, 16), (16, 11)])
def test_a_reduce_scatter_over_two_axes_is_one_collective(shape, dim, reduce_scatter):
    """Even and uneven blocks; in the other order of the axes, the closest first, one after the other."""
    mesh = Mesh.parse("a=2,b=3")
    for axes, calls in ((("a", "b"), [("a", "b")]), (("b", "a"), [("b",), ("a",)])):
        target = Layout(tuple(axes if d == dim else () for d in range(2)))
        simulator = check(shape, parse("a:P b:P"), target, mesh, reduce_scatter)
        assert list(dict.fromkeys(call[1] for call in simulator.calls)) == calls


def test_axes_of_one_device_make_no_node():
    mesh = Mesh.parse("a=1,b=2")
    joint, sharding = redistribution((4, 4), parse("a:P b:P"), parse("a:S(1)"), mesh)
    assert targets(local_graphs(joint, sharding)[0]) == ["all_reduce", "wait_tensor"]


def test_collective_says_what_it_is():
    mesh = Mesh.parse("a=2")
    joint, sharding = redistribution((4, 4), parse("a:S(0)"), parse("R"), mesh)
    (said,) = [n.meta["collective"] for n in local_graphs(joint, sharding)[0].graph.nodes if "collective" in n.meta]
    assert said == Collective("all_gather", ("a",), 64.0, "x", "forward")
