"""Forward and backward by data flow: what is saved, what is viewed again, what is copied."""

import pytest
import torch
from torch import fx

from autopar.errors import VerifyError
from autopar.ir.graph import OutputRole, Role
from autopar.ir.mesh import Mesh
from autopar.passes.distribute.localize import localize
from autopar.passes.distribute.partition import partition
from autopar.plans.sharding import Sharding

from .lowering import MLP, capture, links

aten = torch.ops.aten
ONE = Mesh.parse("one=1")
OUTPUT = OutputRole("output", "0")


def local_of(model, *inputs):
    joint, values = capture(model, *inputs)
    results = next(iter(reversed(joint.graph.nodes))).args[0]
    sharding = Sharding(ONE, links(ONE), 1e11, {}, {}, (None,) * len(results))
    return localize(joint, sharding, 0), values


def run(parts, local, values):
    """(outputs, gradients) of one step on one device."""
    placeholders = [n for n in local.graph.nodes if n.op == "placeholder"]
    primals = [values[n.name].clone() for n in placeholders if n.meta["role"].kind != "tangent"]
    tangents = [values[n.name] for n in placeholders if n.meta["role"].kind == "tangent"]
    results = parts.forward(*primals)
    split = len(results) - len(parts.saved)
    return results[:split], parts.backward(*results[split:], *tangents)


def test_step_is_that_of_autograd():
    model = MLP()
    inputs = [torch.randn(2, 3, 8, dtype=torch.float64) for _ in range(2)]
    local, values = local_of(model, *inputs)
    (loss,), gradients = run(partition(local), local, values)
    model(*inputs).backward()
    for got, parameter in zip(gradients, (model.scale, model.up, model.down), strict=True):
        torch.testing.assert_close(got, parameter.grad)


class Views(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        y = torch.tanh(x @ self.weight.t())
        return (y.t() @ y).sum()


def test_views_of_saved_values_are_not_saved():
    """The products' backwards read y, its transpose and the weight's transpose: y and the leaves are saved."""
    model, x = Views(), torch.randn(4, 4)
    local, values = local_of(model, x)
    parts = partition(local)
    names = {n.name: n for n in local.graph.nodes}
    assert {names[name].target for name in parts.saved if names[name].op == "call_function"} == {aten.tanh.default}
    (loss,), gradients = run(parts, local, values)
    model(x).backward()
    torch.testing.assert_close(gradients[0], model.weight.grad)


def graph_of(phases, build, roles):
    """A local graph with placeholders named as in `phases`; build(call, *placeholders) returns its outputs."""
    graph, values = fx.Graph(), {}

    def call(op, *args, phase="forward"):
        node = graph.call_function(op, args)
        node.meta = {"val": op(*fx.map_arg(args, lambda n: n.meta["val"])), "phase": phase}
        return node

    for name, kind in phases.items():
        values[name] = graph.placeholder(name)
        values[name].meta = {"val": torch.empty(2), "role": Role(kind, name), "phase": "forward"}
    graph.output(tuple(build(call, *values.values()))).meta["roles"] = roles
    return fx.GraphModule(torch.nn.Module(), graph)


def test_an_overwritten_buffer_is_saved_as_a_copy():
    """loss x * b, then b + 1 is written to b; the gradient of x is t * (the old b)."""

    def build(call, x, b, t):
        loss = call(aten.mul.Tensor, x, b)
        return loss, call(aten.add.Tensor, b, 1), call(aten.mul.Tensor, t, b, phase="backward")

    roles = [OutputRole("output", "0"), OutputRole("mutation", "b"), OutputRole("gradient", "x")]
    parts = partition(graph_of({"x": "parameter", "b": "buffer", "t": "tangent"}, build, roles))
    x, b = torch.ones(2), torch.full((2,), 3.0)
    _, new, saved = parts.forward(x, b)
    b.copy_(new)  # as the runtime does before the backward runs
    assert parts.saved == ("b",)
    assert parts.backward(saved, torch.ones(2))[0].tolist() == [3.0, 3.0]


class LastRow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return (x @ self.weight)[-1].pow(2).sum()


def test_a_small_slice_does_not_keep_the_whole():
    model, x = LastRow(), torch.randn(16, 4)
    local, values = local_of(model, x)
    parts = partition(local)
    (loss,), (gradient,) = run(parts, local, values)
    model(x).backward()
    torch.testing.assert_close(gradient, model.weight.grad)
    assert "clone" in [n.target.overloadpacket.__name__ for n in parts.forward.graph.nodes if n.op == "call_function"]


def test_a_graph_without_backward():
    parts = partition(graph_of({"x": "input"}, lambda call, x: (call(aten.neg.default, x), None), [OUTPUT, None]))
    assert parts.backward is None and parts.saved == ()
    out, none = parts.forward(torch.tensor([1.0, -1.0]))
    assert out.tolist() == [-1.0, 1.0] and none is None


def test_phases_that_contradict_the_data_flow():
    def build(call, x):
        return (call(aten.neg.default, call(aten.relu.default, x, phase="backward")),)

    with pytest.raises(VerifyError, match="neg_default runs in the forward and needs relu_default of the backward"):
        partition(graph_of({"x": "input"}, build, [OUTPUT]))
