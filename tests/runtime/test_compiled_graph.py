"""A graph behind torch.compile: Inductor frees arguments after their last use, and compiles once for all sizes that a
program follows."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import fx

from autopar.codegen.follow_size import followed
from autopar.errors import CompilerError
from autopar.runtime import compiled_graph as graphs
from autopar.runtime.compiled_graph import compiled_graph
from autopar.runtime.loaded import _open_dims

aten = torch.ops.aten
seen: list[list[bool]] = []
watched: list[weakref.ref] = []


@torch.library.custom_op("autopar_tests::note_living", mutates_args=())
def note_living(x: torch.Tensor) -> torch.Tensor:
    """Note which of the watched tensors are alive, in the middle of a graph."""
    seen.append([ref() is not None for ref in watched])
    return x.clone()


@note_living.register_fake
def _(x):
    return torch.empty_like(x)


def chain(count: int) -> fx.GraphModule:
    """Products with one argument after the other, and a look at what lives after each."""
    graph = fx.Graph()
    start, *others = (graph.placeholder(f"x{i}") for i in range(count))
    found = start
    for x in others:
        product = graph.call_function(aten.mm.default, (found, x))
        found = graph.call_function(torch.ops.autopar_tests.note_living.default, (product,))
    graph.output((found,))
    return fx.GraphModule({}, graph)


def run_watched(run, values: list) -> torch.Tensor:
    seen.clear()
    watched[:] = map(weakref.ref, values)
    (result,) = run(values)
    assert values == []
    return result


def test_arguments_are_freed_after_their_last_use():
    module = chain(5)
    run = compiled_graph(module, "backward", {}, {})
    for _ in range(2):  # the call that compiles, too
        values = [torch.randn(8, 8) for _ in range(5)]
        expected = module(*values)[0]
        torch.testing.assert_close(run_watched(run, values), expected)
        assert seen == [[False] * (2 + i) + [True] * (3 - i) for i in range(4)]


def test_dynamo_holds_them():
    run = compiled_graph(chain(3), "backward", {"backend": "aot_eager"}, {})
    run_watched(run, [torch.randn(8, 8) for _ in range(3)])
    assert seen[-1] == [True] * 3


def of_size(rows: int) -> fx.GraphModule:
    """A graph for (rows, 6) and (rows - 1, 6), in which the rows are numbers."""
    graph = fx.Graph()
    x, y, w = (graph.placeholder(name) for name in "xyw")
    for node, shape in (x, (rows, 6)), (y, (rows - 1, 6)), (w, (6, 4)):
        node.meta["val"] = torch.empty(shape, device="meta")
    product = graph.call_function(aten.mm.default, (x, w))
    flat = graph.call_function(aten.view.default, (product, [rows * 4]))
    cut = graph.call_function(aten.slice.Tensor, (flat, 0, 0, (rows - 1) * 4))
    total = graph.call_function(aten.sum.default, (y,))
    mean = graph.call_function(aten.div.Tensor, (total, float(rows)))
    graph.output((graph.call_function(aten.add.Tensor, (cut, mean)),))
    return fx.GraphModule({}, graph)


@pytest.fixture
def made(monkeypatch):
    """The programs that Inductor makes."""
    programs = []
    original = graphs._torch.InductorProgram

    def counted(*arguments):
        programs.append(original(*arguments))
        return programs[-1]

    monkeypatch.setattr(graphs._torch, "InductorProgram", counted)
    return programs


def test_one_program_for_all_sizes(made):
    programs = {(rows,): of_size(rows) for rows in (9, 13)}
    module, _ = followed(programs)
    open_dims = _open_dims(module, programs.values())
    assert open_dims == {0: {0}, 1: {0}, 2: set(), 3: {0}}
    run = compiled_graph(module, "forward", {}, open_dims)
    w = torch.randn(6, 4)
    for rows in (11, 17, 30, 11, 9):
        values = [torch.randn(rows, 6), torch.randn(rows - 1, 6), w]
        expected = of_size(rows)(*values)
        torch.testing.assert_close(run([*values, rows]), expected)
    assert len(made) == 1
    values = [torch.randn(6, 17).t(), torch.randn(16, 6), w]  # another memory order is another program
    torch.testing.assert_close(run([*values, 17]), of_size(17)(*values))
    assert len(made) == 2


def test_one_program_for_each_form(made):
    run, w = compiled_graph(of_size(9), "forward", {}, {}), torch.randn(6, 4)
    for x in (torch.randn(9, 6), torch.randn(9, 6), torch.randn(6, 9).t()):
        y = torch.randn(8, 6)
        torch.testing.assert_close(run([x, y, w]), of_size(9)(x, y, w))
    assert len(made) == 2


def test_a_graph_that_cannot_be_compiled_leaves_its_arguments():
    values = [torch.randn(8, 6), torch.randn(7, 6), torch.randn(6, 4)]
    with pytest.raises(CompilerError, match="failed on the forward graph"):
        compiled_graph(of_size(9), "forward", {}, {})(values)
    assert len(values) == 3


def test_options_are_those_of_torch_compile():
    with pytest.raises(RuntimeError, match="Unexpected optimization option"):
        compiled_graph(of_size(9), "forward", {"options": {"no_such_option": True}}, {})
