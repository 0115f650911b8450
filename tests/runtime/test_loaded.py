"""Graphs as they are loaded."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import fx

from autopar.runtime.loaded import LoadedGraph

aten = torch.ops.aten


def test_a_run_leaves_the_graph_as_it_was():
    """torch.compile, and what follows sizes, takes it after a run too."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(aten.mul.Tensor, (x, x)),))
    groups = SimpleNamespace(bind=lambda names: {}, are_gloo=True)
    loaded = LoadedGraph(fx.GraphModule({}, graph), groups, torch.device("cpu"), "forward")
    before = loaded.module.code
    (found,) = loaded.run([torch.tensor(3.0)])
    assert float(found) == 9.0
    assert loaded.module.code == before and "torch.ops.aten.mul.Tensor" in before
