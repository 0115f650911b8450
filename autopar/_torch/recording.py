"""Record what autograd computes on fake tensors: below it, every op becomes a node of a graph.

Torch's private interfaces. Written for torch >= 2.11, < 2.16.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from .fakes import fake_twin, is_fake, storage_key

aten = torch.ops.aten
_META = ("stack_trace", "nn_module_stack")
_WRITE_WITHOUT_SAYING_SO = {
    aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default,
}  # fmt: skip


class NotRecorded(Exception):
    """A graph does what cannot be recorded, such as to write to a tensor of which there are views."""


@dataclass
class Leaf:
    """A parameter, a buffer, an input or a gradient of an output: a fake tensor that has a placeholder. `told`: what
    `joint_graph` tells of it."""

    told: tuple[str, Any]
    tensor: torch.Tensor
    placeholder: fx.Node
    has_gradient: bool


class Recorder(TorchDispatchMode):
    """The graph that is being made, and the node of each tensor that was seen. Ops in `meanings` are recorded as what
    they stand for; `meta` is what nodes that are added now are of: a module and a line."""

    def __init__(self, mode: Any, meanings: dict[object, Callable]):
        super().__init__()
        self.mode, self.meanings = mode, meanings
        self.graph, self.root = fx.Graph(), torch.nn.Module()
        self.meta: dict[str, Any] = {}
        self.leaves: list[Leaf] = []
        self.constants = 0
        self._nodes: dict[int, fx.Node] = {}
        self._seen: list[torch.Tensor] = []  # alive, so that no other tensor gets the `id` of one
        self._in_storage: dict[int, set[int]] = defaultdict(set)
        self._steps: set[torch.autograd.graph.Node] = set()

    def add_leaf(self, told: tuple[str, Any], tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake twin of a tensor that has a placeholder, behind those of other leaves."""
        twin = tensor.detach() if is_fake(tensor) else self.mode.from_tensor(tensor).detach()
        name = "_".join(str(part) for part in told).replace(".", "_")
        with self.graph.inserting_after(self.leaves[-1].placeholder if self.leaves else None):
            placeholder = self._add(twin, self.graph.placeholder(name))
        self.leaves.append(Leaf(told, twin.requires_grad_(tensor.requires_grad), placeholder, tensor.requires_grad))
        return twin

    def is_of_leaf(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in the memory of a leaf."""
        return any(id(leaf.tensor) in self._in_storage[storage_key(tensor)] for leaf in self.leaves)

    def node(self, tensor: torch.Tensor) -> fx.Node:
        """Return the node of a tensor that was seen; a plain tensor is a constant. Raises NotRecorded for others."""
        found = self._nodes.get(id(tensor))
        if found is None:
            if is_fake(tensor):
                raise NotRecorded("a fake tensor was made elsewhere")
            name = f"_tensor_constant{self.constants}"
            self.constants += 1
            setattr(self.root, name, tensor)
            found = self._add(tensor, self.graph.get_attr(name))
        return found

    def finish(self, outputs: Sequence[torch.Tensor | None]) -> fx.GraphModule:
        """Return the graph with these outputs, without ops that nobody reads."""
        self.graph.output([None if x is None else self.node(x) for x in outputs])
        self.graph.eliminate_dead_code()
        return fx.GraphModule(self.root, self.graph)

    def forget(self) -> None:
        """Forget all tensors and steps of autograd: those know the recorder, and no search for garbage would find
        that."""
        for kept in (self.leaves, self._nodes, self._seen, self._in_storage, self._steps):
            kept.clear()

    def mark(self, made: torch.autograd.graph.Node) -> None:
        """Have the steps of the backward that led to one, as far as they are new, be of what nodes are of now; where
        gradients are added up behind one is of a line alone."""
        meta, waiting = self.meta, [made]
        of_line = {key: value for key, value in meta.items() if key == "stack_trace"}
        while waiting:
            step = waiting.pop()
            if step not in self._steps:
                self._steps.add(step)
                step.register_prehook(partial(self._set, meta))
                step.register_hook(partial(self._set, of_line))
                waiting.extend(before for before, _ in step.next_functions if before is not None)

    def _set(self, meta: dict[str, Any], *gradients: object) -> None:
        self.meta = meta

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Run an op on fake tensors, or the ops that it stands for, and add its node."""
        kwargs = kwargs or {}
        if function.namespace == "prim":  # a question about a tensor's form
            return function(*args, **kwargs)
        meaning = self.meanings.get(function)
        if meaning is None and _is_composite(function, tree_leaves((args, kwargs))):
            meaning = function.decompose
        if meaning is not None:
            with self:
                found = meaning(*args, **kwargs)
            if found is not NotImplemented:
                return found
        if function._schema.is_mutable or function in _WRITE_WITHOUT_SAYING_SO:
            return self._write(function, args, kwargs)
        if function is aten.lift_fresh.default:  # of a tensor that a trace must not change
            function = aten.lift_fresh_copy.default
        return self._call(function, args, kwargs)

    def _call(self, function, args, kwargs):
        node_args, node_kwargs = tree_map_only(torch.Tensor, self.node, (args, kwargs))
        found = function(*args, **kwargs)
        name = self.graph._target_to_str(function.overloadpacket.__name__)
        self._note(found, self.graph.create_node("call_function", function, node_args, node_kwargs, name))
        return found

    def _write(self, function, args, kwargs):
        """Run an op that writes to its first argument, and add the node of the op that returns what it writes."""
        plain, written = _without_write(function), args[0] if args else None
        if plain is None or not isinstance(written, torch.Tensor) or id(written) not in self._nodes:
            raise NotRecorded(f"there is no op without a write for {function}")
        if len(self._in_storage[storage_key(written)]) > 1:
            raise NotRecorded(f"{function} writes to a tensor of which there are views")
        value = self._call(plain, args, kwargs)
        if (value.shape, value.dtype) != (written.shape, written.dtype):
            raise NotRecorded(f"{function} casts what it writes")
        self._nodes[id(written)] = self._nodes[id(value)]
        return function(*args, **kwargs)

    def _note(self, found: object, node: fx.Node) -> None:
        """Note the tensors that a node returns."""
        if isinstance(found, torch.Tensor):
            self._add(found, node)
        elif isinstance(found, (tuple, list)):
            node.meta.update(self.meta, val=tree_map(_detached, found))
            for at, part in enumerate(found):
                self._note(part, self.graph.call_function(getitem, (node, at)))
        elif found is None:
            node.meta.update(self.meta, val=None)
        else:
            raise NotRecorded(f"{node.target} returns a {type(found).__name__}")

    def _add(self, tensor: torch.Tensor, node: fx.Node) -> fx.Node:
        node.meta.update(self.meta, val=_detached(tensor))
        self._nodes[id(tensor)] = node
        self._seen.append(tensor)
        self._in_storage[storage_key(tensor)].add(id(tensor))
        return node


class RecordedForward(fx.Interpreter):
    """A run of a forward graph on leaves of a recorder: what its nodes compute, and what the backward of them computes,
    is of their modules and lines."""

    def __init__(self, module: fx.GraphModule, state: dict[str, torch.Tensor], recorder: Recorder):
        super().__init__(module)
        self.state, self.recorder = state, recorder

    def fetch_attr(self, target: str) -> Any:
        """Return the leaf of a parameter or buffer, and any other attribute itself."""
        return self.state[target] if target in self.state else super().fetch_attr(target)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and have the backward of what it computes know it."""
        self.recorder.meta = {key: n.meta[key] for key in _META if key in n.meta}
        found = super().run_node(n)
        for value in tree_leaves(found):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                self.recorder.mark(value.grad_fn)
        return found


def _detached(value: object) -> object:
    """Return a tensor of the same form that autograd knows nothing of."""
    return fake_twin(value) if isinstance(value, torch.Tensor) and is_fake(value) else value


def _is_composite(function: torch._ops.OpOverload, leaves: list) -> bool:
    """Return whether autograd would have run the ops that an op stands for, as it has no kernel of its own."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if not has_kernel(function.name(), "CompositeImplicitAutograd"):
        return False
    device = next((x.device.type for x in leaves if isinstance(x, torch.Tensor)), None)
    return device is None or not has_kernel(function.name(), torch._C._dispatch_key_for_device(device))


def _without_write(function: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Return the op that returns what another one writes to its first argument, as `add` does for `add_`."""
    name = function.overloadpacket.__name__
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(getattr(torch.ops, function.namespace), name[:-1], None)
    return getattr(packet, function._overloadname, None)
