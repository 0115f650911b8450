"""The first backward of a capture frees what it has read, as later ones do, and its gradients share no memory."""

from __future__ import annotations

import torch
from torch import fx

from autopar.models import build
from autopar.runtime.gradient_graph import GradientGraph
from autopar.utils.allocation_tracker import Allocations

from .parity import pair

aten = torch.ops.aten


def peaks(module, inputs, steps: int = 2) -> list[int]:
    """Bytes at the peak of each step, from the first one on."""
    found = []
    for _ in range(steps):
        with Allocations() as seen:
            seen.hold("parameters", module.parameters())
            seen.leave_out(inputs.values())
            module(**inputs).loss.backward()
            module.zero_grad()
        found.append(seen.peak_bytes)
    return found


def test_peak_of_the_first_step(alone):
    module, inputs = build("gpt:hidden=32,layers=6,heads=2,vocab=64,seq=32", batch=4, seq=32, device="cpu")
    parallel, _ = pair(module, alone, inputs)
    first, second = peaks(parallel, inputs)
    assert first <= 1.02 * second


class _Groups:
    are_gloo, mesh = False, "dp=1"

    def bind(self, names, lane):
        return {}


def test_results_that_share_memory_are_copied():
    """A result that is a view of a saved value, one that is another result, and one that repeats an element; not one
    that has a part of a buffer to itself, nor one in memory that a freed value had."""
    graph = fx.Graph()
    a, b = (graph.placeholder(name) for name in "ab")
    view = graph.call_function(aten.t.default, (a,))
    product = graph.call_function(aten.mul.Tensor, (b, 2.0))
    again = graph.call_function(aten.view.default, (product, [16]))
    whole = graph.call_function(aten.add.Tensor, (product, 1.0))
    low, high = (graph.call_function(aten.slice.Tensor, (whole, 0, i, i + 2)) for i in (0, 2))
    row = graph.call_function(aten.expand.default, (graph.call_function(aten.sum.default, (b,)), [3]))
    graph.output((view, product, again, low, high, row))
    gradients = GradientGraph(fx.GraphModule(torch.nn.Module(), graph), _Groups(), torch.device("cpu"), "backward")
    for _ in range(2):
        results = gradients([torch.ones(4, 4), torch.ones(4, 4)])
        assert gradients.to_copy == [True, False, True, False, False, True]
        for result in results:
            result.zero_()
        assert all((r == 0).all() for r in results)


def test_memory_that_is_used_again():
    """A result in memory that a freed value had is its own: no copy is made of it."""
    graph = fx.Graph()
    a = graph.placeholder("a")
    b = graph.call_function(aten.sum.default, (a,))
    graph.output(
        (graph.call_function(aten.expand.default, (b, [1])), graph.call_function(aten.full.default, ([64], 1.0)))
    )
    gradients = GradientGraph(fx.GraphModule(torch.nn.Module(), graph), _Groups(), torch.device("cpu"), "backward")
    gradients([torch.ones(64)])
    assert gradients.to_copy == [False, False]
