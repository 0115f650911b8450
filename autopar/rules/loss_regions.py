"""Find where logits are there for a loss alone: a last linear layer, the loss that reads it, and their backward.

    logits  = linear(x, weight)                        read by amax, vocab_loss and vocab_loss_bw, and by nothing else
    grad    = vocab_loss_bw(..., logits, ...)           read by linear_dx and linear_dw, and by nothing else
    dx, dw  = linear_dx(grad, weight), linear_dw(grad, x)

Views that keep the vocabulary last may lie between. Logits may also leave the graph, as an output that is made when it
is read. A joint graph is searched, or one device's, in which a redistribution of logits is another reader.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ..ir.graph import operand, outputs_of
from ..ops import autopar
from .reading import bound

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.alias.default)


@dataclass(frozen=True)
class LossRegion:
    """The nodes of one loss and its last linear layer. `logits`: the layer and views of it; `grads`: the gradient of
    the logits and views of that."""

    logits: tuple[fx.Node, ...]
    top: fx.Node
    sums: fx.Node
    back: fx.Node
    grads: tuple[fx.Node, ...]
    dx: fx.Node
    dw: fx.Node

    @property
    def linear(self) -> fx.Node:
        """Return the product that makes the logits."""
        return self.logits[0]

    @property
    def node(self) -> fx.Node:
        """Return the op by whose name a plan knows the region."""
        return self.linear

    @property
    def hidden(self) -> int:
        """Return the size of what the layer multiplies a row of."""
        return int(operand(self.linear, 1).meta["val"].shape[1])

    @property
    def never_made(self) -> tuple[fx.Node, ...]:
        """Return the tensors that are not there where the region is computed in blocks."""
        return self.logits + self.grads


def loss_regions(graph: fx.Graph) -> tuple[LossRegion, ...]:
    """Return the regions of a joint graph, in its order."""
    linears = graph.find_nodes(op="call_function", target=autopar.linear.default)
    return tuple(found for node in linears if (found := region_of(node)) is not None)


def region_of(linear: fx.Node) -> LossRegion | None:
    """Return the region of a linear layer, None if its result has other readers."""
    logits, readers = _views(linear)
    found = _sorted(readers, (aten.amax.default, autopar.vocab_loss.default, autopar.vocab_loss_bw.default))
    if found is None or found[1].args[0] not in logits or found[2].args[2] not in logits or not _over_last(found[0]):
        return None
    grads, readers = _views(found[2])
    products = _sorted(readers, (autopar.linear_dx.default, autopar.linear_dw.default))
    if products is None or any(node.args[0] not in grads for node in products):
        return None
    (top, sums, back), (dx, dw) = found, products
    return LossRegion(tuple(logits), top, sums, back, tuple(grads), dx, dw)


def unmade_outputs(graph: fx.Graph, tiled: Collection[str]) -> frozenset[str]:
    """Return the names of the outputs of a joint graph that are logits of the layers `tiled`."""
    if not tiled:
        return frozenset()
    logits = {n for region in loss_regions(graph) if region.linear.name in tiled for n in region.logits}
    return frozenset(role.name for node, role in outputs_of(graph) if role.kind == "output" and node in logits)


def _views(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return a node with the views of it that keep its last dim, and what else reads any of them; a graph's output does
    not count."""
    size, found, readers = node.meta["val"].shape[-1], [node], []
    for view in found:
        for user in view.users:
            if user.target in VIEWS and user.meta["val"].shape[-1:] == (size,):
                found.append(user)
            elif user.op != "output":
                readers.append(user)
    return found, readers


def _sorted(readers: list[fx.Node], targets: Sequence[object]) -> list[fx.Node] | None:
    """Return the readers in the order of `targets`, None unless there is one of each and no other."""
    by_target: dict[object, fx.Node] = {node.target: node for node in readers}
    if len(readers) != len(targets) or set(by_target) != set(targets):
        return None
    return [by_target[target] for target in targets]


def _over_last(top: fx.Node) -> bool:
    """Return whether a maximum is that over the last dim, which is dropped."""
    value = operand(top).meta["val"]
    return bool(top.meta["val"].shape == value.shape[:-1]) and list(bound(top)["dim"]) in ([-1], [value.dim() - 1])
