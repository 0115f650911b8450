"""A deep forward differentiated fast: of its equal blocks five are kept, and their joint graph is unrolled again.

    exported = ...                       # the forward of the whole model
    short = shorten(exported, model)     # that of blocks 0, 1, 2 and the last two, None where blocks are not alike
    captured = ...                       # the joint graph of the short forward
    whole = unroll(captured, short.blocks, exported.ties)

Unlike the shortened model of unroll.py, which serves planning, nothing is taken on trust: the forward is that of all
blocks, and each is compared with the next, node by node. What is left out is only their gradients' tracing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, cast

from torch import Tensor, fx, nn

from .. import _torch
from ..ir.graph import output_node, values_of
from ..ops.streams import stream_of
from .block_lists import RepeatedBlocks, candidates, name_if_kept
from .block_names import BlockNames, by_block
from .call_signature import Returns
from .export import Captured, Exported, module_path, strip
from .fake_parameters import Form, Forms
from .unroll import constants_of

Location = tuple[int, int]  # number of a block, and position among its nodes


@dataclass(frozen=True)
class Short:
    """A forward with five of the equal blocks of a model, whose own forward has the outputs `returns`. `alike`: by
    their positions, those of the outputs that stand for them, which are left."""

    exported: Exported
    blocks: RepeatedBlocks
    returns: Returns
    alike: tuple[int, ...]

    def completed(self, captured: Captured) -> Captured:
        """Return the capture of the short forward with its outputs named by their positions in the whole one."""
        positions = sorted(set(self.alike))

        def renamed(role: Any) -> Any:
            is_numbered = role.kind in ("output", "tangent")
            return replace(role, name=str(positions[int(role.name)])) if is_numbered else role

        for node in captured.graph.find_nodes(op="placeholder"):
            node.meta["role"] = renamed(node.meta["role"])
        output = output_node(captured.graph)
        output.meta["roles"] = list(map(renamed, output.meta["roles"]))
        found = dict(zip(positions, captured.returns.differentiable))
        returns = replace(self.returns, differentiable=[found[at] for at in self.alike[: self.returns.count]])
        return replace(captured, returns=returns, gathers=False)  # its constants are those of the whole forward


def shorten(exported: Exported, model: nn.Module) -> Short | None:
    """Return an exported forward with blocks 0, 1, 2 and the last two, which have the numbers 0 to 4; None where the
    model has no list of blocks that are alike but for a shift."""
    forms = {**exported.forms, **getattr(exported.forms, "buffers", {})}
    for blocks in candidates(model, forms):
        forward = _Forward.of(exported, blocks.names)
        if forward is not None and forward.is_periodic(forms):
            alike = forward.outputs_alike()
            return Short(forward.short(sorted(set(alike))), blocks, exported.returns, alike)
    return None


class _Forward:
    """The nodes of a forward by block: `members` of blocks 1 to `count` - 2; the others belong to the first or the last
    block, or to what lies before and after."""

    def __init__(self, exported: Exported, names: BlockNames, members: dict[int, list[fx.Node]]):
        self.exported, self.names, self.count, self.members = exported, names, names.count, members
        self.location: dict[fx.Node, Location] = {
            node: (block, at) for block, nodes in members.items() for at, node in enumerate(nodes)
        }
        graph = exported.graph_module.graph
        last = max((i for i, n in enumerate(graph.nodes) if n in self.location and n.op == "call_function"), default=0)
        self.tail = {n for i, n in enumerate(graph.nodes) if i > last and n not in self.location}
        self.streams = 0  # random streams of a block

    @staticmethod
    def of(exported: Exported, names: BlockNames) -> _Forward | None:
        """Find the blocks, None if they are not all there in their order."""
        nodes = list(exported.graph_module.graph.nodes)
        operations = [n for n in nodes if n.op == "call_function"]
        first: dict[int, int] = {}
        for at, node in enumerate(operations):
            number = names.number(module_path(node))
            if number is not None:
                first.setdefault(number, at)
        if list(first) != list(range(names.count)):
            return None
        leaves: dict[int, list[fx.Node]] = {}
        for node in nodes:
            if node.op == "get_attr" and (number := names.number(strip(str(node.target)))) is not None:
                leaves.setdefault(number, []).append(node)
        members = {b: [*leaves.get(b, []), *operations[first[b] : first[b + 1]]] for b in range(1, names.count - 1)}
        return _Forward(exported, names, members)

    def is_periodic(self, forms: Mapping[str, Form]) -> bool:
        """Return whether blocks 1 to `count` - 2 are the same but for a shift, and read only themselves, the one before
        and what all read; and what comes after reads the last of them alone."""
        _, first, *rest, _ = by_block(self.names, forms)  # of tensors that no node reads too
        if len({len(nodes) for nodes in self.members.values()}) != 1 or any(found != first for found in rest):
            return False
        if any(self._is_kept(name) != self._is_kept(place) for name, place in self.exported.ties.items()):
            return False
        pairs = list(zip(self.members[1], self.members[2]))
        drawn = ((stream_of(a), stream_of(b)) for a, b in pairs)
        self.streams = next((b - a for a, b in drawn if a is not None and b is not None), 0)
        for block in range(1, self.count - 2):
            if not all(map(self._is_next, self.members[block], self.members[block + 1])):
                return False
        for node in {user for member in self.location for user in member.users} - self.location.keys():
            if node.op == "output":
                continue
            if node not in self.tail:
                return False
            if any(self.location[a][0] != self.count - 2 for a in node.all_input_nodes if a in self.location):
                return False
        return self._outputs_are_periodic()

    def _outputs_are_periodic(self) -> bool:
        """Return whether blocks give the same of their values as outputs, those of each at the same distance from those
        of the one before, and none of them twice."""
        given = self._given()
        for at in {at for _, at in given}:
            places = [given.get((block, at)) for block in range(1, self.count - 1)]
            numbers = [place for place in places if place is not None]
            if len(numbers) < len(places) or len({b - a for a, b in zip(numbers, numbers[1:])}) > 1:
                return False
        return len(given) == sum(value in self.location for value in self._outputs)

    def outputs_alike(self) -> tuple[int, ...]:
        """Return for each output, by position, that of the one that stands for it where blocks are left out."""
        given = self._given()
        alike = {given[block, at]: given[2, at] for block, at in given if 2 < block < self.count - 2}
        return tuple(alike.get(position, position) for position in range(len(self._outputs)))

    def _given(self) -> dict[Location, int]:
        """Return the positions of the outputs that blocks make."""
        return {self.location[value]: i for i, value in enumerate(self._outputs) if value in self.location}

    @property
    def _outputs(self) -> Sequence[fx.Node]:
        return cast("Sequence[fx.Node]", output_node(self.exported.graph_module.graph).args[0])

    def _is_next(self, one: fx.Node, two: fx.Node) -> bool:
        """Return whether a node of a block has its like in the next one."""
        if one.op != two.op or (one.op == "call_function" and one.target is not two.target):
            return False
        if one.op == "get_attr":
            return self._form(one) == self._form(two)
        forms = [[(tuple(v.shape), v.dtype, v.stride(), v.requires_grad) for v in values_of(n)] for n in (one, two)]
        constants = [constants_of(n, self.location[n][0] * self.streams) for n in (one, two)]
        if forms[0] != forms[1] or constants[0] != constants[1]:
            return False
        reads = zip(one.all_input_nodes, two.all_input_nodes, strict=True)
        return len(one.all_input_nodes) == len(two.all_input_nodes) and all(self._is_shift(*pair) for pair in reads)

    def _form(self, leaf: fx.Node) -> tuple:
        """Return what a parameter or buffer of a block is, with its name inside of the block."""
        name = strip(str(leaf.target))
        value = attrgetter(str(leaf.target))(self.exported.graph_module)
        return (
            self.names.renamed(name, 1),
            tuple(value.shape),
            value.dtype,
            isinstance(value, nn.Parameter),
            value.requires_grad,
        )

    def _is_shift(self, left: fx.Node, right: fx.Node) -> bool:
        """Return whether what a node reads and what its like in the next block reads are a shift apart, or the same."""
        a, b = self.location.get(left), self.location.get(right)
        if a and b:
            return b == (a[0] + 1, a[1])
        if b:  # block 1 reads block 0, which lies with what is before the blocks
            return not a and b[0] == 1
        return left is right

    def short(self, positions: list[int]) -> Exported:
        """Return the forward without the blocks 3 to `count` - 3, with the outputs at these positions."""
        exported, graph = self.exported, fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        dropped = {node for block in range(3, self.count - 2) for node in self.members[block]}

        def read(node: fx.Node) -> fx.Node:
            return made[self.members[2][self.location[node][1]] if node in dropped else node]

        for node in exported.graph_module.graph.nodes:
            if node in dropped:
                continue
            if node.op == "output":
                made[node] = graph.output([read(self._outputs[i]) for i in positions])
                made[node].meta = dict(node.meta)
                continue
            made[node] = graph.node_copy(node, read)
            if node.op == "get_attr":
                made[node].target = self._renamed(str(node.target))
            if stack := node.meta.get("nn_module_stack"):
                made[node].meta["nn_module_stack"] = {
                    key: (self._renamed(entry[0]), *entry[1:]) if isinstance(entry, tuple) else entry
                    for key, entry in stack.items()
                }
        forms = Forms(self._kept(exported.forms), self._kept(getattr(exported.forms, "buffers", {})), (), ())
        ties = {self._renamed(n): self._renamed(first) for n, first in exported.ties.items() if self._is_kept(n)}
        returns = exported.returns.only(positions)
        return replace(exported, graph_module=self._module(graph), forms=forms, ties=ties, returns=returns)

    def _module(self, graph: fx.Graph) -> fx.GraphModule:
        """Return a module for the short graph, with its tensors in the order of the whole one's."""
        whole, root = self.exported.graph_module, nn.Module()
        tensors = (*whole.named_parameters(remove_duplicate=False), *whole.named_buffers(remove_duplicate=False))
        for name, tensor in tensors:
            if self._is_kept(name):
                _put(root, self._renamed(name), tensor)
        constants = {str(n.target) for n in graph.nodes if n.op == "get_attr"} - {
            self._renamed(n) for n, _ in tensors if self._is_kept(n)
        }
        for name in constants:
            setattr(root, name, getattr(whole, name))
        made = _torch.graph_module(root, graph)
        for name, child in root.named_children():
            setattr(made, name, child)
        for name in constants:  # a graph module makes buffers of them
            del made._buffers[name]
            setattr(made, name, getattr(whole, name))
        made.meta.update(whole.meta)
        return made

    def _kept(self, forms: Mapping[str, Form]) -> dict[str, Form]:
        return {self._renamed(name): form for name, form in forms.items() if self._is_kept(name)}

    def _is_kept(self, name: str) -> bool:
        return name_if_kept(strip(name), self.names) is not None

    def _renamed(self, name: str) -> str:
        """Return a name that is kept as it is in the short model."""
        inner = strip(name)
        kept = name_if_kept(inner, self.names)
        assert kept is not None
        return name[: len(name) - len(inner)] + kept


def _put(root: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a parameter or buffer under a qualified name, in modules that are made for it."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    if isinstance(tensor, nn.Parameter):
        root.register_parameter(leaf, tensor)
    else:
        root.register_buffer(leaf, tensor)
