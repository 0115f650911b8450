"""Which tensors may be sharded inside equal parts, because some op cuts them into pieces or joins them from pieces.

GPT-2 computes query, key and value by one weight: the split after it wants its input sharded inside 3 parts, and so the
linear's output, the weight, the bias and all their gradients may be. An `Inner(f, k)` entry of a rule makes k a
candidate of that tensor's dim; candidates spread through plain factors, from inputs to outputs and back, until nothing
changes.

Only what spreads to an input of the graph is kept, such as a fused weight. The halves of rotary embeddings, say, would
double the choices of many ops and save nothing.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping

from torch import fx

from ..graph import tensor_arguments, tensor_of, values_of
from .reading import input_shapes, output_indices, output_shapes
from .rule import Inner, Rule, entries_of, name_of
from .table import rule_of

Tensor = tuple[fx.Node, int]  # a producer and which of its outputs, as `tensor_of` says
Candidates = Mapping[Tensor, tuple[frozenset[int], ...]]
Found = Mapping[tuple[Tensor, int], set[int]]  # by tensor and dim

LARGEST = 4  # fused weights have few pieces (gate and up; query, key and value); more candidates only slow the planner


def propagate_parts(graph: fx.Graph, largest: int = LARGEST) -> dict[Tensor, tuple[frozenset[int], ...]]:
    """For every tensor and dim the counts of equal parts, besides 1, that it may be sharded inside; up to `largest`."""
    rules = {node: rule for node in graph.nodes if (rule := rule_of(node)) is not None}
    seeds: Found = defaultdict(set)
    for node, rule in rules.items():
        for tensor, dims, shape in _slots(node, rule):
            for d, (dim, size) in enumerate(zip(dims, shape)):
                counts = {e.parts for e in entries_of(dim) if isinstance(e, Inner)}
                seeds[tensor, d] |= {k for k in counts if k <= largest and size > k}
    found = _spread(rules, seeds)
    found = _spread(rules, {place: counts for place, counts in found.items() if place[0][0].op == "placeholder"})
    return {
        (node, i): tuple(frozenset(found[(node, i), d]) for d in range(value.dim()))
        for node in graph.nodes
        if tensor_of(node)[0] is node
        for i, value in zip(output_indices(node), values_of(node))
    }


def _spread(rules: dict[fx.Node, Rule], seeds: Found) -> Found:
    """All places that the seeds reach through plain factors."""
    found: Found = defaultdict(set, {place: set(counts) for place, counts in seeds.items()})
    users: dict[Tensor, list[fx.Node]] = defaultdict(list)
    for node, rule in rules.items():
        for tensor, _, _ in _slots(node, rule):
            users[tensor].append(node)
    waiting = deque(rules)
    while waiting:
        node = waiting.popleft()
        for factor, counts in _allowed(node, rules[node], lambda tensor, d: found[tensor, d]).items():
            for tensor, d in _places(node, rules[node], factor):
                if not found[tensor, d].issuperset(counts):
                    found[tensor, d].update(counts)
                    waiting.extend(user for user in users[tensor] if user is not node)
    return found


def factor_parts(node: fx.Node, rule: Rule, candidates: Candidates) -> dict[str, tuple[int, ...]]:
    """Factors of a node's rule that may be sharded inside k equal parts: the argument `parts` of `strategies`."""
    return _allowed(node, rule, lambda tensor, d: candidates[tensor][d])


def _allowed(node: fx.Node, rule: Rule, candidates: Callable[[Tensor, int], set[int]]) -> dict[str, tuple[int, ...]]:
    """Candidates of each factor, without factors that are inner parts already or need one range a device, and without
    counts that do not divide the factor."""
    fixed = set(rule.contiguous)
    sizes: dict[str, int] = dict(rule.even)
    for _, dims, shape in _slots(node, rule):
        for dim, size in zip(dims, shape):
            fixed |= {e.factor for e in entries_of(dim) if isinstance(e, Inner)}
            if isinstance(dim, str):
                sizes.setdefault(dim, size)
    result = {}
    for factor in rule.factors():
        if factor not in fixed:
            counts = {k for tensor, d in _places(node, rule, factor) for k in candidates(tensor, d)}
            allowed = tuple(sorted(k for k in counts if sizes[factor] % k == 0 and sizes[factor] > k))
            if allowed:
                result[factor] = allowed
    return result


def _slots(node: fx.Node, rule: Rule) -> Iterator[tuple[Tensor, tuple, tuple[int, ...]]]:
    """(tensor, its dims in the rule, its shape) for every argument and output."""
    inputs = [tensor_of(argument) for argument in tensor_arguments(node)]
    yield from zip(inputs, rule.inputs, input_shapes(node))
    yield from zip([(node, i) for i in output_indices(node)], rule.outputs, output_shapes(node))


def _places(node: fx.Node, rule: Rule, factor: str) -> Iterator[tuple[Tensor, int]]:
    """The dims that carry a factor plainly."""
    for tensor, dims, _ in _slots(node, rule):
        for d, dim in enumerate(dims):
            if any(not isinstance(e, Inner) and name_of(e) == factor for e in entries_of(dim)):
                yield tensor, d
