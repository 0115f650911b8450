"""CUDA's autocast, traced on the CPU: the types that a model sees, and those of the graph, are CUDA's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar import compiler
from autopar.frontend import autocast
from autopar.frontend.export import export
from autopar.passes.canonicalize.autocast_kernels import traced_as
from autopar.passes.canonicalize.explicit_casts import explicit_casts
from autopar.simulate.oracle import global_values, one_device_step

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
AROUND = (("cuda", BF16),)
OPS = {
    "linear": (lambda x, w: F.linear(x, w), BF16),
    "matmul": (lambda x, w: x @ w, BF16),
    "einsum": (lambda x, w: torch.einsum("bsi,oi->bso", x, w), BF16),
    "attention": (lambda x, w: F.scaled_dot_product_attention(x, x, x), BF16),
    "layer norm": (lambda x, w: F.layer_norm(x.bfloat16(), (4,)), FP32),
    "softmax": (lambda x, w: F.linear(x, w).softmax(-1), FP32),
    "log softmax": (lambda x, w: F.linear(x, w).log_softmax(-1), FP32),
    "sum": (lambda x, w: F.linear(x, w).sum(-1), FP32),
    "sum to a type": (lambda x, w: F.linear(x, w).sum(-1, dtype=BF16), BF16),
    "norm": (lambda x, w: torch.norm(F.linear(x, w)), FP32),
    "power": (lambda x, w: F.linear(x, w).pow(2), FP32),
    "gelu": (lambda x, w: F.gelu(F.linear(x, w)), BF16),
    "add": (lambda x, w: F.linear(x, w) + x, FP32),
    "cat": (lambda x, w: torch.cat([F.linear(x, w), x]), FP32),
    "cross entropy": (
        lambda x, w: F.cross_entropy(F.linear(x, w).view(-1, 4), torch.zeros(6, dtype=torch.int64)),
        FP32,
    ),
    "another type": (lambda x, w: _under(FP16, x, w), FP16),
    "off": (lambda x, w: _under(None, x, w), FP32),
}


def _under(dtype, x, w):
    with torch.autocast(x.device.type, dtype=dtype, enabled=dtype is not None):
        return F.linear(x, w)


class One(nn.Module):
    """Tells `see` the type of what an op makes."""

    def __init__(self, op, see):
        super().__init__()
        self.op, self.weight, self.see = op, nn.Parameter(torch.randn(4, 4)), see

    def forward(self, x):
        y = self.op(x, self.weight)
        self.see(y.dtype)
        return y.float().square().mean()


@pytest.mark.parametrize("name", OPS)
def test_types_are_those_of_cuda(name):
    torch.manual_seed(0)
    (op, dtype), x = OPS[name], torch.randn(2, 3, 4)
    seen: list[torch.dtype] = []
    model = One(op, seen.append)
    with traced_as("cuda", AROUND):
        exported = export(model, (x,))
    assert seen == [dtype]
    module = explicit_casts(exported.graph_module, AROUND, "cuda")
    loss = torch.func.functional_call(module, {"model.weight": model.weight}, (x,))[0]
    wide = F.mse_loss(op(x, model.weight).float(), torch.zeros(()))  # without autocast
    assert loss.item() == pytest.approx(wide.item(), rel=3e-2)


def test_a_capture_for_cuda():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4), nn.Softmax(-1)), torch.randn(3, 4)
    with autocast.entered(AROUND):
        captured = compiler.trace(model, (x,))
    types = {str(n.target): v.dtype for n in captured.graph.nodes if isinstance(v := n.meta.get("val"), torch.Tensor)}
    assert types["autopar.linear.default"] == BF16 and types["aten._softmax.default"] == FP32
    found = one_device_step(captured, global_values(captured, model, (x,)))
    assert all(g.dtype == FP32 for g in found.gradients.values()) and len(found.gradients) == 6


def test_the_kernels_are_put_back():
    def types():
        with torch.autocast("cpu", dtype=BF16):
            y = torch.randn(2, 4) @ torch.randn(4, 4)
            return y.dtype, y.softmax(-1).dtype, y.sum().dtype

    before = types()
    with traced_as("cuda", AROUND):
        assert types() == (BF16, FP32, FP32) and torch.autocast("cuda").device == "cpu"
    assert types() == before == (BF16, BF16, BF16) and autocast.ambient() == ()
