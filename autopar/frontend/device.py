"""A joint graph for another device than the one it was traced on.

Graphs are traced and planned on the CPU. Some kernels of a GPU return other types and strides for the same call: a
layer norm its statistics in fp32, whatever it normalises, where the CPU keeps them in bf16. So the graph is evaluated
again, op by op, on fake tensors of the new device. Shapes must stay, as the plan is one of shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import fx

from ..errors import CaptureError
from ..ir.graph import describe
from .export import Captured
from .fake_parameters import DEVICE


def move(captured: Captured, device: torch.device) -> None:
    """Rewrite a joint graph for tensors on `device`, in place. Raises CaptureError for an op that does not run there or
    gives other shapes."""
    if device == DEVICE:
        return
    mode = next(n for n in captured.graph.nodes if n.op == "placeholder").meta["val"].fake_mode
    with mode:
        for node in captured.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": device}
            if node.op in ("placeholder", "get_attr"):
                node.meta["val"] = _like(node.meta["val"], device)
            elif node.op == "call_function" and "val" in node.meta:
                node.meta["val"] = _evaluated(node, device)
    captured.graph_module.recompile()


def _like(value, device: torch.device):
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def _evaluated(node: fx.Node, device: torch.device):
    """Return what the op gives of its arguments' values. Raises CaptureError."""
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    try:
        value = cast(Callable, node.target)(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise _refused(node, f"does not run on {device.type}: {_first_line(error)}", device) from error
    before, after = _shapes(node.meta["val"]), _shapes(value)
    if before != after:
        raise _refused(node, f"gives {after} on {device.type}, and {before} where it was traced", device)
    return value


def _refused(node: fx.Node, what: str, device: torch.device) -> CaptureError:
    return CaptureError(
        f"{node.target} {what}",
        node=describe(node),
        source=node.meta.get("source") or None,
        fix=f"write this part of the model with ops that do the same on a CPU and on {device.type}",
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _shapes(value) -> list[tuple[int, ...] | None]:
    items = value if isinstance(value, (tuple, list)) else (value,)
    return [tuple(item.shape) if isinstance(item, torch.Tensor) else None for item in items]
