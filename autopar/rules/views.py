"""Rules of views: ops that move no value, only rename, merge, split, stretch or drop dims.

Merging and splitting: read both shapes as products of common factors, outermost first. (B, S, 3*H*D) -> (B, S, 3, H, D)
is

    d0, d1, (d2 d3 d4) -> d0, d1, d2, d3, d4        d0 = B, d1 = S, d2 = 3, d3 = H, d4 = D

A dim cut along its outermost factor is a plain shard, one cut along an inner factor is sharded inside each of as many
equal parts as the factors outside it have elements: H is `Inner("d3", 3)` of the merged dim. Compound factors as in
Shardy (github.com/openxla/shardy, docs/propagation.md).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from torch import fx

from .families import sets
from .reading import Shape, aligned, bound, dims_of, input_shapes, named, output_shapes
from .rule import Dim, Inner, Rule

LINEAR = sets(([0],))


def reshape(node: fx.Node) -> Rule | None:
    """Return the rule of view, reshape, flatten and unflatten: whatever the arguments, the two shapes say all."""
    (source,), (target,) = input_shapes(node), output_shapes(node)
    if 0 in source:
        return None
    inputs, outputs, even = regroup(source, target)
    return Rule((inputs,), (outputs,), LINEAR, even=even)


def regroup(source: Shape, target: Shape) -> tuple[tuple[Dim, ...], tuple[Dim, ...], dict[str, int]]:
    """Return the dims of both shapes in common factors, and the sizes of factors that must be cut evenly (all but whole
    dims)."""
    source_factors: list[list[tuple[str, int]]] = [[] for _ in source]
    target_factors: list[list[tuple[str, int]]] = [[] for _ in target]
    left = deque((d, size) for d, size in enumerate(source) if size > 1)
    right = deque((d, size) for d, size in enumerate(target) if size > 1)
    count = 0
    while left and right:
        (d, x), (e, y) = left.popleft(), right.popleft()
        common = math.gcd(x, y)
        if common > 1:
            source_factors[d].append((f"d{count}", common))
            target_factors[e].append((f"d{count}", common))
            count += 1
        if common == min(x, y):
            if x > common:
                left.appendleft((d, x // common))
            if y > common:
                right.appendleft((e, y // common))
        else:
            _skip_group(left, right, x, y)
    even = {
        name: size
        for dims, shape in ((source_factors, source), (target_factors, target))
        for factors, whole in zip(dims, shape)
        for name, size in factors
        if size < whole
    }
    return tuple(map(_compound, source_factors)), tuple(map(_compound, target_factors)), even


def _skip_group(left: deque[tuple[int, int]], right: deque[tuple[int, int]], x: int, y: int) -> None:
    """Drop dims until both sides have dropped as many elements: (6, 4) and (4, 6) share only their outermost 2."""
    while x != y:
        if x < y:
            x *= left.popleft()[1]
        else:
            y *= right.popleft()[1]


def _compound(factors: list[tuple[str, int]]) -> Dim:
    entries, outside = [], 1
    for name, size in factors:
        entries.append(name if outside == 1 else Inner(name, outside))
        outside *= size
    return tuple(entries) if len(entries) > 1 else entries[0] if entries else None


def permute(node: fx.Node) -> Rule:
    """Return the rule of permute: each dim keeps its factor."""
    ndim = len(input_shapes(node)[0])
    return _renamed(node, [d % ndim for d in bound(node)["dims"]])


def transpose(node: fx.Node) -> Rule:
    """Return the rule of transpose: two dims change places."""
    arguments, ndim = bound(node), len(input_shapes(node)[0])
    order = list(range(ndim))
    if ndim:
        i, j = arguments["dim0"] % ndim, arguments["dim1"] % ndim
        order[i], order[j] = j, i
    return _renamed(node, order)


def t(node: fx.Node) -> Rule:
    """Return the rule of t: the dims in reverse order."""
    return _renamed(node, list(reversed(range(len(input_shapes(node)[0])))))


def unsqueeze(node: fx.Node) -> Rule:
    """Return the rule of unsqueeze: the new dim has no factor."""
    ndim = len(input_shapes(node)[0])
    order: list[int | None] = list(range(ndim))
    order.insert(bound(node)["dim"] % (ndim + 1), None)
    return _renamed(node, order)


def squeeze(node: fx.Node) -> Rule:
    """Return the rule of squeeze: a listed dim of another size than 1 stays, but a shard of it may have size 1 and
    would go, so it is not sharded."""
    (shape,) = input_shapes(node)
    listed = dims_of(bound(node).get("dim"), len(shape))
    dims = tuple(None if i in listed else name for i, name in enumerate(named(len(shape))))
    return Rule((dims,), (tuple(n for i, n in enumerate(dims) if not (i in listed and shape[i] == 1)),), LINEAR)


def _renamed(node: fx.Node, order: Sequence[int | None]) -> Rule:
    """Return a rule in which output dim i is input dim order[i], or new."""
    names = named(len(input_shapes(node)[0]))
    return Rule((names,), (tuple(None if d is None else names[d] for d in order),), LINEAR)


def expand(node: fx.Node) -> Rule:
    """Return the rule of expand: a stretched dim is a factor of the output alone, so a device makes as many copies as
    it needs."""
    (source,), (target,) = input_shapes(node), output_shapes(node)
    names = named(len(target))
    return Rule((aligned(source, target, names),), (names,), LINEAR)


def repeat(node: fx.Node) -> Rule:
    """Return the rule of repeat: copies of a dim are equal parts of the output, and a factor of the output alone;
    copies of nothing (a new dim or one of size 1) are as in `expand`."""
    (source,), (target,) = input_shapes(node), output_shapes(node)
    names, new = named(len(target)), len(target) - len(source)
    outputs: list[Dim] = list(names)
    even = {}
    for d in range(new, len(target)):
        copies = target[d] // max(source[d - new], 1)
        if copies > 1 and source[d - new] > 1:
            outputs[d], even[names[d]], even[f"c{d}"] = (f"c{d}", Inner(names[d], copies)), source[d - new], copies
    inputs = tuple(None if size == 1 else names[new + d] for d, size in enumerate(source))
    return Rule((inputs,), (tuple(outputs),), LINEAR, even=even)


def to_complex(node: fx.Node) -> Rule:
    """Return the rule of view_as_complex: the last dim holds the two components."""
    names = named(len(output_shapes(node)[0]))
    return Rule(((*names, None),), (names,), LINEAR)


def to_real(node: fx.Node) -> Rule:
    """Return the rule of view_as_real: the new last dim holds the two components."""
    names = named(len(input_shapes(node)[0]))
    return Rule((names,), ((*names, None),), LINEAR)
