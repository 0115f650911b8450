"""Ops that a graph calls directly are the same ops."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx

from autopar.codegen.direct_calls import BINDINGS, compile_directly
from autopar.codegen.python_code import boxed

aten = torch.ops.aten
A, B = torch.rand(3, 3, dtype=torch.float64), torch.rand(3, 3, dtype=torch.float64)
CALLS = {
    aten.add.Tensor: ((A, B), {"alpha": 2}), aten.as_strided.default: ((A, [2, 2], [3, 1], 1), {}),
    aten.cat.default: (([A, B], 1), {}), aten.copy_.default: ((A.clone(), B), {}), aten.div.Tensor: ((A, B), {}),
    aten.linear.default: ((A, B, A[0]), {}), aten.matmul.default: ((A, B), {}), aten.mm.default: ((A, B), {}),
    aten.mm.out: ((A, B), {"out": torch.empty_like(A)}), aten.mul.Tensor: ((A, B), {}), aten.neg.default: ((A,), {}),
    aten.reshape.default: ((A, [-1, 1]), {}), aten.sub.Tensor: ((A, B), {}),
    aten.sum.dim_IntList: ((A, [0, 1], True), {"dtype": torch.float32}), aten.t.default: ((A,), {}),
    aten.transpose.int: ((A, 0, 1), {}), aten.add_.Tensor: ((A, B), {"alpha": 2}), aten.div_.Tensor: ((A, B), {}),
    aten.mul_.Tensor: ((A, B), {}), aten.sub_.Tensor: ((A, B), {}),
}  # fmt: skip


@pytest.mark.parametrize("op", BINDINGS, ids=str)
def test_bindings(op):
    wanted, found = (run(*args, **kwargs) for run in (op, BINDINGS[op]) for args, kwargs in [copy.deepcopy(CALLS[op])])
    assert torch.equal(found, wanted) and found.dtype == wanted.dtype


def test_a_graph_calls_ops_directly():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    total = graph.call_function(aten.add.Tensor, (x, y))
    shifted = graph.call_function(aten.add.Scalar, (total, 1.0))  # the op itself: it has no binding
    graph.output((graph.call_function(aten.relu.default, (shifted,)),))
    module = boxed(fx.GraphModule({}, graph))
    compile_directly(module)
    assert "torch.ops" not in module.code
    (found,) = module.forward([A, -B])
    assert torch.equal(found, (A - B + 1).relu())
