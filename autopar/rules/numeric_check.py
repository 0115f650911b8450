"""Checks a rule numerically: shard the inputs of an op as each strategy says, run on every device, combine, compare."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from .._torch import tree_map
from ..errors import RuleError
from ..ir.graph import tensor_arguments, values_of
from ..ir.layout import Layout, dim_ranges, local_part, local_shape
from ..ir.mesh import Mesh
from .layers import RING
from .localize import local_call
from .lookup import rule_of
from .register import overload_of, suggestion
from .rule import Rule, Strategy, strategies

MESHES = tuple(map(Mesh.parse, ("x=2", "x=3", "x=2,y=2")))
NOISE = torch.Generator().manual_seed(0)


def check_rule(op: object, *args: object, **kwargs: object) -> int:
    """Compare all ways in which the rule of `op` lets the call `op(*args, **kwargs)` be sharded, over 2, 3 and 2 x 2
    devices, with the op itself, and return how many they are. Arguments in float64 tell rounding from mistakes best;
    dims of different sizes hide none. Raises RuleError with those that are wrong, or if there is no rule."""
    node, inputs = make_node(overload_of(op), *args, **kwargs)
    if (rule := rule_of(node)) is None:
        raise RuleError(f"{node.target} has no sharding rule for this call", fix=suggestion(node))
    found = [check(node, inputs, mesh, rule) for mesh in MESHES]
    if wrong := [fault for _, faults in found for fault in faults]:
        lines = "".join(f"\n  {fault}" for fault in wrong[:8])
        raise RuleError(
            f"the rule of {node.target} is wrong in {len(wrong)} of {sum(n for n, _ in found)} ways "
            f"(mesh: the factor that each axis cuts: layouts of arguments -> of results: what is wrong):{lines}",
            fix="write _ for a dim that cannot be cut, and leave out of linear= what is not",
        )
    return sum(count for count, _ in found)


@dataclass(frozen=True)
class Wrong:
    """A strategy whose combined result is not the op's, and in what."""

    strategy: Strategy
    mesh: Mesh
    reason: str

    def __str__(self) -> str:
        inputs, outputs = (", ".join(map(str, side)) for side in (self.strategy.inputs, self.strategy.outputs))
        return f"{self.mesh}: {self.strategy.text(self.mesh)}: {inputs} -> {outputs}: {self.reason}"


def check(
    node: fx.Node, inputs: list[Tensor], mesh: Mesh, rule: Rule, parts: Mapping[str, Sequence[int]] | None = None
) -> tuple[int, list[Wrong]]:
    """Return the number of strategies of a node's rule over `mesh`, and those that are wrong."""
    expected = values_of(node)
    given, made = ([tuple(t.shape) for t in side] for side in (inputs, expected))
    found = [s for s in strategies(rule, given, made, mesh, parts) if not _is_seen_on_fewer_axes(s, mesh)]
    found = [s for s in found if not _sends(node, s)]
    wrong = [Wrong(s, mesh, reason) for s in found if (reason := _difference(node, inputs, expected, mesh, s))]
    return len(found), wrong


def _sends(node: fx.Node, strategy: Strategy) -> bool:
    """Return whether devices send each other something inside the op: rows by owner, or blocks of keys."""
    owned = any(layout.owned_axes for layout in (*strategy.inputs, *strategy.outputs))
    return owned or RING in (word.split("/")[0] for word in strategy.choice)


def _is_seen_on_fewer_axes(strategy: Strategy, mesh: Mesh) -> bool:
    """Return whether smaller checks say as much: an axis does nothing, or two axes of the same size have changed
    places."""
    if len(mesh.names) == 1:
        return False
    mirrored = len(set(mesh.sizes)) == 1 and list(strategy.choice) != sorted(strategy.choice)
    return mirrored or not all(strategy.choice)


def _difference(node: fx.Node, inputs: list[Tensor], expected: list[Tensor], mesh: Mesh, strategy: Strategy) -> str:
    scattered = [Scattered(value, layout, mesh) for value, layout in zip(inputs, strategy.inputs)]
    results: list[list[Tensor]] = []
    for rank in range(mesh.devices):
        here = mesh.coordinate(rank)
        tensors = iter([s.local(here) for s in scattered])
        try:
            value = run(node, tensors, lambda a, k, here=here: local_call(node, strategy, mesh, here, a, k))
        except Exception as error:  # a local call that cannot run is a wrong rule as well
            return f"rank {rank} raised {type(error).__name__}: {str(error).splitlines()[0]}"
        results.append([value] if isinstance(value, Tensor) else [v for v in value if isinstance(v, Tensor)])
    if "empty" in str(node.target):
        return ""
    narrow = {torch.float32, torch.float16, torch.bfloat16} & {t.dtype for t in inputs + expected}
    tolerance = 1e-5 if narrow else 1e-9
    for i, (whole, layout) in enumerate(zip(expected, strategy.outputs)):
        problem = _compare(whole, layout, mesh, [local[i] for local in results], tolerance)
        if problem:
            return f"output {i}: {problem}"
    return ""


class Scattered:
    """A tensor in some layout. A Partial one is random parts that add up to it (no rule takes a maximum's parts)."""

    def __init__(self, value: Tensor, layout: Layout, mesh: Mesh):
        self.layout, self.mesh, self.axes = layout, mesh, [axis for axis, _ in layout.partial]
        positions = list(itertools.product(*(range(mesh.size(axis)) for axis in self.axes)))
        noise = [torch.randn(value.shape, generator=NOISE, dtype=torch.float64).to(value.dtype) for _ in positions[1:]]
        self.parts = dict(zip(positions, [value - sum(noise) if noise else value, *noise]))

    def local(self, coordinate: dict[str, int]) -> Tensor:
        """Return a copy of what the device at a coordinate holds."""
        part = self.parts[tuple(coordinate[axis] for axis in self.axes)]
        return local_part(part, self.layout, self.mesh, coordinate).clone()


def _compare(whole: Tensor, layout: Layout, mesh: Mesh, local: list[Tensor], tolerance: float) -> str:
    """Return why the local values are not `whole` in this layout, "" if they are."""
    axes = [axis for axis, _ in layout.partial]
    parts: dict[tuple[int, ...], Tensor] = {}
    filled: dict[tuple[int, ...], Tensor] = {}
    for rank, value in enumerate(local):
        here = mesh.coordinate(rank)
        if tuple(value.shape) != local_shape(whole.shape, layout, mesh, here):
            return f"rank {rank} has shape {tuple(value.shape)}, not {local_shape(whole.shape, layout, mesh, here)}"
        if value.dtype != whole.dtype:
            return f"rank {rank} has {value.dtype}, not {whole.dtype}"
        key = tuple(here[axis] for axis in axes)
        part = parts.setdefault(key, torch.zeros_like(whole))
        done = filled.setdefault(key, torch.zeros(whole.shape, dtype=torch.bool))
        index = _index(whole, layout, mesh, here)
        repeated = done[index]
        if not _close(part[index][repeated], value[repeated], tolerance):
            return f"rank {rank} differs from its replica"
        part[index], done[index] = value, True
    if not all(done.all() for done in filled.values()):
        return "some elements are on no device"
    combined, *others = parts.values()
    if others and whole.numel():
        largest = max(float(v.abs().nan_to_num(posinf=0).max()) for v in parts.values())
        tolerance *= max(1.0, largest)  # parts may be larger than their sum
        adds = layout.partial[0][1] == "sum"
        combined = sum(others, combined) if adds else torch.stack([combined, *others]).amax(0)
    if _close(combined, whole, tolerance):
        return ""
    return f"{int((combined != whole).sum())} of {whole.numel()} elements differ"


def _index(whole: Tensor, layout: Layout, mesh: Mesh, coordinate: dict[str, int]) -> tuple[Tensor, ...]:
    """Return the indices of a device's elements in the whole."""
    held = []
    for d, size in enumerate(whole.shape):
        ranges = dim_ranges(size, layout.dims[d], layout.parts[d], mesh, coordinate) if layout.dims[d] else [(0, size)]
        indices = torch.cat([torch.arange(a, b) for a, b in ranges])
        held.append(indices.reshape([-1 if e == d else 1 for e in range(whole.dim())]))
    return tuple(held)


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def make_node(target: Callable[..., object], *args: object, **kwargs: object) -> tuple[fx.Node, list[Tensor]]:
    """Return the node of a graph of one op on real tensors, its metadata filled, and the values of its tensor
    arguments. An argument that is itself a node keeps its op (so that the rule can see that it is zero)."""
    graph = fx.Graph()

    def placeholder(value: object) -> object:
        if isinstance(value, fx.Node):
            return graph.node_copy(value, lambda n: n)
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder(f"t{len(graph.nodes)}")
        node.meta["val"] = value
        return node

    node = graph.call_function(target, *tree_map(placeholder, (args, kwargs)))
    inputs = [argument.meta["val"] for argument in tensor_arguments(node)]
    node.meta["val"] = run(node, iter([x.clone() for x in inputs]))
    return node, inputs


def run(
    node: fx.Node,
    tensors: Iterator[Tensor],
    localize: Callable[..., tuple[Any, Any]] = lambda args, kwargs: (args, kwargs),
) -> Any:
    """Run a node's op with `tensors` in the places of its tensor arguments; `localize` changes the others."""
    args, kwargs = tree_map(lambda a: next(tensors) if isinstance(a, fx.Node) else a, (node.args, dict(node.kwargs)))
    args, kwargs = localize(args, kwargs)
    return cast(Callable[..., Any], node.target)(*args, **kwargs)
