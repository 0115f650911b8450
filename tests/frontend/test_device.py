"""A graph that is moved to a GPU fits what its kernels give: forward and backward run on fake CUDA tensors."""

from __future__ import annotations

import pytest
import torch

from autopar import compiler
from autopar.errors import CaptureError
from autopar.frontend.device import move

from ..families import FAMILIES
from ..helpers.fake_cuda import CUDA, lowered_on_fakes

SAMPLE = ("gpt2", "bert", "llama", "mistral", "t5", "mixtral", "opt", "convnext")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", SAMPLE)
def test_a_moved_family_runs(family, precision):
    assert lowered_on_fakes(family, precision) == ""


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(SAMPLE)))
def test_every_moved_family_runs(family, precision):
    """A refusal of CUDA alone raises; one of CPUs as well is told in words, and is in docs/families.md."""
    assert isinstance(lowered_on_fakes(family, precision), str)


class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x).sum()


def test_statistics_of_a_norm_are_those_of_the_gpu():
    """The CPU keeps the mean of bf16 numbers in bf16, CUDA in fp32."""
    captured = compiler.trace(Norm().bfloat16(), {"x": torch.randn(4, 8, dtype=torch.bfloat16)})
    norm = next(n for n in captured.graph.nodes if n.target is torch.ops.aten.native_layer_norm.default)
    assert norm.meta["val"][1].dtype == torch.bfloat16
    move(captured, CUDA)
    assert norm.meta["val"][1].dtype == torch.float32 and norm.meta["val"][0].dtype == torch.bfloat16


def test_other_shapes_are_refused():
    captured = compiler.trace(Norm(), {"x": torch.randn(4, 8)})
    norm = next(n for n in captured.graph.nodes if n.target is torch.ops.aten.native_layer_norm.default)
    out, mean, rstd = norm.meta["val"]
    norm.meta["val"] = (out, mean[:2], rstd)
    with pytest.raises(CaptureError, match="native_layer_norm.* on cuda, and .* where it was traced"):
        move(captured, CUDA)
