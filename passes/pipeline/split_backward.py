"""Split a stage's backward in two: B, the gradients that the stage before waits for, and W, those of the parameters.

W may run at any time after B (zero bubble pipeline parallelism: Qi et al., arXiv 2401.10241, section 2). B has the
chain of gradients through the layers: what the returned gradients and those of several parameters follow from. W is the
rest, the gradient products of one parameter each; it reads what B or the backward's inputs leave it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from ...ir.graph import outputs_of
from ..distribute.partition import extract


@dataclass(frozen=True)
class SplitBackward:
    """input: (inputs of the backward) -> (its returned gradients, then `stash`). weight: (the backward's inputs at
    `weight_inputs`, then `stash`) -> gradients of the parameters. Roles are on the `output` nodes."""

    input: fx.GraphModule
    weight: fx.GraphModule
    weight_inputs: tuple[int, ...]  # positions
    stash: tuple[str, ...]  # names


def split_backward(backward: fx.GraphModule) -> SplitBackward:
    """Split a stage's local backward graph into B and W."""
    pairs = outputs_of(backward.graph)
    returned = [(v, r) for v, r in pairs if r.kind == "returned"]
    gradients = [(v, r) for v, r in pairs if r.kind != "returned"]
    chain = _ancestors([v for v, _ in returned]) | _shared([v for v, _ in gradients])
    inputs = [n for n in backward.graph.nodes if n.op == "placeholder"]
    needed = _ancestors([v for v, _ in gradients], stop=chain)
    read = {a for n in needed if n not in chain for a in n.all_input_nodes} | {v for v, _ in gradients}
    weight_inputs = [i for i, n in enumerate(inputs) if n in read]
    stash = [n for n in backward.graph.nodes if n in chain and n in read and n.op == "call_function"]
    first = extract(backward, inputs, [v for v, _ in returned] + stash, [r for _, r in returned] + [None] * len(stash))
    second = extract(
        backward, [inputs[i] for i in weight_inputs] + stash, [v for v, _ in gradients], [r for _, r in gradients]
    )
    return SplitBackward(first, second, tuple(weight_inputs), tuple(n.name for n in stash))


def _ancestors(nodes: list, stop: Collection[fx.Node] = ()) -> set[fx.Node]:
    found, stack = set(), [n for n in nodes if isinstance(n, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            if node not in stop:
                stack.extend(node.all_input_nodes)
    return found


def _shared(gradients: list) -> set[fx.Node]:
    """Return what the gradients of several parameters follow from."""
    once: set[fx.Node] = set()
    several: set[fx.Node] = set()
    for gradient in gradients:
        mine = _ancestors([gradient], stop=several)
        several |= mine & once
        once |= mine
    return several
