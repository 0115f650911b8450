"""A joint graph as plain data, for another process to make the same graph of.

A node is a line: op, name, target, arguments, the form of its value, and what its metadata says (see graph.py).
Constants travel beside the data, as tensors.
"""

from __future__ import annotations

import json
import operator
from typing import Any

import torch
from torch import fx

from .. import _torch
from ..utils.plain_data import NotPortable, decode, encode
from .graph import OutputRole, Role

OPERATORS = frozenset(("getitem", "add", "sub", "mul", "truediv", "floordiv", "neg"))  # of Python's, what graphs call


def graph_data(module: fx.GraphModule) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return a joint graph as plain data, and its constants. Raises NotPortable for what another process could not make
    again, such as a subgraph or a size that is not known."""
    forms: dict[str, int] = {}
    constants: list[torch.Tensor] = []
    numbers: dict[fx.Node, int] = {}
    lines = []

    def node_or_form(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return {"node": numbers[value]}
        if isinstance(value, torch.Tensor):
            return {"form": [list(map(int, value.shape)), list(map(int, value.stride())), encode(value.dtype)]}
        if isinstance(value, (list, dict)):  # fx's own classes, which nobody can change
            return encode(list(value) if isinstance(value, list) else dict(value), node_or_form)
        raise NotPortable(f"a {type(value).__name__} in a graph")

    for node in module.graph.nodes:
        numbers[node] = len(numbers)
        target: Any = None
        if node.op == "call_function":
            op = _torch.op_text(node.target)
            target = op if op is not None else _function_name(node.target)
        elif node.op == "get_attr":
            constant = getattr(module, node.target)
            if not isinstance(constant, torch.Tensor):
                raise NotPortable(f"{node.target}, a {type(constant).__name__}")
            target = [node.target, len(constants), _torch.is_fake(node.meta["val"])]
            constants.append(constant.detach())
        form = json.dumps(encode(node.meta.get("val"), node_or_form))
        meta = [node.meta.get("module", ""), node.meta.get("source", ""), node.meta.get("phase", "")]
        if node.op == "output":
            meta = [role and [role.kind, role.name] for role in node.meta["roles"]]
        elif "role" in node.meta:
            role = node.meta["role"]
            meta.append([role.kind, role.name, role.trainable])
        arguments = encode((node.args, node.kwargs), node_or_form)
        lines.append([node.op, node.name, target, arguments, forms.setdefault(form, len(forms)), meta])
    return {"nodes": lines, "forms": [json.loads(form) for form in forms]}, constants


def graph_of(data: dict[str, Any], constants: list[torch.Tensor], device: torch.device) -> fx.GraphModule:
    """Return the graph that `graph_data` gave, with its fake values on `device`. Raises NotPortable for an op that is
    not registered here."""
    mode, graph = _torch.fake_mode(), fx.Graph()
    nodes: list[fx.Node] = []
    attributes: dict[str, torch.Tensor] = {}

    def node_or_form(kind: str, content: Any) -> object:
        if kind == "node":
            return nodes[content]
        if kind == "form":
            shape, stride, dtype = content
            return _torch.fake_tensor(mode, shape, stride, 0, decode(dtype), device)
        raise NotPortable(f"a value of kind {kind} in a graph")

    forms = [decode(form, node_or_form) for form in data["forms"]]
    for op, name, target, arguments, form, meta in data["nodes"]:
        args, kwargs = decode(arguments, node_or_form)
        words = [name, *kwargs, *(target[0].split(".") if op == "get_attr" else ())]
        if not all(map(str.isidentifier, words)):  # they become code
            raise NotPortable(f"a node named {name!r:.80}")
        if op == "call_function":
            is_op = isinstance(target, str)
            target = (
                _torch.op_of_text(target) if is_op else getattr(operator, target[0]) if target[0] in OPERATORS else None
            )
            if target is None:
                raise NotPortable("an op that is not registered here")
        value = forms[form]
        if op == "get_attr":
            target, number, is_fake = target
            attributes[target] = constants[number]
            value = value if is_fake else constants[number]
        if op == "output":
            graph.output(args[0]).meta["roles"] = [role and OutputRole(*role) for role in meta]
            continue
        node = graph.create_node(op, name if target is None else target, args, kwargs, name=name)
        if node.name != name:
            _torch.rename(node, name)
        node.meta["val"] = value
        node.meta["module"], node.meta["source"], node.meta["phase"], *role = meta
        if role:
            node.meta["role"] = Role(*role[0])
        nodes.append(node)
    return _torch.graph_module(attributes, graph)


def _function_name(target: Any) -> list[str]:
    """Return the name of one of OPERATORS. Raises NotPortable for another function."""
    name = getattr(target, "__name__", "")
    if name not in OPERATORS or getattr(operator, name) is not target:
        raise NotPortable(f"a call of {name or target}")
    return [name]
