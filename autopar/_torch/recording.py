"""Record the joint forward and backward graph of a graph that writes to nothing: autograd runs on fake tensors, and
below it every op becomes a node.

It costs a third of torch's own joint trace, which makes writes functional first; `joint_graph` of joint.py turns to
that one for whatever is not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from .fakes import fake_twin, is_fake

aten = torch.ops.aten
_META = ("stack_trace", "nn_module_stack")


class NotRecorded(Exception):
    """A graph writes to tensors, reads their values or returns its inputs, so that it cannot be recorded."""


def recorded_joint(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], decompositions: dict[object, Callable]
) -> tuple[fx.GraphModule, list, list]:
    """Return what `joint_graph` does. Raises NotRecorded for a graph that cannot be recorded, and whatever its ops
    raise on fake tensors."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode(list(inputs))
    recorder = _Recorder(decompositions)
    state = {name: recorder.leaf(mode, tensor, name) for name, tensor in _state(module)}
    given = [recorder.leaf(mode, tensor, f"input_{at}") for at, tensor in enumerate(inputs)]
    placeholders = [(kind, name) for kind, name in _kinds(module)] + [("input", at) for at in range(len(given))]
    with mode, enable_python_dispatcher(), recorder:
        outputs = tree_leaves(_Forward(module, state, recorder).run(*given))
    if not all(isinstance(x, torch.Tensor) and id(x) in recorder.nodes for x in outputs):
        raise NotRecorded("an output is no tensor that is computed")
    if any(_storage(x) in recorder.leaf_storages for x in outputs):
        raise NotRecorded("an output is an input, or lies in its memory")
    differentiated = [at for at, x in enumerate(outputs) if x.requires_grad]
    tangents = [recorder.tangent(mode, outputs[at], at) for at in differentiated]
    leaves = [*state.values(), *given]
    wanted = [at for at, leaf in enumerate(leaves) if leaf.requires_grad]
    gradients: Sequence[torch.Tensor | None] = ()
    if wanted and tangents:
        with mode, enable_python_dispatcher(), recorder:
            gradients = torch.autograd.grad(
                [outputs[at] for at in differentiated], [leaves[at] for at in wanted], tangents, allow_unused=True
            )
    described: list[Any] = [("output", at) for at in range(len(outputs))]
    for at in wanted:
        kind, name = placeholders[at]
        described.append(("input_gradient" if kind == "input" else "gradient", name))
    graph_module = recorder.finished([*outputs, *gradients])
    return graph_module, [*placeholders, *(("tangent", at) for at in differentiated)], described


def _state(module: fx.GraphModule) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _kinds(module: fx.GraphModule) -> Iterator[tuple[str, str]]:
    yield from (("parameter", name) for name, _ in module.named_parameters(remove_duplicate=False))
    yield from (("buffer", name) for name, _ in module.named_buffers(remove_duplicate=False))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Recorder(TorchDispatchMode):
    """The graph that is being made, the node of each tensor that was seen, and which node of the forward made it."""

    def __init__(self, decompositions: dict[object, Callable]):
        super().__init__()
        self.decompositions = decompositions
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.nodes: dict[int, fx.Node] = {}
        self.alive: list[torch.Tensor] = []  # so that no other tensor gets the `id` of one
        self.leaf_storages: set[int] = set()
        self.meta: dict[str, Any] = {}
        self.after: fx.Node | None = None  # of the placeholders, the last one

    def leaf(self, mode: Any, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return a fake tensor for a parameter, buffer or input, which has a placeholder."""
        twin = tensor.detach() if is_fake(tensor) else mode.from_tensor(tensor).detach()
        self.leaf_storages.add(_storage(twin))
        self.after = self._added(twin, self.graph.placeholder(name.replace(".", "_")))
        return twin.requires_grad_(tensor.requires_grad)

    def tangent(self, mode: Any, output: torch.Tensor, at: int) -> torch.Tensor:
        """Return a fake tensor for the gradient of an output, which has a placeholder behind those of the leaves."""
        with mode, torch.no_grad():
            twin = torch.empty(output.shape, dtype=output.dtype, device=output.device)
        with self.graph.inserting_after(self.after):
            self.after = self._added(twin, self.graph.placeholder(f"tangents_{at}"))
        return twin

    def finished(self, outputs: Sequence[torch.Tensor | None]) -> fx.GraphModule:
        """Return the graph with these outputs and no node that is not read."""
        self.graph.output([None if x is None else self.nodes[id(x)] for x in outputs])
        self.graph.eliminate_dead_code()
        self.nodes.clear()
        self.alive.clear()  # what autograd keeps of them would keep the recorder, where no search for garbage looks
        return fx.GraphModule(self.root, self.graph)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Run an op on fake tensors, or what it is to be traced into, and add its node."""
        kwargs = kwargs or {}
        if function.namespace == "prim":  # a question about a tensor's form
            return function(*args, **kwargs)
        if (meaning := self.decompositions.get(function)) is not None:
            with self:
                found = meaning(*args, **kwargs)
            if found is not NotImplemented:
                return found
        if _is_composite(function):
            with self:
                found = function.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        if function._schema.is_mutable:
            raise NotRecorded(f"{function} writes to a tensor")
        if function is aten.lift_fresh.default:
            function = aten.lift_fresh_copy.default
        node_args, node_kwargs = tree_map_only(torch.Tensor, self._node_of, (args, kwargs))
        found = function(*args, **kwargs)
        name = self.graph._target_to_str(function.overloadpacket.__name__)
        node = self.graph.create_node("call_function", function, node_args, node_kwargs, name)
        self._record(found, node)
        return found

    def _record(self, found: object, node: fx.Node) -> None:
        """Note the tensors that a node returns."""
        if isinstance(found, torch.Tensor):
            self._added(found, node)
        elif isinstance(found, (tuple, list)):
            node.meta.update(self.meta, val=tree_map(_detached, found))
            for at, part in enumerate(found):
                if part is not None:
                    self._record(part, self.graph.call_function(getitem, (node, at)))
        elif found is None:
            node.meta.update(self.meta, val=None)
        else:
            raise NotRecorded(f"{node.target} returns {type(found).__name__}")

    def _added(self, tensor: torch.Tensor, node: fx.Node) -> fx.Node:
        node.meta.update(self.meta, val=_detached(tensor))
        self.nodes[id(tensor)] = node
        self.alive.append(tensor)
        return node

    def _node_of(self, tensor: torch.Tensor) -> fx.Node:
        """Return the node of a tensor; a plain tensor is a constant."""
        node = self.nodes.get(id(tensor))
        if node is None:
            if is_fake(tensor):
                raise NotRecorded("a tensor comes from nowhere")
            name = f"_tensor_constant{len(list(self.root.buffers())) + len(self.root.__dict__)}"
            setattr(self.root, name, tensor)
            node = self._added(tensor, self.graph.get_attr(name))
        return node


class _Forward(fx.Interpreter):
    """The run of a forward graph on the recorder's leaves. What its nodes compute, and what the backward of them
    computes, is of their modules and lines; where gradients of one tensor are added up is of a line alone."""

    def __init__(self, module: fx.GraphModule, state: dict[str, torch.Tensor], recorder: _Recorder):
        super().__init__(module)
        self.state, self.recorder = state, recorder
        self.seen: set[torch.autograd.graph.Node] = set()

    def fetch_attr(self, target: str) -> Any:
        """Return the leaf of a parameter or buffer, and any other attribute itself."""
        return self.state[target] if target in self.state else super().fetch_attr(target)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and have the backward of what it computed know it."""
        self.recorder.meta = {key: n.meta[key] for key in _META if key in n.meta}
        found = super().run_node(n)
        for value in tree_leaves(found):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                self._mark(value.grad_fn, self.recorder.meta)
        return found

    def _mark(self, made: torch.autograd.graph.Node, meta: dict[str, Any]) -> None:
        added_up = {key: value for key, value in meta.items() if key == "stack_trace"}
        waiting = [made]
        while waiting:
            function = waiting.pop()
            if function in self.seen:
                continue
            self.seen.add(function)
            function.register_prehook(partial(self._enter, meta))
            function.register_hook(partial(self._leave, added_up))
            waiting.extend(before for before, _ in function.next_functions if before is not None)

    def _enter(self, meta: dict[str, Any], gradients: object) -> None:
        self.recorder.meta = meta

    def _leave(self, meta: dict[str, Any], inputs: object, outputs: object) -> None:
        self.recorder.meta = meta


def _detached(value: object) -> object:
    """Return a tensor of the same form that autograd knows nothing of."""
    return fake_twin(value) if isinstance(value, torch.Tensor) and is_fake(value) else value


def _is_composite(function: torch._ops.OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd")
