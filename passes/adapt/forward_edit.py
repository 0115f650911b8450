"""Small edits of an exported forward graph: what adaptation passes are written in.

An exported graph reads parameters by `get_attr` under "model." and their qualified name, perhaps through a cast (mixed
precision) or a transpose (GPT-2's Conv1D). Nodes that are added say where they come from as the node that they stand
beside does, and have their value in meta["val"] for the next pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from ...errors import AdaptError
from ...frontend.export import ROOT, Exported, module_path
from ...frontend.fake_parameters import fake
from ...frontend.user_lines import line_of_node
from ...ir.graph import operand
from ...ops import autopar

aten = torch.ops.aten
CASTS = (aten.to.dtype, aten._to_copy.default)
PASSED = (*CASTS, aten.t.default, aten.detach.default)  # between a parameter and the op that uses it
READS = {"linear": (autopar.linear.default, 1), "embedding": (autopar.embedding.default, 0)}  # op, place of the weight


@dataclass(frozen=True)
class Editor:
    """Adds nodes in front of `before`, one behind the other, that belong to the module of `node`, or to `inside` of
    it."""

    exported: Exported
    node: fx.Node
    before: fx.Node
    inside: str = ""

    @staticmethod
    def behind(exported: Exported, node: fx.Node) -> Editor:
        """Return an editor that adds nodes right after `node`."""
        return Editor(exported, node, node.next)

    @staticmethod
    def in_front_of(exported: Exported, node: fx.Node) -> Editor:
        """Return an editor that adds nodes right before `node`."""
        return Editor(exported, node, node)

    def within(self, name: str) -> Editor:
        """Return the same editor for nodes of the module `name` inside."""
        return replace(self, inside=name)

    @property
    def _meta(self) -> dict:
        meta = {k: v for k, v in self.node.meta.items() if k not in ("val", "tensor_meta")}
        stack = dict(meta.get("nn_module_stack") or {})
        if self.inside and stack:
            key, (path, _) = list(stack.items())[-1]
            stack[f"{key}.{self.inside}"] = (f"{path}.{self.inside}", "torch.nn.modules.module.Module")
            meta["nn_module_stack"] = stack
        return meta

    @property
    def graph(self) -> fx.Graph:
        """Return the graph that is edited."""
        return self.node.graph

    def call(self, target, *args, **kwargs) -> fx.Node:
        """Add an op and compute its value on fake tensors."""
        with self.graph.inserting_before(self.before):
            new = self.graph.call_function(target, args, kwargs)
        new.meta = self._meta
        values, named = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            new.meta["val"] = target(*values, **named)
        return new

    @property
    def mode(self):
        """Return the mode of the forward's fake tensors."""
        return self.exported.inputs[0].fake_mode

    def parameter(self, name: str) -> fx.Node:
        """Read a parameter of the model that its forward does not read."""
        name = self.exported.ties.get(name, name)
        form = self.exported.forms[name]
        value = nn.Parameter(fake(self.mode, form.shape, form.dtype), requires_grad=form.trainable)
        return self._read(name, lambda owner, leaf: owner.register_parameter(leaf, value), value)

    def buffer(self, name: str, like: torch.Tensor) -> fx.Node:
        """Read a buffer of the model that its forward does not read; `like` has its shape and type."""
        value = fake(self.mode, like.shape, like.dtype)
        return self._read(name, lambda owner, leaf: owner.register_buffer(leaf, value), value)

    def _read(self, name: str, register: Callable[[nn.Module, str], None], value: torch.Tensor) -> fx.Node:
        *path, leaf = f"{ROOT}.{name}".split(".")
        owner = self.exported.graph_module
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner._modules[part]
        if leaf not in owner._parameters and leaf not in owner._buffers:
            register(owner, leaf)
        with self.graph.inserting_before(self.before):
            new = self.graph.get_attr(f"{ROOT}.{name}")
        new.meta = self._meta | {"val": value}
        return new

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Cast a node to `dtype`; return the node itself if it has that type."""
        return node if node.meta["val"].dtype == dtype else self.call(aten.to.dtype, node, dtype)


def reads_of(exported: Exported, name: str) -> Iterator[fx.Node]:
    """Iterate over the get_attr nodes of a parameter or buffer."""
    target = f"{ROOT}.{exported.ties.get(name, name)}"
    return (n for n in exported.graph_module.graph.nodes if n.op == "get_attr" and n.target == target)


def uses_of(exported: Exported, name: str) -> list[tuple[fx.Node, fx.Node]]:
    """Return (user, argument) of every op that computes with a parameter, looking through casts and transposes."""
    found, waiting = [], list(reads_of(exported, name))
    while waiting:
        source = waiting.pop(0)
        for user in source.users:
            if user.op == "call_function" and user.target in PASSED:
                waiting.append(user)
            else:
                found.append((user, source))
    return found


def computed_from(argument: fx.Node) -> fx.Node:
    """Return the node that a parameter is computed with: its first cast on the way to `argument`, or itself."""
    while argument.op != "get_attr" and argument.target not in CASTS:
        argument = operand(argument)
    return argument


def check_reads(kind: str, name: str, user: fx.Node, argument: fx.Node, why: str, fix: str) -> None:
    """Raise AdaptError if a use of a layer's weight is not the layer's own op; `why` says what that means for an
    adaptation."""
    op, at = READS[kind]
    if user.target is not op or user.args[at] is not argument:
        raise AdaptError(
            f"{name} goes into {user.target}, {why}",
            node=user.name,
            source=line_of_node(user) or None,
            shape=tuple(argument.meta["val"].shape),
            fix=fix,
        )


def is_read(exported: Exported, name: str) -> bool:
    """Return whether the graph reads a parameter: if so, the pass that added it has run."""
    return next(reads_of(exported, name), None) is not None


def uses_in(exported: Exported, name: str, model: nn.Module, module: nn.Module) -> list[tuple[fx.Node, fx.Node]]:
    """Return the uses as `uses_of` does, but of a shared parameter only those in this module of the model, under
    whichever of its names."""
    uses = uses_of(exported, name)
    is_shared = sum(first == exported.ties.get(name, name) for first in exported.ties.values()) > 1
    if not is_shared:
        return uses
    names = {n for n, m in model.named_modules(remove_duplicate=False) if m is module}
    return [(user, argument) for user, argument in uses if module_path(user) in names]


def replace_value(old: fx.Node, new: fx.Node, but: tuple[fx.Node, ...] = ()) -> None:
    """Let all that reads `old`, except the nodes in `but` and what `new` was made of, read `new`."""
    before = set()
    waiting = [new]
    while waiting:
        node = waiting.pop()
        if node not in before:
            before.add(node)
            waiting += [n for n in node.all_input_nodes if n is not old]
    for user in list(old.users):
        if user not in before and user not in but:
            user.replace_input_with(old, new)


def finish(exported: Exported) -> None:
    """Remove dead nodes, check the graph and recompile its module."""
    graph = exported.graph_module.graph
    graph.eliminate_dead_code()
    graph.lint()
    exported.graph_module.recompile()
