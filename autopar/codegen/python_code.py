"""Make graph modules that run, and print them as text that reads well.

`bind_groups` puts process groups in place of axis names at load; `emit_text` prints a graph as Python with the layout
of every value beside it.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import cast

import torch
from torch import fx

from .._torch import c10d
from ..errors import MeshError
from ..ir.graph import values_of
from ..ir.layout import Layout
from ..ops import autopar

GATHERS_OF_BUCKETS = {  # by what gathers one tensor
    autopar.gather_by_broadcasts.default: autopar.gather_bucket_by_broadcasts.default,
    autopar.gather_by_sends.default: autopar.gather_bucket_by_sends.default,
}
COLLECTIVES = frozenset((
    autopar.exchange_rows.default, autopar.exchange_by_sends.default, autopar.gather_by_broadcasts.default,
    autopar.gather_by_sends.default, autopar.exchange_reached.default, autopar.in_rounds.default,
    *GATHERS_OF_BUCKETS.values(),
))  # fmt: skip
ON_GLOO = {  # within a machine, and between machines
    c10d.all_gather_into_tensor.default: (autopar.gather_by_broadcasts.default, autopar.gather_by_sends.default),
    c10d.all_to_all_single.default: (c10d.all_to_all_single.default, autopar.exchange_by_sends.default),
}


REDUCTIONS = frozenset((
    c10d.all_reduce.default, c10d.all_reduce_.default, c10d.reduce_scatter_tensor.default,
    c10d.all_to_all_single.default,
))  # fmt: skip


def group_names(module: fx.GraphModule) -> list[str]:
    """Return the logical groups ("dp", "dp,tp") that a graph's collectives name, in order of first use."""
    return list(dict.fromkeys(g for n in module.graph.nodes if is_collective(n) for g in (n.args[-1], *_others(n))))


def reductions_beside(module: fx.GraphModule) -> list[fx.Node]:
    """Return the reductions that run beside what follows on them: their waits come later."""
    return [n for n in module.graph.nodes if n.target in REDUCTIONS and n.next not in n.users]


def bind_groups(
    module: fx.GraphModule, names: Mapping[str, str], of_reductions: Mapping[str, str] | None = None
) -> fx.GraphModule:
    """Replace logical groups by names of process groups, in place. `of_reductions`: those of the reductions that run
    beside other work, if they have communicators of their own. Raises MeshError for a group that is not given."""
    for node in reductions_beside(module) if of_reductions else ():
        node.args = (*node.args[:-1], (of_reductions or {})[cast(str, node.args[-1])])
    bound = {*(of_reductions or {}).values()}
    for node in module.graph.nodes:
        if is_collective(node) and node.args[-1] not in bound:
            if node.args[-1] not in names:
                raise MeshError(
                    f"no process group is given for the axes {node.args[-1]}, which {node.name} needs",
                    fix=f"make one for each of {', '.join(group_names(module))}",
                )
            node.args = (*node.args[:-1], names[node.args[-1]])
            if others := _others(node):
                node.args = (*node.args[:-2], ";".join(names[group] for group in others), node.args[-1])
    module.recompile()
    return module


def as_on_gloo(module: fx.GraphModule, between_machines: Collection[str]) -> fx.GraphModule:
    """Turn all-gathers and all-to-alls of a graph with logical groups into what gloo does fastest, in place;
    `between_machines`: groups that have members on several."""
    for node in module.graph.nodes:
        if node.target in ON_GLOO:
            node.target = ON_GLOO[node.target][node.args[-1] in between_machines]
    module.recompile()
    return module


class BoxedCodeGen(fx.graph.CodeGen):
    """`forward(values)` takes the arguments as one list and empties it, so that a value is freed after its last use:
    the caller of a function of many arguments keeps all of them alive until it returns."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options) -> str:
        """Return the head of a function that takes the arguments out of `values` and empties it."""
        names = [v.split(":")[0].split("=")[0].strip() for v in free_vars]
        unpack = f"\n    {', '.join(names)}, = values" if names else ""
        return f"def {self._func_name}(self, values){maybe_return_annotation}:{unpack}\n    values.clear()"


def boxed(module: fx.GraphModule) -> fx.GraphModule:
    """Put the graph behind `forward(values)`, in place."""
    module.graph.set_codegen(BoxedCodeGen())
    module.recompile()
    return module


def is_collective(node: fx.Node) -> bool:
    """Return whether the node starts a collective; the wait that follows does not."""
    target = node.target
    if target in COLLECTIVES:
        return bool(node.args[-1])  # rounds that a device makes by itself have no group
    return getattr(target, "namespace", "") == "_c10d_functional" and "wait_tensor" not in str(target)


def _others(node: fx.Node) -> list[str]:
    """Return the groups that a node names beside its own."""
    return [g for g in cast(str, node.args[-2]).split(";") if g] if node.target is autopar.in_rounds.default else []


def emit_text(module: fx.GraphModule, name: str = "forward") -> str:
    """Return the graph as a Python function. Behind each line stands its local shape and dtype <- global shape and
    layout, or what the collective does; values of one module of the user's model stand under a heading with its
    path."""
    lines, body, heading = [], [], None
    rank, mesh = module.meta.get("rank"), module.meta.get("mesh")
    if mesh is not None:
        lines.append(f"# rank {rank} of {mesh}; local shape <- global shape and layout")
    lines.append(f"def {name}(")
    if any(node.op == "get_attr" for node in module.graph.nodes):
        lines.append("    self,")
    for node in module.graph.nodes:
        if node.op == "placeholder":
            lines.append(f"    {node.name},{_comment(node)}")
        elif node.op == "output":
            body.append(f"    return {_literal(node.args[0])}")
        else:
            if node.meta.get("module", heading) != heading:
                heading = node.meta["module"]
                body.append(f"    # {heading or 'model'}")
            body.append(f"    {node.name} = {_expression(node)}{_comment(node)}")
    return "\n".join([*lines, "):", *body, ""])


def _expression(node: fx.Node) -> str:
    if node.op == "get_attr":
        return f"self.{node.target}"
    if node.target is operator.getitem:
        return f"{node.args[0].name}[{node.args[1]!r}]"
    arguments = [_literal(a) for a in node.args] + [f"{k}={_literal(v)}" for k, v in node.kwargs.items()]
    return f"torch.ops.{node.target}({', '.join(arguments)})"


def _literal(value: object) -> str:
    """Return the Python text of an argument."""
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (tuple, list)):
        words = ", ".join(map(_literal, value))
        return f"[{words}]" if isinstance(value, list) else f"({words},)" if len(value) == 1 else f"({words})"
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, float) and value - value != 0:  # inf or nan
        return f'float("{value}")'
    return repr(value)


def _comment(node: fx.Node) -> str:
    if "collective" in node.meta:
        return f"  # {node.meta['collective']}"
    local = " ".join(_shape(v) for v in values_of(node))
    layouts, whole = node.meta.get("layout"), node.meta.get("global")
    if layouts is None or whole is None:
        return f"  # {local}" if local else ""
    layouts = (layouts,) if isinstance(layouts, Layout) else layouts
    values = [v for v in ((whole,) if isinstance(whole, torch.Tensor) else whole) if isinstance(v, torch.Tensor)]
    if all(l.is_replicated for l in layouts):
        return f"  # {local}"
    return f"  # {local} <- " + " ".join(f"{tuple(v.shape)} {l}" for v, l in zip(values, layouts))


def _shape(value: torch.Tensor) -> str:
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
