"""Grouped products of a mixture of experts, as torch and transformers write them, become one op of any type."""

import pytest
import torch
from torch import nn
from transformers.integrations.moe import _grouped_mm

from autopar import simulated
from autopar.compare import verify_model
from autopar.cost.compute import flops_of
from autopar.graph import is_op

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
    _, captured = simulated.plan_and_capture(Experts(dtype, own), "tp=2", (x, ends), hardware="cpu-gloo", baselines=False)
    products = [n for n in captured.graph.nodes if is_op(n) and "grouped" in str(n.target)]
    assert [str(n.target) for n in products] == ["autopar.grouped_mm.default", "autopar.grouped_mm_dw.default"]
    assert [flops_of(n) for n in products] == [2 * 9 * 8 * 16] * 2


@pytest.mark.parametrize("ends", ENDS)
def test_numbers(ends):
    torch.manual_seed(0)
    model, x = Experts(torch.float32, False), torch.randn(9, 8)
    report = verify_model(model, (x, torch.tensor(ENDS[ends], dtype=torch.int32)), "tp=3")
    assert report.match, str(report)
