"""Lowering canonical ops to ATen changes no number, forward or backward, and keeps what it must keep."""

import pytest
import torch

from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.passes.distribute.localize import localize
from autopar.passes.distribute.lower_ops import lower_ops
from autopar.plans.sharding import NodeSharding, Sharding

from .lowering import capture, links

ops = torch.ops.autopar
ONE = Mesh.parse("one=1")


class Call(torch.nn.Module):
    """A sum over a function of a parameter and inputs, weighted so that gradients differ everywhere."""

    def __init__(self, weight, function):
        super().__init__()
        self.weight, self.function = torch.nn.Parameter(weight), function

    def forward(self, *inputs):
        out = self.function(self.weight, *inputs)
        return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum()


def both_ways(model, *inputs):
    """(names of the ops after lowering) of a joint graph; its outputs must be the same before and after, to the bit."""
    joint, values = capture(model, *inputs)
    outputs = next(iter(reversed(joint.graph.nodes))).args[0]
    local = localize(joint, Sharding(ONE, links(ONE), 1e11, {}, {}, (None,) * len(outputs)), 0)
    arguments = [values[n.name] for n in local.graph.nodes if n.op == "placeholder"]
    before = local(*arguments)
    forms = {n.name: (tuple(n.meta["val"].shape), n.meta["val"].stride()) for n in outputs}
    lower_ops(local)
    for node, a, b in zip(outputs, before, local(*arguments), strict=True):
        assert torch.equal(a, b), f"{node}: {(a - b).abs().max()}"
        assert (tuple(b.shape), b.stride()) == forms[node.name]
    return [n.target.name().split(".")[0] for n in local.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear(shape, dtype):
    model = Call(torch.randn(6, 8, dtype=dtype), lambda w, x, y: ops.linear(ops.linear(x, y), w))
    names = both_ways(model, torch.randn(shape, dtype=dtype), torch.randn(8, 8, dtype=dtype))
    assert "aten::linear" in names and not any(name.startswith("autopar::") for name in names)


@pytest.mark.parametrize("padding", [-1, 2])
def test_embedding(padding):
    model = Call(torch.randn(7, 4), lambda w, i: ops.embedding(w, i, padding, 0))
    names = both_ways(model, torch.tensor([[0, 2, 6, 2], [1, 1, 5, 3]]))
    assert {"aten::embedding", "aten::embedding_dense_backward"} <= set(names)


def test_a_shard_of_the_vocabulary_keeps_its_masked_lookup():
    joint, _ = capture(Call(torch.randn(8, 4), lambda w, i: ops.embedding(w, i, -1, 0)), torch.tensor([[0, 7]]))
    mesh, rows = Mesh.parse("tp=2"), Layout.parse("tp:S(0)", 2)
    whole = Layout.replicated(2)
    nodes = {
        "embedding": NodeSharding((rows, whole), (Layout.parse("tp:P", 3),)),
        "embedding_dw": NodeSharding((Layout.replicated(3), whole), (rows,)),
    }
    sharding = Sharding(mesh, links(mesh), 1e11, nodes, {"p_weight": rows}, (None, rows))
    for rank in range(2):
        local = lower_ops(localize(joint, sharding, rank))
        targets = {n.target for n in local.graph.nodes}
        assert {ops.embedding.default, ops.embedding_dw.default} <= targets


def attend(heads_kv=4, mask=None, causal=True, transposed=True):
    def function(w, x):
        b, s, width = x.shape
        q, k, v = ((x * f) @ w for f in (1, 2, 3))
        q, k, v = (t.view(b, s, 4, width // 4).transpose(1, 2) for t in (q, k, v))
        if not transposed:
            q, k, v = (t.contiguous() for t in (q, k, v))
        k, v = k[:, :heads_kv], v[:, :heads_kv]
        return ops.attention(q, k, v, mask(x) if mask else None, causal, None)[0].transpose(1, 2).reshape(b, s, width)

    return Call(torch.randn(16, 16) / 4, function)


def test_attention():
    names = both_ways(attend(), torch.randn(2, 6, 16))
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    assert "aten::_scaled_dot_product_flash_attention_for_cpu_backward" in names


@pytest.mark.parametrize(
    "options",
    [
        dict(heads_kv=2),
        dict(mask=lambda x: torch.ones(6, 6, dtype=torch.bool).tril(), causal=False),
        dict(mask=lambda x: torch.ones(2, 4, 6, 6).tril().log(), causal=False),
    ],
    ids=["grouped", "bool mask", "additive mask"],
)
def test_attention_that_needs_a_conversion_is_kept(options):
    assert "autopar::attention" in both_ways(attend(**options), torch.randn(2, 6, 16))


def test_attention_of_other_strides_is_kept():
    """The canonical op's result is stored (b, s, h, d); the kernel's follows the query."""
    assert "autopar::attention" in both_ways(attend(transposed=False), torch.randn(2, 6, 16))
