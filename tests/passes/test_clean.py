"""Cleaning leaves less work and the same numbers."""

import pytest
import torch
from torch import nn

from autopar.frontend import export
from autopar.passes.canonicalize.clean import clean
from autopar.passes.canonicalize.rewrite import canonicalize
from autopar.simulate.oracle import global_values, one_device_step

aten = torch.ops.aten


class Normed(nn.Module):
    def __init__(self, power: float):
        super().__init__()
        self.weight, self.power = nn.Parameter(torch.rand(5)), power

    def forward(self, x):
        y = x * self.weight
        scale = (y.pow(self.power).mean(-1, keepdim=True) + 0.1).rsqrt()
        return (y * scale).mean((0, 1)).square().sum() + y.mean()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("power", [1, 2, 2.0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_powers(power, dtype):
    torch.manual_seed(0)
    model, x = Normed(power).to(dtype), torch.rand(3, 4, 5).to(dtype)

    def step(passes):
        exported = export.export(model, (x,))
        canonicalize(exported.graph_module)
        captured = export.differentiate(exported)
        for run in passes:
            run(captured.graph_module)
        captured.graph_module.recompile()
        return captured, one_device_step(captured, global_values(captured, model, (x,)))

    (_, whole), (captured, mine) = step([]), step([clean])
    for name, gradient in whole.gradients.items():
        tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(mine.gradients[name], gradient, rtol=tolerance, atol=tolerance)
    for node in captured.graph.nodes:
        assert node.target is not aten.pow.Tensor_Scalar or node.args[1] != 1
        value = node.meta.get("val")
        assert not isinstance(value, torch.Tensor) or value.dtype in (dtype, torch.float32), node
