"""Looped collectives as they are emitted: same values, same bytes, rows written in place, for all shapes and counts of
devices; and what has no place for a loop is an error."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import fx

from autopar._torch import fake_mode
from autopar.codegen.verify_graph import check_local, check_ranks
from autopar.errors import VerifyError
from autopar.ir.graph import OutputRole, Role
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ops import autopar
from autopar.passes.distribute.loop import loop
from autopar.passes.distribute.lower_ops import lower_ops
from autopar.passes.distribute.partition import partition
from autopar.plans.sharding import Loop, NodeSharding, Sharding
from autopar.simulate.collectives import Simulator, assemble

from .lowering import links, local_graphs, local_inputs

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def new_memory_is_nan():
    """Memory that nothing writes to shows in the values."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


class Case:
    """A graph of products of one tensor (a gather), or of products that are added up (a reduce-scatter), over some
    devices that cut `dim`. Every tensor is a placeholder with random values."""

    def __init__(self, kind: str, targets: list, shape: list[int], dim: int, mesh: Mesh):
        self.mesh, self.graph, self.values, self.kind = mesh, fx.Graph(), {}, kind
        self.leaves, self.nodes, self.mode = {}, {}, fake_mode()
        self.generator = torch.Generator().manual_seed(0)
        rows, whole = Layout(tuple(("tp",) if d == dim else () for d in range(len(shape)))), len(shape)
        last = Layout((*((),) * (whole - 1), ("tp",)))
        partial = Layout(((),) * whole, (("tp", "sum"),))
        outputs = []
        x = self.leaf("x", shape, rows) if kind == "all_gather" else None
        for i, target in enumerate(targets):
            depth = shape[-1] if x is not None else 4 * mesh.size("tp") + i
            columns = 3 * mesh.size("tp") + i if x is not None else 6
            is_linear = target is autopar.linear.default
            cut = ((("tp",), ()) if is_linear else ((), ("tp",))) if x is not None else (
                ((), ("tp",)) if is_linear else (("tp",), ()))  # fmt: skip
            weight = self.leaf(f"w{i}", [columns, depth] if is_linear else [depth, columns], Layout(cut))
            if x is not None:
                one = self.op(f"product{i}", target, (x, weight), (Layout.replicated(whole), Layout(cut)), last)
                outputs.append((one, last))
            else:
                a = self.leaf(f"a{i}", [*shape[:-1], depth], last)
                one = self.op(f"product{i}", target, (a, weight), (last, Layout(cut)), partial)
                if outputs:
                    before, _ = outputs.pop()
                    one = self.op(f"sum{i}", aten.add.Tensor, (before, one), (partial, partial), partial)
                outputs.append((one, rows))
        if x is not None:
            outputs.append((self.op("others", aten.neg.default, (x,), (Layout.replicated(whole),),
                                    Layout.replicated(whole)), Layout.replicated(whole)))  # fmt: skip
        self.roles = [OutputRole("output", str(i)) for i in range(len(outputs))]
        self.graph.output(tuple(one for one, _ in outputs)).meta["roles"] = self.roles
        self.outputs = [layout for _, layout in outputs]
        self.joint = fx.GraphModule(torch.nn.Module(), self.graph)
        moved = "x" if x is not None else outputs[0][0].name
        layout = Layout.replicated(whole) if x is not None else rows
        products = tuple(f"product{i}" for i in range(len(targets)))
        self.loop = Loop(kind, moved, layout, "forward", products)
        self.sharding = Sharding(mesh, links(mesh), 1e11, self.nodes, self.leaves, tuple(self.outputs))

    def leaf(self, name: str, shape, layout: Layout) -> fx.Node:
        node = self.graph.placeholder(name)
        self.values[name] = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        with self.mode:
            value = torch.empty(shape, dtype=torch.float64)
        node.meta = {"val": value, "role": Role("input", name), "phase": "forward"}
        self.leaves[name] = layout
        return node

    def op(self, name: str, target, args, inputs, output: Layout) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, {}, name)
        with self.mode:
            value = target(*(a.meta["val"] for a in args))
        node.meta = {"val": value, "phase": "forward", "module": name, "source": ""}
        self.nodes[node.name] = NodeSharding(tuple(inputs), (output,))
        return node

    def run(self, loops) -> tuple[list[torch.Tensor], list[float], list[fx.GraphModule]]:
        """Return the global outputs, the bytes that each device sends, and the graphs."""
        graphs = [loop(graph, loops) if loops else graph for graph in local_graphs(self.joint, self.sharding)]
        for graph in graphs:
            check_local(graph, self.mesh, computes=True)
        check_ranks(graphs)
        simulator = Simulator(self.mesh)
        found = simulator.run([partition(lower_ops(g)).forward for g in graphs],
                              [local_inputs(g, self.values)[0] for g in graphs])  # fmt: skip
        shapes = [one.meta["val"].shape for one in self.joint.graph.output_node().args[0]]
        whole = [
            assemble([values[i] for values in found], layout, self.mesh, shape)
            for i, (layout, shape) in enumerate(zip(self.outputs, shapes))
        ]
        return whole, simulator.bytes_sent, graphs


def drawn(seed: int) -> Case:
    """Products of each kind, on 2 to 5 devices that cut any dim of rows, often unevenly, beside another axis."""
    draw = random.Random(seed)
    size, kind = draw.randrange(2, 6), ("all_gather", "reduce_scatter")[seed % 2]
    targets = [draw.choice([autopar.linear.default, autopar.linear_dx.default]) for _ in range(draw.randrange(1, 4))]
    shape = [draw.randrange(1, 4) for _ in range(draw.randrange(2, 5))]
    dim = draw.randrange(len(shape) - 1)
    shape[dim] = next(n for n in iter(lambda: draw.randrange(size, 4 * size), None) if -(-n // size) * (size - 1) < n)
    return Case(kind, targets, shape, dim, Mesh(("dp", "tp"), (draw.randrange(1, 3), size)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(60))
def test_values_and_bytes(seed):
    case = drawn(seed)
    wanted, bytes_, _ = case.run(())
    found, looped_bytes, graphs = case.run((case.loop,))
    for mine, value in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, value, rtol=1e-12, atol=1e-12)
    assert looped_bytes == bytes_
    size = case.mesh.size("tp")
    for graph in graphs:
        kinds = Counter(n.meta["collective"].kind for n in graph.graph.nodes if n.meta.get("collective"))
        assert kinds == {f"{case.kind}_loop": size - 1}
        assert not any(n.target is aten.cat.default and n.name != "x_all_gather" for n in graph.graph.nodes)


def test_messages_travel_beside_products():
    """Between the start of a message and its wait are the products of the block before."""
    for case in (drawn(0), drawn(1)):
        *_, graphs = case.run((case.loop,))
        order = list(graphs[0].graph.nodes)
        for start in (n for n in order if n.meta.get("collective")):
            (wait,) = start.users
            beside = {n.target for n in order[order.index(start) : order.index(wait)]}
            assert beside & {aten.addmm_.default, aten.baddbmm_.default, aten.mm.default, aten.bmm.default}


def test_rows_are_written_where_they_belong():
    case = Case("all_gather", [autopar.linear.default] * 2, [2, 8, 5], 1, Mesh(("tp",), (4,)))
    *_, (graph, *_) = case.run((case.loop,))
    for product in ("product0", "product1"):
        (node,) = [n for n in graph.graph.nodes if n.name == product]
        assert node.target is autopar.written.default
        whole, parts = node.args
        assert [p.target for p in parts] == [aten.baddbmm_.default] * 4
        out, blocks = torch.zeros(2, 8, 3), [torch.ones(2, 2, 3)] * 4
        assert torch.ops.autopar.written(out, blocks).data_ptr() == out.data_ptr()


@pytest.mark.parametrize("change", [
    dict(kind="reduce_scatter"), dict(tensor="w0"), dict(phase="backward"), dict(products=("product0", "others")),
    dict(products=("product0", "product9")), dict(layout=Layout.parse("tp:S(0)", 3)),
])  # fmt: skip
def test_a_loop_without_a_place(change):
    case = Case("all_gather", [autopar.linear.default], [2, 8, 5], 1, Mesh(("tp",), (2,)))
    with pytest.raises(VerifyError):
        case.run((replace(case.loop, **change),))


def test_part_of_a_sum():
    """All that is added up goes round, or nothing."""
    case = Case("reduce_scatter", [autopar.linear.default] * 2, [2, 8, 5], 1, Mesh(("tp",), (2,)))
    with pytest.raises(VerifyError, match="cannot go round beside product0"):
        case.run((replace(case.loop, products=("product0",)),))


def test_a_loop_of_another_stage():
    case = Case("all_gather", [autopar.linear.default], [2, 8, 5], 1, Mesh(("tp",), (2,)))
    *_, graphs = case.run((replace(case.loop, products=("linear_9",)),))
    assert [n.meta["collective"].kind for n in graphs[0].graph.nodes if n.meta.get("collective")] == ["all_gather"]
