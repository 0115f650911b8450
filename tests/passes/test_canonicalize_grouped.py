"""Grouped products of a mixture of experts, as torch and transformers write them, become one op of any type and order
of rows."""

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.integrations.moe import _grouped_mm

from autopar.cost.compute import flops_of
from autopar.frontend.moe_in_token_order import in_order
from autopar.ir.graph import is_op
from autopar.simulate import step
from autopar.simulate.compare import verify_model

ENDS = {"even": [3, 6, 9], "an empty group": [5, 5, 9], "all in the last": [0, 0, 9]}


class Experts(nn.Module):
    """(9, 8) -> (9, 16), rows sorted by expert."""

    def __init__(self, dtype, own: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(0)).to(dtype))
        self.product = (lambda x, w, ends: torch._grouped_mm(x, w, offs=ends)) if own else _grouped_mm

    def forward(self, x, ends):
        return self.product(torch.tanh(x), self.weight, ends).float().square().sum()


@pytest.mark.parametrize("dtype, own", [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_one_op(dtype, own):
    x, ends = torch.randn(9, 8, dtype=dtype), torch.tensor(ENDS["even"], dtype=torch.int32)
    _, captured = step.plan_and_capture(Experts(dtype, own), "tp=2", (x, ends), hardware="cpu-gloo", baselines=False)
    products = [n for n in captured.graph.nodes if is_op(n) and "grouped" in str(n.target)]
    assert [str(n.target) for n in products] == ["autopar.grouped_mm.default", "autopar.grouped_mm_dw.default"]
    assert [flops_of(n) for n in products] == [2 * 9 * 8 * 16] * 2


@pytest.mark.parametrize("ends", ENDS)
def test_numbers(ends):
    torch.manual_seed(0)
    model, x = Experts(torch.float32, False), torch.randn(9, 8)
    report = verify_model(model, (x, torch.tensor(ENDS[ends], dtype=torch.int32)), "tp=3")
    assert report.match, str(report)


class Picked(nn.Module):
    """(r, 8) -> (r, 16), every row with a copy of the matrix of its expert."""

    def __init__(self, turned: bool):
        super().__init__()
        self.weight = nn.Parameter(
            torch.randn(3, *((16, 8) if turned else (8, 16)), generator=torch.Generator().manual_seed(0))
        )
        self.turned = turned

    def forward(self, x, expert):
        x, matrices = torch.tanh(x), self.weight[expert]
        y = (
            torch.bmm(matrices, x.unsqueeze(-1)).squeeze(-1)
            if self.turned
            else torch.bmm(x.unsqueeze(1), matrices).squeeze(1)
        )
        return y.square().sum()


@pytest.mark.parametrize("turned", [False, True])
def test_a_matrix_for_each_row(turned):
    torch.manual_seed(0)
    model, inputs = Picked(turned), (torch.randn(8, 8), torch.tensor([2, 0, 0, 2, 2, 0, 2, 2]))  # none in 1
    report = verify_model(model, inputs, "dp=2", strategy="ddp")
    assert report.match, str(report)
    _, captured = step.plan_and_capture(model, "dp=2", inputs, hardware="cpu-gloo", baselines=False)
    targets = [str(n.target) for n in captured.graph.nodes if is_op(n)]
    assert "autopar.grouped_mm.default" in targets and not {"aten.bmm.default", "aten.index.Tensor"} & set(targets)


def test_a_stack_of_rows_stays_a_product_of_stacks():
    class Stacked(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 8, 4))

        def forward(self, x, which):
            return torch.bmm(x, self.weight[which]).square().sum()  # (r, 2, 8)

    inputs = (torch.randn(4, 2, 8), torch.tensor([0, 2, 2, 1]))
    _, captured = step.plan_and_capture(Stacked(), "dp=2", inputs, hardware="cpu-gloo", baselines=False)
    assert not any("grouped" in str(n.target) for n in captured.graph.nodes)


def test_the_configuration_of_experts_is_lent():
    """Models and models inside them get another one; an implementation of their own stays. All come back after."""

    class Outer(PretrainedConfig):
        sub_configs = {"text": PretrainedConfig}

    inner, other = PretrainedConfig(), PretrainedConfig()
    outer = Outer(text=inner)
    assert outer.text is inner
    outer._experts_implementation, inner._experts_implementation, other._experts_implementation = (
        "grouped_mm",
        "eager",
        "sonicmoe",
    )
    model = nn.ModuleList([nn.Identity(), nn.Identity(), nn.Identity()])
    for module, config in zip(model, (outer, inner, other)):
        module.config = config
    with in_order(model):
        assert [m.config._experts_implementation for m in model] == ["batched_mm", "batched_mm", "sonicmoe"]
    assert [m.config._experts_implementation for m in model] == ["grouped_mm", "eager", "sonicmoe"]
