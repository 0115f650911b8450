"""Lower a family for CUDA without a GPU, and run what each rank would run on fake tensors of it.

A build of torch for CPUs asks for CUDA in two places where fake tensors need none: in the choice of a kernel for a
convolution, and in some methods of tensors. `as_if_built_for_cuda` answers there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

import torch
from torch import fx

from autopar import Mesh, compiler
from autopar.errors import AutoparError
from autopar.frontend.device import move
from autopar.hardware.profile import load
from autopar.ir.graph import output_node, values_of
from autopar.planner.spmd.plan import make_plan
from autopar.planner.spmd.plan_options import PlanOptions

from ..families import FAMILIES

CUDA = torch.device("cuda")
GET_ITEM = torch.Tensor.__getitem__
BATCH, SEQ = 4, 16


METHODS = {  # that ask for the device in Python, and ops that do the same
    "__invert__": torch.bitwise_not,
    "contiguous": lambda x, **_: x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format),
    "__getitem__": lambda x, at: _indexed(x, at if isinstance(at, tuple) else (at,)),
}


def _indexed(x: torch.Tensor, at: tuple) -> torch.Tensor:
    """Return x at whole dims and tensors of places, or as torch does it."""
    if all(isinstance(i, torch.Tensor) or i == slice(None) for i in at) and any(
        isinstance(i, torch.Tensor) for i in at
    ):
        return torch.ops.aten.index.Tensor(x, [i if isinstance(i, torch.Tensor) else None for i in at])
    return GET_ITEM(x, at)


@contextlib.contextmanager
def as_if_built_for_cuda() -> Iterator[None]:
    """Let convolutions and these methods of fake CUDA tensors be evaluated by a build for CPUs."""
    with contextlib.ExitStack() as stack:
        if not torch.backends.cuda.is_built():
            backend = torch._C._ConvBackend.Cudnn
            stack.enter_context(patch.object(torch._C, "_select_conv_backend", lambda *_, **__: backend))
            same = torch.contiguous_format
            stack.enter_context(patch.object(torch._C, "_conv_determine_backend_memory_format", lambda *_: same))
            for name, method in METHODS.items():
                stack.enter_context(patch.object(torch.Tensor, name, method, create=True))
        yield


def lowered_on_fakes(family: str, precision: str, mesh: str = "dp=2,tp=2") -> str:
    """Return "" if the graphs of the first and the last rank run on fake CUDA tensors and every value is what the graph
    says of it, or why a CPU refuses the family as well. Raises what CUDA alone refuses."""
    torch.manual_seed(0)
    model, inputs = FAMILIES[family](BATCH, SEQ)
    try:
        captured = compiler.trace(model, inputs, precision=precision)
        options = PlanOptions(load("h100"), strategy="auto", precision=precision, baselines=False)
        plan = make_plan(captured, Mesh.parse(mesh), options, family)
        compiler.lower(captured, plan, 0)
    except AutoparError as error:
        return error.message
    with as_if_built_for_cuda():
        move(captured, CUDA)
        for rank in (0, plan.mesh.devices - 1):
            parts = compiler.lower(captured, plan, rank, check=True).parts
            for graph_module in (parts.forward, parts.backward):
                run_on_fakes(graph_module)
    return ""


def run_on_fakes(graph_module: fx.GraphModule) -> None:
    """Run a local graph on fake tensors of its placeholders' forms; every value must be what the graph says of it. An
    op that reads a number of the device has none to give: that raises."""
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
    """Return shape, type and device of the tensors of a value."""
    if isinstance(value, (tuple, list)):
        return [form(v) for v in value]
    return (tuple(value.shape), value.dtype, value.device.type) if isinstance(value, torch.Tensor) else value
