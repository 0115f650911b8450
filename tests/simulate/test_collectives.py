"""The simulator performs collectives as a process group would, counts their bytes, and reports what would hang."""

import random

import pytest
import torch
from torch import fx

from autopar._torch import c10d
from autopar.errors import VerifyError
from autopar.ir.layout import local_part
from autopar.ir.mesh import Mesh
from autopar.simulate.collectives import Simulator, assemble

from ..passes.lowering import partial_values, random_layout

FOUR = Mesh.parse("dp=2,tp=2")


def graph(*calls):
    """x through collectives one after the other, each (op, *arguments after the tensor)."""
    g = fx.Graph()
    value = g.placeholder("x")
    for op, *args in calls:
        value = g.call_function(c10d.wait_tensor.default, (g.call_function(op.default, (value, *args)),))
    g.output((value,))
    return fx.GraphModule(torch.nn.Module(), g)


def run(mesh, graphs, inputs):
    simulator = Simulator(mesh)
    return [out for (out,) in simulator.run(graphs, [[x] for x in inputs])], simulator


def test_collectives_of_a_group():
    two = Mesh.parse("a=2")
    x = [torch.arange(4.0), torch.arange(4.0) + 10]
    halves = [torch.cat([v[:2] for v in x]), torch.cat([v[2:] for v in x])]
    for call, expected, sent in [
        ((c10d.all_reduce, "sum", "a"), [x[0] + x[1]] * 2, 16),
        ((c10d.all_reduce, "max", "a"), [x[1]] * 2, 16),
        ((c10d.all_reduce, "avg", "a"), [x[0] + 5] * 2, 16),
        ((c10d.all_gather_into_tensor, 2, "a"), [torch.cat(x)] * 2, 16),
        ((c10d.reduce_scatter_tensor, "sum", 2, "a"), list((x[0] + x[1]).chunk(2)), 8),
        ((c10d.all_to_all_single, [2, 2], [2, 2], "a"), halves, 8),
    ]:
        results, simulator = run(two, [graph(call)] * 2, x)
        assert all(map(torch.equal, results, expected)), call[0]
        assert simulator.bytes_sent == [sent, sent], call[0]
    results, simulator = run(two, [graph((c10d.broadcast, 1, "a"))] * 2, x)
    assert torch.equal(results[0], x[1]) and simulator.bytes_sent == [0, 16]


def test_uneven_all_to_all():
    """Rank 0 keeps one row and sends two; rank 1 sends three and keeps one."""
    first, second = ((c10d.all_to_all_single, *rows, "a") for rows in (([1, 3], [1, 2]), ([2, 1], [3, 1])))
    graphs = [graph(first), graph(second)]
    results, simulator = run(Mesh.parse("a=2"), graphs, [torch.tensor([0.0, 1, 2]), torch.tensor([10.0, 11, 12, 13])])
    assert [r.tolist() for r in results] == [[0, 10, 11, 12], [1, 2, 13]]
    assert simulator.bytes_sent == [8, 12]
    with pytest.raises(VerifyError, match=r"expects \[2, 2\] rows and is sent \[1, 3\]"):
        wrong = graph((c10d.all_to_all_single, [2, 2], [1, 2], "a"))
        run(Mesh.parse("a=2"), [wrong, graphs[1]], [torch.ones(3), torch.ones(4)])


def test_groups_are_those_of_the_mesh():
    x = [torch.tensor([float(rank)]) for rank in range(4)]
    results, _ = run(FOUR, [graph((c10d.all_reduce, "sum", "dp"))] * 4, x)
    assert [r.item() for r in results] == [2, 4, 2, 4]
    results, _ = run(FOUR, [graph((c10d.all_gather_into_tensor, 4, "dp,tp"))] * 4, x)
    assert all(r.tolist() == [0, 1, 2, 3] for r in results)


def test_groups_run_in_any_order():
    """Ranks 0 and 1 run ahead of 2 and 3 and meet them at the collective over dp."""
    tp, dp = ((c10d.all_reduce, "sum", axis) for axis in ("tp", "dp"))
    ahead, behind = graph(tp, tp, dp), graph(dp)
    results, _ = run(FOUR, [ahead, ahead, behind, behind], [torch.ones(1)] * 4)
    assert [r.item() for r in results] == [5, 5, 5, 5]


def test_inputs_are_not_changed():
    x = [torch.ones(2), torch.ones(2)]
    run(Mesh.parse("a=2"), [graph((c10d.all_reduce, "sum", "a"))] * 2, x)
    assert x[0].tolist() == [1, 1]


SUM = (c10d.all_reduce, "sum", "a")


@pytest.mark.parametrize(
    "other, sizes, message",
    [
        ((c10d.all_reduce, "max", "a"), (4, 4), "rank 0 at all_reduce_default .*; rank 1 at all_reduce_default"),
        ((c10d.all_gather_into_tensor, 2, "a"), (4, 4), "rank 1 at all_gather_into_tensor_default"),
        (SUM, (4, 5), r"rank 0 at .* \(4,\) float32\); rank 1 at .* \(5,\) float32"),
    ],
    ids=["reduction", "op", "shape"],
)
def test_different_collectives_are_reported(other, sizes, message):
    with pytest.raises(VerifyError, match="the ranks of a group call different collectives: .*" + message):
        run(Mesh.parse("a=2"), [graph(SUM), graph(other)], [torch.ones(n) for n in sizes])


def test_different_types_are_reported():
    with pytest.raises(VerifyError, match="float32.* rank 1 at .*float64"):
        run(Mesh.parse("a=2"), [graph(SUM)] * 2, [torch.ones(4), torch.ones(4).double()])


def test_a_rank_that_has_finished_is_missed():
    with pytest.raises(VerifyError, match=r"deadlock: .* ranks \[1\] have finished: rank 0 at all_reduce_default_1"):
        run(Mesh.parse("a=2"), [graph(SUM, SUM), graph(SUM)], [torch.ones(4)] * 2)


def test_ranks_that_wait_for_each_other():
    """0 waits for 1 over tp, 1 for 3 over dp, 3 for 2 over tp, 2 for 0 over dp."""
    tp, dp = (graph((c10d.all_reduce, "sum", axis)) for axis in ("tp", "dp"))
    with pytest.raises(VerifyError, match="deadlock: .*: rank 0, 3 at .* over tp.*; rank 1, 2 at .* over dp"):
        run(FOUR, [tp, dp, dp, tp], [torch.ones(4)] * 4)


@pytest.mark.parametrize("mesh", ["a=3", "a=2,b=2", "a=2,b=3"])
def test_assemble_is_the_inverse_of_local_part(mesh):
    seed = random.randrange(10**6)
    print("seed", seed)
    rng, mesh = random.Random(seed), Mesh.parse(mesh)
    for reduction in ["sum", "max", None] * 5:
        shape = [rng.choice([5, 6, 7, 12]) for _ in range(rng.randint(0, 3))]
        layout = random_layout(rng, shape, mesh, reduction)
        value, blocks = partial_values(shape, layout, mesh, torch.Generator().manual_seed(seed))
        whole = value(mesh.coordinate(0))
        torch.testing.assert_close(assemble(blocks, layout, mesh, shape), whole, msg=f"{shape} {layout}")
        if not layout.partial:
            assert torch.equal(local_part(whole, layout, mesh, mesh.coordinate(1)), blocks[1])
