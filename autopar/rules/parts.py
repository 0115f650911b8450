"""Find the tensors that may be sharded inside equal parts, because some op cuts them into pieces or joins them from
pieces.

GPT-2 computes query, key and value by one weight: the split after it wants its input sharded inside 3 parts, and so the
linear's output, the weight, the bias and all their gradients may be. An `Inner(f, k)` entry of a rule makes k a
candidate of that tensor's dim; candidates spread through plain factors, from inputs to outputs and back, until nothing
changes.

A causal attention cut along its queries is balanced if they are cut in zigzag, which counts as a number of parts too:
all ops between the inputs and it may then hold the sequence so. It is asked for, as it is of use only where a sequence
is cut at all.

Only what spreads to an input of the graph is kept, such as a fused weight. The halves of rotary embeddings, say, would
double the choices of many ops and save nothing.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping

from torch import fx

from ..ir.graph import tensor_arguments, tensor_of, values_of
from ..ir.layout import ZIGZAG
from ..ops import ATTENTION
from .lookup import rule_of
from .reading import bound, input_shapes, output_indices, output_shapes
from .rule import Inner, Rows, Rule, entries_of

Tensor = tuple[fx.Node, int]  # a producer and which of its outputs, as `tensor_of` says
Candidates = Mapping[Tensor, tuple[frozenset[int], ...]]
Found = Mapping[tuple[Tensor, int], set[int]]  # by tensor and dim

LARGEST = 4  # fused weights have few pieces (gate and up; query, key and value); more candidates only slow the planner


def propagate_parts(
    graph: fx.Graph, largest: int = LARGEST, zigzag: bool = False
) -> dict[Tensor, tuple[frozenset[int], ...]]:
    """Return for every tensor and dim the counts of equal parts, besides 1, that it may be sharded inside; up to
    `largest`, and ZIGZAG if that is asked for."""
    ops = [_Op(node, rule) for node in graph.nodes if (rule := rule_of(node)) is not None]
    seeds: Found = defaultdict(set)
    for op in ops:
        for tensor, dims, shape in op.tensors:
            for d, (dim, size) in enumerate(zip(dims, shape)):
                counts = {e.parts for e in entries_of(dim) if isinstance(e, Inner)}
                seeds[tensor, d] |= {k for k in counts if k <= largest and size > k}
        if zigzag and op.node.target in ATTENTION and bound(op.node)["causal"]:
            for tensor, d in op.plain_dims["s"]:
                seeds[tensor, d].add(ZIGZAG)
    found = _spread(ops, seeds)
    found = _spread(ops, {at: counts for at, counts in found.items() if at[0][0].op == "placeholder"})
    return {
        (node, i): tuple(frozenset(found[(node, i), d]) for d in range(value.dim()))
        for node in graph.nodes
        if tensor_of(node)[0] is node
        for i, value in zip(output_indices(node), values_of(node))
    }


def factor_parts(node: fx.Node, rule: Rule, candidates: Candidates) -> dict[str, tuple[int, ...]]:
    """Return the factors of a node's rule that may be sharded inside k equal parts: the argument `parts` of
    `strategies`."""
    return _Op(node, rule).allowed(lambda tensor, d: candidates[tensor][d])


def cut_inside(node: fx.Node, rule: Rule, parts: int) -> set[str]:
    """Return the factors of a node's rule that may be sharded inside so many equal parts."""
    return set(_Op(node, rule).allowed(lambda tensor, d: {parts}))


class _Op:
    """A node seen through its rule.

    tensors: (tensor, dims, shape) of all arguments and outputs.
    plain_dims: the dims that carry each factor plainly.
    sizes: of the factors that may be sharded inside parts: not those that are inner parts already, nor those of which a
        device needs one range.
    """

    def __init__(self, node: fx.Node, rule: Rule):
        inputs = zip(map(tensor_of, tensor_arguments(node)), rule.inputs, input_shapes(node))
        outputs = zip([(node, i) for i in output_indices(node)], rule.outputs, output_shapes(node))
        self.node, self.tensors = node, [*inputs, *outputs]
        self.zigzag = rule.zigzag
        self.plain_dims: dict[str, list[tuple[Tensor, int]]] = defaultdict(list)
        self.sizes: dict[str, int] = {}
        inner = set(rule.contiguous - rule.zigzag)
        for tensor, dims, shape in self.tensors:
            for d, (dim, size) in enumerate(zip(dims, shape)):
                for entry in entries_of(dim):
                    if isinstance(entry, (Inner, Rows)):
                        inner.add(entry.factor)
                    else:
                        self.plain_dims[entry].append((tensor, d))
                        self.sizes[entry] = rule.even.get(entry, size)
        for name in inner & set(self.sizes):
            del self.sizes[name]

    def allowed(self, candidates: Callable[[Tensor, int], Iterable[int]]) -> dict[str, tuple[int, ...]]:
        """Return the counts of parts of each factor: the candidates of its dims that divide it."""
        result = {}
        for factor, size in self.sizes.items():
            counts = {k for tensor, d in self.plain_dims[factor] for k in candidates(tensor, d)}
            if factor in self.zigzag:
                counts &= {ZIGZAG}
            if fitting := sorted(k for k in counts if size % k == 0 and size > k):
                result[factor] = tuple(fitting)
        return result


def _spread(ops: list[_Op], seeds: Found) -> Found:
    """Return all dims that the seeds reach through plain factors."""
    found: Found = defaultdict(set, {at: set(counts) for at, counts in seeds.items()})
    users: dict[Tensor, list[_Op]] = defaultdict(list)
    for op in ops:
        for tensor, _, _ in op.tensors:
            users[tensor].append(op)
    waiting = deque(ops)
    while waiting:
        op = waiting.popleft()
        for factor, counts in op.allowed(lambda tensor, d: found[tensor, d]).items():
            for tensor, d in op.plain_dims[factor]:
                if not found[tensor, d].issuperset(counts):
                    found[tensor, d].update(counts)
                    waiting.extend(user for user in users[tensor] if user is not op)
    return found
