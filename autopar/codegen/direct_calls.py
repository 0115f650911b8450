"""Ops called without detours: what the Python of a graph spends beside computing.

fx writes `torch.ops.aten.mul.Tensor(a, b)`, which looks four names up, calls Python that calls C++, and there reads
the arguments by the op's schema: 1.8 us where torch.mul takes 1.1, and as_strided takes 3.3 where torch.as_strided
takes 1.1. Processes that share a core and its caches pay more. So ops are globals of the compiled code: torch's own
function, if it is in BINDINGS, else what `torch.ops` calls in C++.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import fx

from .._torch import compile_code, op_handle

aten = torch.ops.aten
BINDINGS: Mapping[object, Callable] = {  # that take the same arguments and can mean no other overload
    aten.add.Tensor: torch.add,
    aten.add_.Tensor: torch.Tensor.add_,
    aten.as_strided.default: torch.as_strided,
    aten.cat.default: torch.cat,
    aten.copy_.default: torch.Tensor.copy_,
    aten.div.Tensor: torch.div,
    aten.div_.Tensor: torch.Tensor.div_,
    aten.linear.default: torch.nn.functional.linear,
    aten.matmul.default: torch.matmul,
    aten.mm.default: torch.mm,
    aten.mm.out: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.mul_.Tensor: torch.Tensor.mul_,
    aten.neg.default: torch.neg,
    aten.reshape.default: torch.reshape,
    aten.sub.Tensor: torch.sub,
    aten.sub_.Tensor: torch.Tensor.sub_,
    aten.sum.dim_IntList: torch.sum,
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
}
_CALL = re.compile(r" = torch\.ops\.([\w.]+)\(")


def compile_directly(module: fx.GraphModule, instead: Mapping[object, Callable] = MappingProxyType({})) -> None:
    """Compile the Python of a graph module, in place, so that it calls its ops by names that stand for them; `instead`:
    functions in the place of some ops."""
    targets, known = {n.target for n in module.graph.nodes if n.op == "call_function"}, {**BINDINGS, **instead}
    ops = {str(t): known.get(t) or op_handle(t) for t in targets if isinstance(t, torch._ops.OpOverload)}

    def renamed(body: list[str]) -> list[str]:
        return [_CALL.sub(lambda call: f" = {_name(call[1])}(" if call[1] in ops else call[0], line) for line in body]

    with module.graph.on_generate_code(lambda _: renamed):
        module.recompile()
        compile_code(module)
    module.forward.__globals__.update({_name(op): function for op, function in ops.items()})


def _name(op: str) -> str:
    return op.replace(".", "__")
