"""Turn the global joint graph into the graph of one rank: shapes become local and redistributions become collectives.

For each op in order: every tensor argument is brought from its producer's layout into the layout that the op's
sharding asks for, constants of the call become local ones (`rules.local_call`), and the op is emitted and run on fake
local tensors, whose shapes must be those that the layouts imply.

A parameter on the host arrives there. It is copied to the device when an op first asks for it, after the cast to the
type that it computes in if it has one; every redistribution starts from that copy. Its gradient is copied to the host
as soon as it is reduced, and every gradient is reduced as soon as it is made.

A copy of a tensor in another layout is made once for each phase, however many ops read it, and a redistribution
starts from the furthest copy on its way. The backward does not see the forward's copies unless they are in
`sharding.kept`.

Metadata of the local graph's nodes, besides role, phase, module and source (see autopar/ir/graph.py):

    val         the local fake value
    global      the fake value of the global tensor (or tuple of tensors) of which the node holds a part
    layout      the Layout of that part, or a tuple of them, one a tensor output; absent inside a redistribution
    sharding    on ops of the joint graph: their NodeSharding
    collective  on collectives: a passes.distribute.emit.Collective, and `tensor_bytes` of the global tensor that moves
    tensor      on nodes of a redistribution: name of the global tensor
    part_of     on nodes of an op that is computed by several: its name
    kept        True on the copy that one ends with if the backward may read it as the forward made it

The graph module's own `meta` has "rank" and "mesh".
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ... import rules
from ..._torch import graph_module, tree_flatten, tree_unflatten
from ...cost.exchange import IDENTITIES, WAYS
from ...errors import VerifyError
from ...ir.casts import own_casts
from ...ir.graph import OutputRole, describe, is_tensor, operand, outputs_of, tensor_arguments, tensor_of, values_of
from ...ir.layout import Layout, is_partial_sum, local_part, local_shape
from ...plans.sharding import NodeSharding, Sharding
from .capped_rows import CappedExchange
from .emit import Builder, Emitter
from .exchange_rows import RowExchange
from .exchange_tokens import TokenExchange
from .hot_experts import HotExchange
from .ring_attention import RingAttention
from .zigzag_attention import ZigzagAttention

aten = torch.ops.aten
HOST = torch.device("cpu")

# A view needs strides that a local value may not have; reshape gives the same values and copies where it must.
RESHAPE = {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}


def localize(
    joint: fx.GraphModule,
    sharding: Sharding,
    rank: int,
    reduce_scatter: str = "native",
    coordinate: Mapping[str, int | range] | None = None,
    reduce_dtype: torch.dtype | None = None,
    expert_capacity: float | None = None,
    hot_experts: int = 0,
) -> fx.GraphModule:
    """Build the graph that `rank` runs. `reduce_scatter` is "native" or "all_to_all" (see
    passes.distribute.emit.Emitter). `coordinate`: instead of the rank's, one that may span several places along an axis
    whose shards never move: the graph of all of them as one. `reduce_dtype`: in which gradients are added up over
    devices, if it is narrower than they are. `expert_capacity`: as in `Plan`; rows beyond it are left out (see
    add_rounds.py); `hot_experts`: as in `Plan` (see hot_experts.py)."""
    how = reduce_scatter, coordinate, reduce_dtype, expert_capacity, hot_experts
    localizer = _Localizer(joint, sharding, rank, *how)
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            localizer.placeholder(node)
        elif node.op == "get_attr":
            localizer.constant(node)
        elif node.op == "output":
            localizer.output(node)
        elif node.target is operator.getitem:
            localizer.item(node)
            localizer.gradient(node)
        else:
            localizer.op(node)
            localizer.gradient(node)
    return localizer.finish()


@dataclass(frozen=True)
class _Outputs:
    """The outputs of a joint graph in their order, with their roles; where each gradient stands among them; and the
    gradients that nothing else reads."""

    every: list[tuple[fx.Node, OutputRole]]
    gradients: dict[fx.Node, list[int]]
    alone: frozenset[fx.Node]

    @staticmethod
    def of(graph: fx.Graph) -> _Outputs:
        """Return the outputs of a graph."""
        every, gradients = outputs_of(graph), defaultdict(list)
        kinds: dict[fx.Node, set[str]] = defaultdict(set)
        for at, (value, role) in enumerate(every):
            kinds[value].add(role.kind)
            if role.kind == "gradient":
                gradients[value].append(at)
        alone = (value for value, found in kinds.items() if found == {"gradient"} and len(value.users) == 1)
        return _Outputs(every, gradients, frozenset(alone))


class _Localizer:
    """The state of the walk: `own` has every tensor's local value in its producer's layout, `copies` all others."""

    def __init__(
        self,
        joint,
        sharding: Sharding,
        rank: int,
        reduce_scatter: str,
        coordinate: Mapping | None = None,
        reduce_dtype: torch.dtype | None = None,
        expert_capacity: float | None = None,
        hot_experts: int = 0,
    ):
        self.joint, self.sharding, self.mesh, self.rank = joint, sharding, sharding.mesh, rank
        self.coordinate, self.is_micro_batch = coordinate or self.mesh.coordinate(rank), coordinate is not None
        self.root = torch.nn.Module()
        self.builder = Builder(fx.Graph())
        self.emitter = Emitter(self.builder, self.mesh, self.coordinate, reduce_scatter)
        device = self.builder, self.mesh, self.coordinate, rank, sharding.nodes
        self.hot = HotExchange(*device, hot_experts) if hot_experts and not expert_capacity else None
        self.exchange = self.hot or RowExchange(*device)
        if expert_capacity:
            self.exchange = CappedExchange(*device, expert_capacity)
        self.exchange_tokens = TokenExchange(self.exchange)
        self.ring = RingAttention(self.builder, self.mesh, self.coordinate, rank)
        self.zigzag = ZigzagAttention(self.builder, self.mesh, self.coordinate)
        self.own: dict[tuple[str, int], tuple[fx.Node, Layout]] = {}
        self.several: dict[str, fx.Node] = {}  # ops with several outputs
        self.copies: dict[tuple[str, int, Layout, str], fx.Node] = {}
        leaves = [n for n in joint.graph.nodes if n.op == "placeholder" and n.name in sharding.on_host]
        self.on_host = {n.name for n in leaves}  # tensors that the device has no copy of yet
        self.from_host = {n.meta["role"].name for n in leaves}
        self.outputs, self.reduce_dtype = _Outputs.of(joint.graph), reduce_dtype
        self.given: dict[int, fx.Node] = {}  # outputs that are there already
        self.casts = {cast.name: n.name for n, cast in own_casts(joint.graph).items() if n.name in self.on_host}

    def placeholder(self, node: fx.Node) -> None:
        """Add a placeholder with its local shape."""
        local = self.builder.graph.create_node("placeholder", node.name, (), {}, node.name)
        self._leaf(node, local)

    def constant(self, node: fx.Node) -> None:
        """Add a constant and keep the device's part of its tensor."""
        tensor = operator.attrgetter(str(node.target))(self.joint)
        name = str(node.target).replace(".", "_")
        self.root.register_buffer(name, local_part(tensor, self._leaf_layout(node), self.mesh, self.coordinate))
        self._leaf(node, self.builder.graph.create_node("get_attr", name, (), {}, node.name))

    def _leaf_layout(self, node: fx.Node) -> Layout:
        return self.sharding.leaves.get(node.name, Layout.replicated(node.meta["val"].dim()))

    def _leaf(self, node: fx.Node, local: fx.Node) -> None:
        value, layout = node.meta["val"], self._leaf_layout(node)
        shape = local_shape(value.shape, layout, self.mesh, self.coordinate)
        device = HOST if node.name in self.on_host else value.device
        local.meta = {**node.meta, "val": self.builder.empty(shape, value, device), "global": value, "layout": layout}
        self.own[node.name, 0] = local, layout

    def item(self, node: fx.Node) -> None:
        """Add one output of an op. It belongs to the op's phase whoever reads it: ops stay whole when phases part."""
        producer, index = tensor_of(node)
        if (producer.name, index) in self.own:  # made one by one
            return
        local = self.several[producer.name]
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return
        layout = local.meta["layout"][sum(isinstance(v, torch.Tensor) for v in producer.meta["val"][:index])]
        self.builder.meta = {**_origin(node), "global": node.meta["val"], "layout": layout}
        self.builder.meta["phase"] = local.meta["phase"]
        self.own[producer.name, index] = self.builder.call(operator.getitem, local, index, name=node.name), layout

    def op(self, node: fx.Node) -> None:
        """Add an op on local tensors, behind the redistributions that its sharding asks for. Raises VerifyError if it
        fails or gives other shapes or types than its layouts imply."""
        sharding = self.sharding.nodes.get(node.name) or _replicated(node)
        tensors = tensor_arguments(node)
        if len(tensors) != len(sharding.inputs):
            raise _error(f"{len(sharding.inputs)} layouts for {len(tensors)} tensor arguments", node, sharding)
        layouts = iter(sharding.inputs)
        flat, spec = tree_flatten((node.args, node.kwargs))
        if node.name in self.casts:  # the host makes the type that computes, so that less is copied
            flat = [self.own[a.name, 0][0] if is_tensor(a) else a for a in flat]
            self.on_host ^= {node.name, self.casts[node.name]}
        else:
            flat = [self._copy(a, next(layouts), node.meta["phase"], node) if is_tensor(a) else a for a in flat]
        args, kwargs = tree_unflatten(flat, spec)
        if node.target in WAYS and not self.is_micro_batch:  # which are planned and localized in their turn
            self._exchange(node, sharding, args)
            return
        if self.ring.goes_round(node, sharding):
            self._by_steps(self.ring, node, sharding, args)
            return
        if self.zigzag.is_several(node, sharding):
            self._by_steps(self.zigzag, node, sharding, args)
            return
        args, kwargs = rules.local_call(node, sharding, self.mesh, self.coordinate, args, kwargs)
        if self.hot is not None and self.hot.has_copies(node, sharding):
            self._by_steps(self.hot.product, node, sharding, (*args, *kwargs.values()))
            return
        single = isinstance(node.meta["val"], torch.Tensor)
        self.builder.meta = {
            **_origin(node),
            "global": node.meta["val"],
            "layout": sharding.outputs[0] if single else tuple(sharding.outputs),
            "sharding": sharding,
        }
        try:
            local = self.builder.call(RESHAPE.get(node.target, node.target), *args, name=node.name, **kwargs)
        except Exception as error:
            raise _error(f"the local op failed on rank {self.rank}: {error}", node, sharding) from error
        self._check(node, values_of(local), sharding)
        if single:
            self.own[node.name, 0] = local, sharding.outputs[0]
        else:
            self.several[node.name] = local

    def _exchange(self, node: fx.Node, sharding, args) -> None:
        """Send rows to their experts or back."""
        self.builder.meta = _origin(node)
        self.exchange.check(node, sharding.choice)
        exchange = self.exchange if node.target in IDENTITIES else self.exchange_tokens
        local = exchange(node, sharding, *args)
        self._check(node, values_of(local), sharding)
        if local is not args[0]:
            local.meta |= {"global": node.meta["val"], "layout": sharding.outputs[0]}
        self.own[node.name, 0] = local, sharding.outputs[0]

    def _by_steps(self, steps: Callable[..., list[fx.Node]], node: fx.Node, sharding, args) -> None:
        """Compute attention, or a product with copies, by several calls."""
        self.builder.meta = _origin(node)
        outputs = steps(node, sharding, args)
        self._check(node, [x.meta["val"] for x in outputs], sharding)
        for index, (local, value, layout) in enumerate(zip(outputs, values_of(node), sharding.outputs)):
            local.meta |= {"global": value, "layout": layout}
            self.own[node.name, index] = local, layout

    def _check(self, node: fx.Node, got: Sequence[torch.Tensor], sharding) -> None:
        values = values_of(node)
        if not len(got) == len(values) == len(sharding.outputs):
            raise _error(f"{len(got)} local outputs, {len(sharding.outputs)} layouts", node, sharding)
        for mine, value, layout in zip(got, values, sharding.outputs):
            shape = local_shape(value.shape, layout, self.mesh, self.coordinate)
            if tuple(mine.shape) != shape or mine.dtype != value.dtype:
                raise _error(
                    f"the local op gives {tuple(mine.shape)} {mine.dtype} on rank {self.rank}, "
                    f"its layout {layout} implies {shape} {value.dtype}",
                    node,
                    sharding,
                )

    def gradient(self, node: fx.Node) -> None:
        """Bring a gradient to where its parameter is as soon as it is made: until it is reduced it may be many times
        its size."""
        for at in self.outputs.gradients.get(node, ()):
            self.given[at] = self._output(node, self.sharding.outputs[at], self.outputs.every[at][1])

    def output(self, node: fx.Node) -> None:
        """Add the output node, with every output in its layout."""
        values = [
            self.given[at] if at in self.given else self._output(value, layout, role)
            for at, ((value, role), layout) in enumerate(zip(self.outputs.every, self.sharding.outputs, strict=True))
        ]
        local = self.builder.graph.output(tuple(values))
        local.meta = {**node.meta, "layouts": self.sharding.outputs}
        local.meta.pop("val", None)

    def _output(self, value: fx.Node, layout: Layout | None, role: OutputRole) -> fx.Node:
        """Return the local value of an output, on the host if its parameter is there."""
        phase = "forward" if role.is_forward else "backward"
        producer, index = tensor_of(value)
        layout = layout or self.own[producer.name, index][1]
        reduce_dtype = self.reduce_dtype if value in self.outputs.alone else None
        local = self._copy(value, layout, phase, value, reduce_dtype)
        if role.kind == "gradient" and role.name in self.from_host:
            return self._moved(local, HOST, value.meta["val"], layout, phase, f"{value.name}_on_host")
        return local

    def _on_device(self, producer: fx.Node, index: int, phase: str) -> tuple[fx.Node, Layout]:
        """Return the local value of a tensor as its producer made it, on the device."""
        local, layout = self.own[producer.name, index]
        if producer.name in self.on_host:
            self.on_host.remove(producer.name)
            value = producer.meta["val"]
            device = torch.device(value.device.type)  # the rank's own, whichever that was where the graph was traced
            local = self._moved(local, device, value, layout, phase, f"{producer.name}_on_device")
            self.own[producer.name, index] = local, layout
        return local, layout

    def _moved(
        self, local: fx.Node, device: torch.device, value: torch.Tensor, layout: Layout, phase: str, name: str
    ) -> fx.Node:
        """Add a copy of a local value on the host or the device; of no module, so that no block makes it again."""
        self.builder.meta = {"phase": phase, "module": "", "source": "", "global": value, "layout": layout}
        return self.builder.call(aten._to_copy.default, local, device=device, name=name)

    def _copy(
        self, tensor: fx.Node, wanted: Layout, phase: str, consumer: fx.Node, reduce_dtype: torch.dtype | None = None
    ) -> fx.Node:
        """Return the local value of a global tensor in the layout `wanted`; a sum over devices is made in
        `reduce_dtype`, if that is narrower. Raises VerifyError if no collective leads there."""
        producer, index = tensor_of(tensor)
        local, layout = self._on_device(producer, index, phase)
        redistribution = self.sharding.redistributor(layout, wanted)
        if redistribution is None:
            raise VerifyError(
                f"{tensor.name} is {layout} and {consumer.name} wants {wanted}: no collective leads there",
                node=describe(consumer),
                source=consumer.meta.get("source"),
                mesh=self.mesh,
            )
        # a copy is shared with consumers that want the same layout, as the planner pays for it, not with steps to
        # another
        if (copy := self._existing(producer.name, index, wanted, phase)) is not None:
            return copy
        value, name = tensor.meta["val"], tensor.name
        self.builder.meta = {**_origin(consumer), "phase": phase, "tensor": name}
        dtype = reduce_dtype or value.dtype
        is_reduced = wanted != layout and is_partial_sum(layout, self.mesh)
        if is_reduced and dtype.itemsize < value.dtype.itemsize:
            local = self._reduced(local, redistribution, value, name, dtype)
            local.meta |= {"global": value, "layout": wanted}
        else:
            for step in redistribution.steps:
                before, local = local, self.emitter(step, local, value.shape, name)
                if local is not before:  # moves over axes of one device make no node
                    local.meta |= {"global": value, "layout": step.after}
        if redistribution.steps:
            self.copies[producer.name, index, wanted, phase] = local
            if (producer.name, index, wanted) in self.sharding.kept:
                local.meta["kept"] = True
        return local

    def _reduced(self, local: fx.Node, redistribution, value: torch.Tensor, name: str, dtype: torch.dtype) -> fx.Node:
        """Return a local value after a redistribution in a narrow type; what was cast to its own type is taken as it
        was before."""
        is_cast = local.target is aten._to_copy.default and operand(local).meta["val"].dtype == dtype
        narrow = operand(local) if is_cast else self.builder.call(aten._to_copy.default, local, dtype=dtype)
        for step in redistribution.steps:
            narrow = self.emitter(step, narrow, value.shape, name)
        return self.builder.call(aten._to_copy.default, narrow, dtype=value.dtype)

    def _existing(self, producer: str, index: int, layout: Layout, phase: str) -> fx.Node | None:
        copy = self.copies.get((producer, index, layout, phase))
        if copy is None and (producer, index, layout) in self.sharding.kept:
            copy = self.copies.get((producer, index, layout, "forward"))
        return copy

    def finish(self) -> fx.GraphModule:
        """Remove dead nodes, check the graph and return its module."""
        self.builder.graph.eliminate_dead_code()
        self.builder.graph.lint()
        local = graph_module(self.root, self.builder.graph, "Local")
        local.meta |= {"rank": self.rank, "mesh": self.mesh}
        return local


def _origin(node: fx.Node) -> dict:
    return {key: node.meta.get(key, "") for key in ("phase", "module", "source")}


def _replicated(node: fx.Node) -> NodeSharding:
    def layouts(values):
        return tuple(Layout.replicated(v.dim()) for v in values)

    return NodeSharding(layouts(a.meta["val"] for a in tensor_arguments(node)), layouts(values_of(node)))


def _error(message: str, node: fx.Node, sharding) -> VerifyError:
    inputs = ", ".join(map(str, sharding.inputs))
    outputs = ", ".join(map(str, sharding.outputs))
    return VerifyError(
        f"{node.name}: {message} (layouts {inputs} -> {outputs})", node=describe(node), source=node.meta.get("source")
    )
