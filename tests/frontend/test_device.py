"""A graph that is moved to a GPU fits what its kernels give: forward and backward run on fake CUDA tensors."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar import Mesh, compiler
from autopar.errors import AutoparError, CaptureError
from autopar.frontend.device import move
from autopar.hardware.profile import load
from autopar.ir.graph import output_node, values_of
from autopar.planner.spmd.plan import make_plan
from autopar.planner.spmd.plan_options import PlanOptions

from ..families import FAMILIES

CUDA = torch.device("cuda")
WITHOUT_CUDA = ("not linked with support for cuda", "not compiled with CUDA")  # what some kernels ask of the build
SAMPLE = ("gpt2", "bert", "llama", "mistral", "t5", "mixtral", "opt")


def traced(family: str, precision: str):
    """The capture of a small model and its plan for four devices."""
    torch.manual_seed(0)
    model, inputs = FAMILIES[family](4, 16)
    captured = compiler.trace(model, inputs, precision=precision)
    options = PlanOptions(load("h100"), strategy="auto", precision=precision, baselines=False)
    return captured, make_plan(captured, Mesh.parse("dp=2,tp=2"), options, family)


def run_on_fakes(graph_module: fx.GraphModule) -> None:
    """Run a local graph on fake tensors of its placeholders' forms; every value must be what the graph says of it."""
    mode = next(v for n in graph_module.graph.nodes for v in values_of(n) if isinstance(v, torch.Tensor)).fake_mode
    values: dict[fx.Node, object] = {}
    with mode:
        for node in graph_module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                like = node.meta["val"]
                made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
                values[node] = made
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
                assert form(values[node]) == form(node.meta["val"]), node.format_node()
    assert all(v.device.type == "cuda" for n in output_node(graph_module.graph).all_input_nodes for v in values_of(n))


def form(value):
    if isinstance(value, (tuple, list)):
        return [form(v) for v in value]
    return (tuple(value.shape), value.dtype, value.device.type) if isinstance(value, torch.Tensor) else value


def check(family: str, precision: str) -> None:
    try:
        captured, plan = traced(family, precision)
        compiler.lower(captured, plan, 0)
    except AutoparError as error:
        pytest.skip(f"not on CPUs either: {error.message[:80]}")
    try:
        move(captured, CUDA)
    except CaptureError as error:
        if any(text in error.message for text in WITHOUT_CUDA):
            pytest.skip(error.message)
        raise
    for rank in (0, 3):
        parts = compiler.lower(captured, plan, rank, check=True).parts
        for graph_module in (parts.forward, parts.backward):
            run_on_fakes(graph_module)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", SAMPLE)
def test_a_moved_family_runs(family, precision):
    check(family, precision)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(SAMPLE)))
def test_every_moved_family_runs(family, precision):
    check(family, precision)


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
