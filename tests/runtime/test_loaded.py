"""The emitted graphs through torch.compile: the same numbers, for captures of later too, and a typed error if it
fails."""

from types import SimpleNamespace

import pytest
import torch
from torch import fx

import autopar
from autopar.errors import CompilerError
from autopar.runtime.loaded import LoadedGraph
from tests.helpers import gloo

from . import tiny
from .parity import assert_close, assert_same_gradients, device_mesh, pair, planned

X, Y = tiny.Regressor.batch()
CALL = dict(x=X, target=Y)


def _loops(rank: int, plan: autopar.Plan) -> None:
    parallel, reference = pair(tiny.Regressor(loss=True), device_mesh("dp=2"), CALL, plan=plan)
    compiled_calls = []
    parallel.compile(backend=lambda graph, inputs: compiled_calls.append(graph) or graph.forward)
    for call in (CALL, CALL, dict(x=X[:6], target=Y[:6])):  # the last runs in graphs that follow its size
        for module in (parallel, reference):
            module.zero_grad()
            module(**call).loss.backward()
        assert_same_gradients(parallel, reference)
    assert len(compiled_calls) == 4
    for module in (parallel, reference):
        module.zero_grad()
    with parallel.no_sync():
        parallel(**CALL).loss.backward()
    parallel(**CALL).loss.backward()
    for _ in range(2):
        reference(**CALL).loss.backward()
    assert_same_gradients(parallel, reference)
    assert len(compiled_calls) == 6  # the backward that reduces nothing, and the reductions; nothing is compiled twice
    parallel(**CALL).loss.backward()
    assert len(compiled_calls) == 6
    with torch.no_grad():
        assert_close(parallel(**CALL).loss, reference(**CALL).loss)
    around = torch.compile(parallel, backend="eager")
    assert_close(around(**CALL).loss, reference(**CALL).loss)


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_the_same_numbers(strategy):
    gloo.run(2, _loops, planned(tiny.Regressor(loss=True), "dp=2", CALL, strategy=strategy), seconds=240)


def test_errors(alone):
    parallel, _ = pair(tiny.Regressor(loss=True), alone, CALL)

    def failing(graph, inputs):
        raise ValueError("no kernel for it")

    parallel.compile(backend=failing)
    with pytest.raises(CompilerError, match="failed on the forward graph: .*no kernel for it"):
        parallel(**CALL)
    with pytest.raises(CompilerError, match="nobackend"):
        parallel.compile(backend="nobackend")


def test_a_run_leaves_the_graph_as_it_was():
    """torch.compile, and what follows sizes, takes it after a run too."""
    aten, graph = torch.ops.aten, fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(aten.mul.Tensor, (x, x)),))
    groups = SimpleNamespace(bind=lambda names, lane: {}, are_gloo=True, mesh="dp=2")
    loaded = LoadedGraph(fx.GraphModule({}, graph), groups, torch.device("cpu"), "forward")
    before = loaded.module.code
    (found,) = loaded.run([torch.tensor(3.0)])
    assert float(found) == 9.0
    assert loaded.module.code == before and "torch.ops.aten.mul.Tensor" in before
